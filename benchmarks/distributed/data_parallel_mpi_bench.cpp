// A backward pass whose gradients are averaged over the ranks of mpirun, beside c10d::Reducer (what
// DistributedDataParallel stands on) over the same MPI, and the loop that libtorch's C++ example
// has, one all-reduce a parameter after the pass:
//
//     mpiexec -n 4 data_parallel_mpi_bench [ROUNDS]
//
// One thread a rank. "MB sent" is what a ring sends from each rank: of an all-reduce twice, of a
// reduce-scatter and of an all-gather once (N - 1) / N of the bucket. "begun early" is the share of
// it whose collective had begun before the backward pass came to its last gradient: the order of
// events, and no claim of speed.
#include <torch/torch.h>
//
#include <mezzo/distributed/communicator.h>
#include <mezzo/distributed/grad_all_reduce.h>
#include <mezzo/distributed/mpi_communicator.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "distributed/mpi_backend.h"
#include "encoder.h"
#include "interleaved.h"

namespace {

using mezzo::GradBuckets;
using mezzo::Reduction;
using mezzo::Work;

constexpr int64_t kBucketBytes = int64_t{25} << 20;  // DistributedDataParallel's default

/// What a rank sends in one backward pass, and when.
struct Traffic {
  double bytes = 0;
  double begun_early = 0;  ///< of the bytes, before the last gradient
  int collectives = 0;
  double pending = 0;  ///< begun since the last gradient that has come so far

  void begin(double sent) {
    bytes += sent;
    pending += sent;
    ++collectives;
  }
  void gradient_comes() {
    begun_early += pending;
    pending = 0;
  }
};

double bytes_of(const at::Tensor& tensor) { return static_cast<double>(tensor.nbytes()); }

/// How much of a bucket a rank of `ranks` sends in a reduce-scatter, or in an all-gather.
double share_sent(int ranks) { return 1. - 1. / ranks; }

/// Counts what another communicator is given.
class CountedCommunicator : public mezzo::Communicator {
 public:
  CountedCommunicator(mezzo::Communicator counted, Traffic& traffic)
      : Communicator(std::make_shared<Backend>(std::move(counted), traffic)) {}

 private:
  class Backend : public mezzo::CommunicatorBackend {
   public:
    Backend(mezzo::Communicator counted, Traffic& traffic)
        : counted_(std::move(counted)), traffic_(traffic) {}
    int rank() const override { return counted_.rank(); }
    int size() const override { return counted_.size(); }
    bool serves(c10::DeviceType device) const override { return counted_.serves(device); }
    Work all_reduce(const at::Tensor& tensor, Reduction reduction) override {
      traffic_.begin(2 * share_sent(size()) * bytes_of(tensor));
      return counted_.all_reduce(tensor, reduction);
    }
    Work broadcast(const at::Tensor& tensor, int root) override {
      return counted_.broadcast(tensor, root);
    }
    Work all_gather(const at::Tensor& output, const at::Tensor& input) override {
      traffic_.begin(share_sent(size()) * bytes_of(output));
      return counted_.all_gather(output, input);
    }
    Work reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                        Reduction reduction) override {
      traffic_.begin(share_sent(size()) * bytes_of(input));
      return counted_.reduce_scatter(output, input, reduction);
    }
    Work barrier() override { return counted_.barrier(); }

   private:
    mezzo::Communicator counted_;
    Traffic& traffic_;
  };
};

/// A model of its own for each way of averaging.
struct Training {
  bench::Encoder model;
  std::unique_ptr<Traffic> traffic = std::make_unique<Traffic>();
  std::function<void()> before = [] {}, after = [] {};

  Training() {
    torch::manual_seed(1);
    model = bench::Encoder();
    for (const auto& parameter : model->parameters()) {
      parameter.register_hook([seen = traffic.get()](const at::Tensor& gradient) {
        seen->gradient_comes();
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

std::shared_ptr<Training> alone() { return std::make_shared<Training>(); }

/// As libtorch's examples/cpp/distributed.
std::shared_ptr<Training> after_the_pass(mezzo::Communicator world) {
  auto training = std::make_shared<Training>();
  CountedCommunicator counted(world, *training->traffic);
  training->after = [counted, self = training.get()]() mutable {
    for (const auto& parameter : self->model->parameters()) {
      counted.all_reduce(parameter.grad(), Reduction::sum).wait();
      parameter.grad().div_(counted.size());
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

std::shared_ptr<Training> with_mezzo(mezzo::Communicator world,
                                     const mezzo::GradAllReduceOptions& options) {
  auto training = std::make_shared<Training>();
  auto buckets = std::make_shared<GradBuckets>(
      training->model->parameters(), mezzo::GradBucketsOptions{.bucket_bytes = kBucketBytes});
  auto reduce = std::make_shared<mezzo::GradAllReduce>(
      *buckets, CountedCommunicator(world, *training->traffic), options);
  training->after = [buckets, reduce] {};
  return training;
}

using Peers = std::vector<std::pair<std::string, std::shared_ptr<Training>>>;

/// `on_all_reduce` hears of the bytes that are reduced.
c10::intrusive_ptr<c10d::ProcessGroup> mpi_group(const mezzo::Communicator& world,
                                                 std::function<void(int64_t)> on_all_reduce) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(world.rank(), world.size());
  auto backend =
      c10::make_intrusive<bench::MpiBackend>(world.rank(), world.size(), std::move(on_all_reduce));
  group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM,
                    c10::intrusive_ptr<c10d::Backend>(backend));
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  return group;
}

void print(const Peers& peers, const Interleaved& turns, int ranks, int rounds) {
  std::printf("%d ranks, 1 thread each, 22.6 M float gradients, %d rounds\n\n", ranks, rounds);
  std::printf("%-40s %9s %9s %11s %12s %11s %12s\n", "forward and backward", "ms", "best ms",
              "x alone", "collectives", "MB sent", "begun early");
  for (std::size_t i = 0; i < peers.size(); ++i) {
    const Traffic& traffic = *peers[i].second->traffic;
    std::printf("%-40s %9.1f %9.1f %11.3f", peers[i].first.c_str(), turns.median_ms(i),
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
  mezzo::Communicator world = mezzo::MpiCommunicator(MPI_COMM_WORLD);
  at::set_num_threads(1);
  torch::manual_seed(world.rank());
  const at::Tensor tokens = torch::randint(bench::kVocabulary, {4, 64});

  Traffic* reducers_traffic = nullptr;
  const auto group = mpi_group(world, [&](int64_t bytes) {
    if (reducers_traffic == nullptr) return;
    reducers_traffic->begin(2 * share_sent(world.size()) * static_cast<double>(bytes));
  });
  const Peers peers = {
      {"no communication", alone()},
      {"one all-reduce a parameter, afterwards", after_the_pass(world)},
      {"c10d::Reducer, MPI in a thread", with_reducer(group)},
      {"mezzo, averages", with_mezzo(world, {})},
      {"mezzo, sums", with_mezzo(world, {.average = false})},
      {"mezzo, in bfloat16", with_mezzo(world, {.compress_dtype = at::kBFloat16})},
      {"mezzo, in bfloat16, error feedback",
       with_mezzo(world, {.compress_dtype = at::kBFloat16, .error_feedback = true})}};
  reducers_traffic = peers[2].second->traffic.get();
  Interleaved turns(/*by_thread_clock=*/false);
  for (const auto& [name, training] : peers) {
    turns.add(
        name, [training, &tokens] { training->step(tokens); },
        [training, &world] {
          for (const auto& parameter : training->model->parameters()) {
            if (parameter.grad().defined()) parameter.mutable_grad().zero_();
          }
          world.barrier().wait();
        });
  }
  turns.run(rounds);
  world.barrier().wait();
  if (world.rank() == 0) print(peers, turns, world.size(), rounds);
}
