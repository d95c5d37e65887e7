/// \file
/// Fixtures of the tests of DistributedCheckpointManager.
#pragma once

#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/distributed/checkpoint_manager.h>
#include <mezzo/distributed/sharded_optimizer.h>
#include <mezzo/optim/adamw.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../support/message_of.h"
#include "../support/temp_dir.h"
#include "rank_subset.h"
#include "test_backends.h"

namespace distributed_checkpoint_test {

using distributed_test::available_world_sizes;
using distributed_test::BackendPtr;
using distributed_test::make_world_backend;
using distributed_test::RankSubset;
using distributed_test::world_size;
using mezzo::CheckpointManager;
using mezzo::DistributedCheckpointManager;
using mezzo::TrainingState;
using mezzo::optim::AdamW;
using mezzo::optim::AdamWOptions;
using test_support::message_of;

/// An object that throws while it is saved or loaded.
struct ThrowingObject {
  bool throws_on_save = false;
  bool throws_on_load = false;
  int64_t value = 0;
};

inline torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                   const ThrowingObject& throwing_object) {
  if (throwing_object.throws_on_save) throw std::runtime_error("thrown by save");
  archive.write("value", c10::IValue(throwing_object.value));
  return archive;
}

inline torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                  ThrowingObject& throwing_object) {
  c10::IValue value;
  archive.read("value", value);
  throwing_object.value = value.toInt();
  if (throwing_object.throws_on_load) throw std::runtime_error("thrown by load");
  return archive;
}

inline std::vector<std::string> gather_strings(const BackendPtr& backend, const std::string& own) {
  return mezzo::detail::all_gather_strings(backend, own);
}

/// Returns the error of all ranks if they are equal, or two different ones.
template <class Call>
std::string common_message_of(const BackendPtr& backend, const Call& call) {
  const std::vector<std::string> errors = gather_strings(backend, message_of(call));
  for (const std::string& error : errors) {
    if (error != errors[0]) return "different messages:\n" + errors[0] + "\nand\n" + error;
  }
  return errors[0];
}

/// A temporary directory that all ranks share.
class SharedDirectory {
 public:
  SharedDirectory() {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (rank == 0) own_.emplace();
    path_ = mezzo::detail::broadcast_string(make_world_backend(),
                                            rank == 0 ? own_->path().string() : "", 0);
  }
  ~SharedDirectory() { MPI_Barrier(MPI_COMM_WORLD); }
  SharedDirectory(const SharedDirectory&) = delete;
  SharedDirectory& operator=(const SharedDirectory&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::vector<std::string> list_temporaries() const {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      if (entry.path().extension() == ".tmp") found.push_back(entry.path().string());
    }
    return found;
  }

 private:
  std::optional<test_support::TempDir> own_;
  std::filesystem::path path_;
};

inline mezzo::CheckpointManagerOptions record_warnings(std::vector<std::string>& warnings) {
  return {.on_warning = [&warnings](const std::string& text) { warnings.push_back(text); }};
}

using ShardedAdamW = mezzo::ShardedOptimizer<AdamW>;
inline constexpr mezzo::GradReducerOptions kSmallBuckets{.bucket_cap_bytes = 512};

/// All ranks compute the same gradients, so that the result does not depend on the world size.
template <class Optimizer>
void take_steps(torch::nn::Sequential net, Optimizer& optimizer, int first, int last) {
  torch::manual_seed(5);
  for (int i = 0; i < last; ++i) {
    const at::Tensor x = torch::randn({4, 6});
    if (i < first) continue;
    optimizer.zero_grad();
    net->forward(x).square().mean().backward();
    optimizer.step();
  }
}

inline torch::nn::Sequential net_without_dropout(uint64_t seed) {
  torch::manual_seed(seed);
  return torch::nn::Sequential(torch::nn::Linear(6, 17), torch::nn::Linear(17, 3));
}

/// A run on one of several ranks or, with an AdamW, in a single process.
template <class Optimizer>
struct ReplicatedRun {
  template <class... Args>
  explicit ReplicatedRun(uint64_t seed, const Args&... args)
      : net(net_without_dropout(seed)), optimizer(net->parameters(), args...) {
    state.add("model", net).add("optimizer", optimizer).add("position", position);
    state.add_rng_state();
  }
  void run(int first, int last) {
    take_steps(net, optimizer, first, last);
    position = last;
  }
  void expect_weights_of(const torch::nn::Sequential& other, const std::string& who) const {
    for (std::size_t i = 0; i < net->parameters().size(); ++i) {
      EXPECT_TRUE(at::equal(net->parameters()[i], other->parameters()[i])) << who << ' ' << i;
    }
  }

  torch::nn::Sequential net;
  Optimizer optimizer;
  int64_t position = 0;
  TrainingState state;
};

using SingleProcessRun = ReplicatedRun<AdamW>;
struct ShardedRun : ReplicatedRun<ShardedAdamW> {
  ShardedRun(uint64_t seed, BackendPtr backend)
      : ReplicatedRun(seed, std::move(backend), AdamWOptions(1e-2), kSmallBuckets) {}
};

/// A state of per-rank objects only.
struct PerRankState {
  explicit PerRankState(BackendPtr backend) : position(10 + backend->getRank()) {
    torch::manual_seed(40 + static_cast<uint64_t>(backend->getRank()));
    state.add("epoch", epoch).add_per_rank("position", position).add_rng_state();
  }
  int64_t epoch = 1;
  int64_t position;
  TrainingState state;
};

/// A state with a ShardedOptimizer, whose save is collective, and per-rank objects.
struct MixedState {
  explicit MixedState(BackendPtr backend, int64_t elements = 100)
      : run(3, backend), own{torch::full({elements}, backend->getRank(), at::kFloat)} {
    run.state.add_per_rank("own", own).add("throwing_object", throwing_object);
    run.run(0, 2);
  }
  bool is(int64_t value) const { return throwing_object.value == value && run.position == value; }
  void set(int64_t value) { throwing_object.value = run.position = value; }

  ShardedRun run;
  std::vector<at::Tensor> own;
  ThrowingObject throwing_object;
};

}  // namespace distributed_checkpoint_test
