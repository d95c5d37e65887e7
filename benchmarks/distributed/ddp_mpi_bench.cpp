// A backward pass whose gradients are averaged over the ranks of mpirun, beside c10d::Reducer (what
// DistributedDataParallel stands on) over the same MpiBackend and over the plainest one, and the
// loop that libtorch's C++ example has, one all-reduce a parameter after the pass:
//
//     mpiexec -n 4 ddp_mpi_bench [ROUNDS]
//
// One thread a rank. "MB sent" is what a ring sends from each rank: of an all-reduce twice, of a
// reduce-scatter and of an all-gather once (N - 1) / N of the bucket. "begun early" is the share of
// it whose collective had begun before the backward pass came to its last gradient: the order of
// events, and no claim of speed.
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

using Group = c10::intrusive_ptr<c10d::Backend>;

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

/// Counts what another backend is given.
class CountedBackend : public c10d::Backend {
 public:
  CountedBackend(Group counted, Traffic& traffic)
      : Backend(counted->getRank(), counted->getSize()),
        counted_(std::move(counted)),
        traffic_(traffic) {}
  const std::string getBackendName() const override { return counted_->getBackendName(); }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    traffic_.begin(2 * share_sent(size_) * bytes_of(tensors[0]));
    return counted_->allreduce(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    return counted_->broadcast(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override {
    traffic_.begin(share_sent(size_) * bytes_of(output));
    return counted_->_allgather_base(output, input, options);
  }

 private:
  Group counted_;
  Traffic& traffic_;
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
std::shared_ptr<Training> after_the_pass(const Group& world) {
  auto training = std::make_shared<Training>();
  const Group counted = c10::make_intrusive<CountedBackend>(world, *training->traffic);
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

std::shared_ptr<Training> with_mezzo(const Group& world, const mezzo::GradReducerOptions& options) {
  auto training = std::make_shared<Training>();
  auto reduce = std::make_shared<mezzo::GradReducer>(
      training->model->parameters(), c10::make_intrusive<CountedBackend>(world, *training->traffic),
      options);
  training->after = [reduce] {};
  return training;
}

using Peers = std::vector<std::pair<std::string, std::shared_ptr<Training>>>;

c10::intrusive_ptr<c10d::ProcessGroup> group_of(const Group& backend) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(backend->getRank(), backend->getSize());
  group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
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
  const Group world = c10::make_intrusive<mezzo::MpiBackend>(MPI_COMM_WORLD);
  at::set_num_threads(1);
  torch::manual_seed(world->getRank());
  const at::Tensor tokens = torch::randint(bench::kVocabulary, {4, 64});

  Traffic* plain_traffic = nullptr;
  const Group plain = c10::make_intrusive<bench::BlockingMpiBackend>(
      world->getRank(), world->getSize(), [&](int64_t bytes) {
        if (plain_traffic == nullptr) return;
        plain_traffic->begin(2 * share_sent(world->getSize()) * static_cast<double>(bytes));
      });
  const Peers peers = {{"no communication", alone()},
                       {"one all-reduce a parameter, afterwards", after_the_pass(world)},
                       {"c10d::Reducer, plain MPI in a thread", with_reducer(group_of(plain))},
                       {"c10d::Reducer, mezzo::MpiBackend", with_reducer(group_of(world))},
                       {"mezzo, averages", with_mezzo(world, {.bucket_cap_bytes = kBucketBytes})},
                       {"mezzo, in bfloat16", with_mezzo(world, {.bucket_cap_bytes = kBucketBytes,
                                                                 .reduce_dtype = at::kBFloat16})}};
  plain_traffic = peers[2].second->traffic.get();
  Interleaved turns(/*by_thread_clock=*/false);
  for (const auto& [name, training] : peers) {
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
  if (world->getRank() == 0) print(peers, turns, world->getSize(), rounds);
}
