// Distributed data-parallel training in mixed precision; with --zero1 the optimizer state is
// sharded:
//
//     mpirun -np 2 ./ddp [--zero1]
//
// Exits with 1 if the loss does not decrease, or if the ranks end with different weights.
#include <mezzo/distributed/distributed_data_parallel.h>
#include <mezzo/distributed/mpi_backend.h>
#include <mezzo/distributed/sharded_optimizer.h>
#include <mezzo/mezzo.h>

#include <torch/torch.h>

#include <cstdio>
#include <optional>
#include <string>
#include <vector>

namespace {

using Backend = c10::intrusive_ptr<c10d::Backend>;

/// Returns the sum or maximum over all ranks. A collective.
torch::Tensor all_reduce(const torch::Tensor& tensor, const Backend& world,
                         c10d::ReduceOp::RedOpType op) {
  std::vector<torch::Tensor> tensors = {tensor.detach().clone()};
  world->allreduce(tensors, {.reduceOp = op})->wait();
  return tensors[0];
}

/// Trains, and returns whether the mean loss of the ranks has halved. `forward` and `no_sync` are
/// those of DistributedDataParallel or ShardedOptimizer. A sample has 16 inputs and the class.
template <class Optimizer, class Forward, class NoSync>
bool train(Optimizer& optimizer, const Forward& forward, const NoSync& no_sync,
           const torch::Tensor& samples, const Backend& world) {
  const auto ranks = static_cast<std::size_t>(world->getSize());
  torch::data::samplers::DistributedRandomSampler sampler(
      1024, ranks, static_cast<std::size_t>(world->getRank()));
  mezzo::GradScaler scaler;
  double first = 0, last = 0;
  for (std::size_t epoch = 0; epoch < 8; ++epoch) {
    sampler.set_epoch(epoch);  // shuffles, equally on all ranks
    auto loader = torch::data::make_data_loader(
        torch::data::datasets::TensorDataset(samples).map(
            torch::data::transforms::Stack<torch::data::TensorExample>()),
        sampler, 64 / ranks);
    torch::Tensor loss;
    for (auto& batch : mezzo::micro_batches(*loader, 2)) {
      std::optional<mezzo::NoSyncGuard> guard;
      if (!batch.is_last()) guard.emplace(no_sync());  // all-reduce after the last one
      loss = mezzo::autocast({.device_type = torch::kCPU}, [&] {
        return torch::nn::functional::cross_entropy(forward(batch.data.narrow(1, 0, 16)),
                                                    batch.data.select(1, 16).to(torch::kLong));
      });
      scaler.scale(batch.normalize_loss(loss)).backward();
      if (!batch.is_last()) continue;
      scaler.step(optimizer, {.max_norm = 1.0});  // all ranks step, or all skip
      scaler.update();
      optimizer.zero_grad();
    }
    last = all_reduce(loss, world, c10d::ReduceOp::SUM).item<double>() / static_cast<double>(ranks);
    if (epoch == 0) first = last;
    if (world->getRank() == 0) {
      std::printf("epoch %zu  loss %.3f  scale %g\n", epoch + 1, last, scaler.get_scale());
    }
  }
  return last < first / 2;
}

}  // namespace

int main(int argc, char** argv) {
  const bool is_zero1 = argc > 1 && std::string(argv[1]) == "--zero1";
  const mezzo::MpiEnvironment mpi;
  const Backend world = c10::make_intrusive<mezzo::MpiBackend>(MPI_COMM_WORLD);

  torch::manual_seed(0);  // all ranks create the same data, and sample parts of it
  const auto inputs = torch::randn({1024, 16}), teacher = torch::randn({16, 4});
  const auto samples = torch::cat({inputs, inputs.mm(teacher).argmax(1, /*keepdim=*/true)}, 1);
  torch::nn::Sequential model(torch::nn::Linear(16, 64), torch::nn::GELU(),
                              torch::nn::Linear(64, 4));

  bool has_learned = false;
  if (is_zero1) {
    mezzo::ShardedOptimizer<mezzo::optim::AdamW> optimizer(model->parameters(), world,
                                                           mezzo::optim::AdamWOptions(1e-2));
    has_learned = train(
        optimizer, [&](const torch::Tensor& x) { return model->forward(x); },
        [&] { return optimizer.no_sync(); }, samples, world);
  } else {
    mezzo::DistributedDataParallel ddp(model, world);  // broadcasts rank 0's weights
    mezzo::optim::AdamW optimizer(model->parameters(), 1e-2);
    has_learned = train(
        optimizer, [&](const torch::Tensor& x) { return ddp(x); }, [&] { return ddp.no_sync(); },
        samples, world);
  }
  const auto weights = torch::nn::utils::parameters_to_vector(model->parameters());
  return all_reduce(weights, world, c10d::ReduceOp::MAX).equal(weights) && has_learned ? 0 : 1;
}
