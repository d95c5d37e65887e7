// Forward and backward pass with all-reduced gradients. Baselines: c10d::Reducer (of
// DistributedDataParallel) with mezzo::MpiBackend and with a blocking MPI backend, and the loop of
// libtorch's C++ example, with an all-reduce per parameter after the backward pass.
//
//     mpiexec -n 4 ddp_mpi_bench [ROUNDS]
//
// One thread per rank. "MB sent" is the traffic of a ring from each rank: (N - 1) / N of the bucket
// for a reduce-scatter and an all-gather, twice as much for an all-reduce. "begun early" is the
// fraction of it whose collective began before the last gradient of the backward pass.
#include <torch/torch.h>
//
#include <mezzo/distributed/grad_reducer.h>
#include <mezzo/distributed/mpi_backend.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "distributed/blocking_mpi_backend.h"
#include "encoder.h"
#include "interleaved.h"

namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

constexpr int64_t kBucketBytes = int64_t{25} << 20;  // DistributedDataParallel's default

/// The bytes that a rank sends in one backward pass.
struct Traffic {
  double bytes = 0;
  double begun_early = 0;  ///< bytes sent before the last gradient
  int collectives = 0;
  double pending = 0;  ///< bytes sent since the latest gradient

  void begin(double sent) {
    bytes += sent;
    pending += sent;
    ++collectives;
  }
  void on_gradient() {
    begun_early += pending;
    pending = 0;
  }
};

double get_bytes(const at::Tensor& tensor) { return static_cast<double>(tensor.nbytes()); }

/// Returns the fraction of a bucket that a rank sends in a reduce-scatter or all-gather.
double sent_fraction(int ranks) { return 1. - 1. / ranks; }

/// Counts the traffic of another backend.
class CountedBackend : public c10d::Backend {
 public:
  CountedBackend(BackendPtr counted, Traffic& traffic)
      : Backend(counted->getRank(), counted->getSize()),
        counted_(std::move(counted)),
        traffic_(traffic) {}
  const std::string getBackendName() const override { return counted_->getBackendName(); }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    traffic_.begin(2 * sent_fraction(size_) * get_bytes(tensors[0]));
    return counted_->allreduce(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    return counted_->broadcast(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override {
    traffic_.begin(sent_fraction(size_) * get_bytes(output));
    return counted_->_allgather_base(output, input, options);
  }

 private:
  BackendPtr counted_;
  Traffic& traffic_;
};

/// A model, and the hooks of a reduction method.
struct Training {
  bench::Encoder model;
  std::unique_ptr<Traffic> traffic = std::make_unique<Traffic>();
  std::function<void()> before = [] {}, after = [] {};

  Training() {
    torch::manual_seed(1);
    model = bench::Encoder();
    for (const auto& parameter : model->parameters()) {
      parameter.register_hook([traffic = traffic.get()](const at::Tensor& gradient) {
        traffic->on_gradient();
        return gradient;
      });
    }
  }

  void step(const at::Tensor& tokens) {
    *traffic = {};
    const at::Tensor loss = model(tokens).square().mean();
    before();
    loss.backward();
    after();
  }
};

std::shared_ptr<Training> without_reduction() { return std::make_shared<Training>(); }

/// Like libtorch's examples/cpp/distributed.
std::shared_ptr<Training> with_all_reduce_per_parameter(const BackendPtr& world) {
  auto training = std::make_shared<Training>();
  const BackendPtr counted = c10::make_intrusive<CountedBackend>(world, *training->traffic);
  training->after = [counted, self = training.get()] {
    for (const auto& parameter : self->model->parameters()) {
      std::vector<at::Tensor> gradients = {parameter.grad()};
      counted->allreduce(gradients)->wait();
      parameter.grad().div_(counted->getSize());
    }
  };
  return training;
}

std::shared_ptr<Training> with_reducer(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  auto training = std::make_shared<Training>();
  const std::vector<at::Tensor> parameters = training->model->parameters();
  auto [buckets, limits] = c10d::compute_bucket_assignment_by_size(
      {parameters.rbegin(), parameters.rend()},
      {static_cast<std::size_t>(c10d::kDefaultFirstBucketBytes),
       static_cast<std::size_t>(kBucketBytes)});
  for (auto& bucket : buckets) {
    for (std::size_t& index : bucket) index = parameters.size() - 1 - index;
  }
  auto reducer = std::make_shared<c10d::Reducer>(
      parameters, std::move(buckets), group, std::vector<bool>(parameters.size(), false),
      kBucketBytes, /*find_unused_parameters=*/false, /*gradient_as_bucket_view=*/true,
      std::unordered_map<std::size_t, std::string>(), c10d::kDefaultFirstBucketBytes,
      /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
      std::vector<int64_t>());
  training->before = [reducer] { reducer->prepare_for_backward({}); };
  return training;
}

std::shared_ptr<Training> with_mezzo(const BackendPtr& world,
                                     const mezzo::GradReducerOptions& options) {
  auto training = std::make_shared<Training>();
  auto reduce = std::make_shared<mezzo::GradReducer>(
      training->model->parameters(), c10::make_intrusive<CountedBackend>(world, *training->traffic),
      options);
  training->after = [reduce] {};
  return training;
}

using Candidates = std::vector<std::pair<std::string, std::shared_ptr<Training>>>;

c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(const BackendPtr& backend) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(backend->getRank(), backend->getSize());
  group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  return group;
}

void print(const Candidates& candidates, const Interleaved& turns, int ranks, int rounds) {
  std::printf("%d ranks, 1 thread each, 22.6 M float gradients, %d rounds\n\n", ranks, rounds);
  std::printf("%-40s %9s %9s %11s %12s %11s %12s\n", "forward and backward", "ms", "best ms",
              "x no comm.", "collectives", "MB sent", "begun early");
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const Traffic& traffic = *candidates[i].second->traffic;
    std::printf("%-40s %9.1f %9.1f %11.3f", candidates[i].first.c_str(), turns.median_ms(i),
                turns.best_ms(i), turns.median_ratio(i, 0));
    if (traffic.bytes > 0) {
      std::printf(" %12d %11.1f %11.0f%%", traffic.collectives, traffic.bytes / 1e6,
                  100 * traffic.begun_early / traffic.bytes);
    }
    std::printf("\n");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 9;
  const mezzo::MpiEnvironment mpi;
  const BackendPtr world = c10::make_intrusive<mezzo::MpiBackend>(MPI_COMM_WORLD);
  at::set_num_threads(1);
  torch::manual_seed(world->getRank());
  const at::Tensor tokens = torch::randint(bench::kVocabulary, {4, 64});

  Traffic* simple_traffic = nullptr;
  const BackendPtr simple = c10::make_intrusive<bench::BlockingMpiBackend>(
      world->getRank(), world->getSize(), [&](int64_t bytes) {
        if (simple_traffic == nullptr) return;
        simple_traffic->begin(2 * sent_fraction(world->getSize()) * static_cast<double>(bytes));
      });
  const Candidates candidates = {
      {"no communication", without_reduction()},
      {"all-reduce per parameter, afterwards", with_all_reduce_per_parameter(world)},
      {"c10d::Reducer, blocking MPI backend", with_reducer(make_process_group(simple))},
      {"c10d::Reducer, mezzo::MpiBackend", with_reducer(make_process_group(world))},
      {"mezzo::GradReducer", with_mezzo(world, {.bucket_cap_bytes = kBucketBytes})},
      {"mezzo::GradReducer, bfloat16",
       with_mezzo(world, {.bucket_cap_bytes = kBucketBytes, .reduce_dtype = at::kBFloat16})}};
  simple_traffic = candidates[2].second->traffic.get();
  Interleaved turns(/*by_thread_clock=*/false);
  for (const auto& [name, training] : candidates) {
    turns.add(
        name, [training, &tokens] { training->step(tokens); },
        [training, &world] {
          for (const auto& parameter : training->model->parameters()) {
            if (parameter.grad().defined()) parameter.mutable_grad().zero_();
          }
          world->barrier()->wait();
        });
  }
  turns.run(rounds);
  world->barrier()->wait();
  if (world->getRank() == 0) print(candidates, turns, world->getSize(), rounds);
}
