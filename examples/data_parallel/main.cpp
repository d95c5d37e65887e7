// Several processes train one model in mixed precision, each on its part of every batch:
//
//     mpirun -np 2 ./data_parallel
//
// Exits with 1 if the loss did not fall, or if the processes end with different weights.
#include <mezzo/distributed/data_parallel.h>
#include <mezzo/distributed/mpi_backend.h>
#include <mezzo/mezzo.h>

#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <utility>
#include <vector>

namespace {

constexpr int kEpochs = 8;
constexpr int64_t kSamples = 1024;
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

/// The data. In each epoch each rank gets another part of the same size, as from Python's
/// DistributedSampler.
class RankedData {
 public:
  RankedData(Batch all, const Group& world)
      : all_(std::move(all)),
        batch_size_(static_cast<std::size_t>(kBatchSize / world->getSize())),
        sampler_(static_cast<std::size_t>(all_.input.size(0)),
                 static_cast<std::size_t>(world->getSize()),
                 static_cast<std::size_t>(world->getRank())) {}

  void begin_epoch(int epoch) {
    sampler_.set_epoch(static_cast<std::size_t>(epoch));  // a new division, the same on all ranks
    sampler_.reset();
  }
  /// Returns the next batch; none at the end of the epoch, which comes after the same number of
  /// batches on all ranks.
  std::optional<Batch> next() {
    const auto chosen = sampler_.next(batch_size_);
    if (!chosen) return std::nullopt;
    const auto indices = torch::tensor(std::vector<int64_t>(chosen->begin(), chosen->end()));
    return Batch{all_.input.index_select(0, indices), all_.target.index_select(0, indices)};
  }

 private:
  Batch all_;
  std::size_t batch_size_;
  torch::data::samplers::DistributedRandomSampler sampler_;
};

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

  torch::manual_seed(0);  // all ranks have the same data, and each takes a part of it
  const auto teacher = torch::randn({16, 4});  // which class each input belongs to
  const auto inputs = torch::randn({kSamples, 16});
  RankedData data({inputs, inputs.mm(teacher).argmax(1)}, world);
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
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    data.begin_epoch(epoch);
    while (const auto first = data.next()) {
      const auto second = data.next();
      if (!second) break;
      optimizer.zero_grad();
      {
        const auto no_sync = ddp.no_sync();  // all micro-batches but the last only accumulate
        backward(*first);
      }
      loss = backward(*second);                   // and this one sums over the ranks
      scaler.step(optimizer, {.max_norm = 1.0});  // or skips, on all ranks alike
      scaler.update();
      if (!first_loss.defined()) first_loss = loss.detach();
    }
    const double mean = mean_over_ranks(loss, world);  // all ranks call it: it is a collective
    if (world->getRank() == 0) {
      std::printf("epoch %d  loss %.3f  scale %g\n", epoch + 1, mean, scaler.get_scale());
    }
  }
  bool is_alike = true;
  for (const auto& parameter : model->parameters()) {
    is_alike = is_alike_on_all_ranks(parameter, world) && is_alike;
  }
  const bool fell = mean_over_ranks(loss, world) < mean_over_ranks(first_loss, world) / 2;
  return is_alike && fell ? 0 : 1;
}
