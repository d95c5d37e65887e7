// Several processes train one model in mixed precision, each on its part of every batch:
//
//     mpirun -np 2 ./data_parallel
//
// Exits with 1 if the loss did not fall, or if the processes end with different weights.
#include <mezzo/distributed/data_parallel.h>
#include <mezzo/distributed/mpi_backend.h>
#include <mezzo/mezzo.h>

#include <torch/torch.h>

#include <cstdio>
#include <vector>

namespace {

constexpr int kSteps = 60;
constexpr int kBatchSize = 64;  // of all ranks together

using Group = c10::intrusive_ptr<c10d::Backend>;

/// Waits until `tensor` is the reduction of all ranks' tensors.
void all_reduce(const Group& world, const torch::Tensor& tensor, c10d::ReduceOp::RedOpType op) {
  std::vector<torch::Tensor> tensors = {tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  world->allreduce(tensors, options)->wait();
}

struct Batch {
  torch::Tensor input, target;
};

/// This rank's part of a batch that all ranks draw alike: they have the same seed.
Batch next_batch(const torch::Tensor& teacher, const Group& world) {
  const auto input = torch::randn({kBatchSize, 16});
  const auto own = input.tensor_split(world->getSize())[static_cast<std::size_t>(world->getRank())];
  return {own, own.mm(teacher).argmax(1)};
}

double mean_over_ranks(const torch::Tensor& loss, const Group& world) {
  const auto sum = loss.detach().clone();
  all_reduce(world, sum, c10d::ReduceOp::SUM);
  return sum.item<double>() / world->getSize();
}

bool is_alike_on_all_ranks(const torch::Tensor& tensor, const Group& world) {
  const auto largest = tensor.detach().clone();
  all_reduce(world, largest, c10d::ReduceOp::MAX);
  const auto differs = torch::tensor(torch::equal(largest, tensor) ? 0 : 1);
  all_reduce(world, differs, c10d::ReduceOp::MAX);
  return differs.item<int>() == 0;
}

}  // namespace

int main() {
  const mezzo::MpiEnvironment mpi;
  const Group world = c10::make_intrusive<mezzo::MpiBackend>(MPI_COMM_WORLD);

  torch::manual_seed(
      0);  // all ranks draw the same data; with other weights they would begin alike too
  const auto teacher = torch::randn({16, 4});  // which class each input belongs to
  torch::nn::Sequential model(torch::nn::Linear(16, 64), torch::nn::GELU(),
                              torch::nn::Linear(64, 4));

  mezzo::DataParallel ddp(model, world);  // all ranks have rank 0's weights
  mezzo::optim::AdamW optimizer(model->parameters(), 1e-2);
  mezzo::GradScaler scaler;

  const auto backward = [&](const Batch& batch) {
    torch::Tensor loss;
    {
      mezzo::Autocast<torch::kCPU> autocast;
      loss = torch::nn::functional::cross_entropy(ddp(batch.input), batch.target);
    }
    scaler.scale(loss / 2).backward();  // two micro-batches a step
    return loss;
  };

  torch::Tensor first_loss, loss;  // of this rank
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    {
      const auto no_sync = ddp.no_sync();  // all micro-batches but the last only accumulate
      backward(next_batch(teacher, world));
    }
    loss = backward(next_batch(teacher, world));  // and this one sums over the ranks
    scaler.step(optimizer, {.max_norm = 1.0});    // or skips, on all ranks alike
    scaler.update();

    if (step == 0) first_loss = loss.detach();
    if (step % 10 == 9) {  // on all ranks, for the mean is a collective
      const double mean = mean_over_ranks(loss, world);
      if (world->getRank() == 0) {
        std::printf("step %2d  loss %.3f  scale %g\n", step + 1, mean, scaler.get_scale());
      }
    }
  }
  bool is_alike = true;
  for (const auto& parameter : model->parameters()) {
    is_alike = is_alike_on_all_ranks(parameter, world) && is_alike;
  }
  const bool fell = mean_over_ranks(loss, world) < mean_over_ranks(first_loss, world) / 2;
  return is_alike && fell ? 0 : 1;
}
