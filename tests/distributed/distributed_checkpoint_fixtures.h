/// \file
/// What the tests of checkpoints of several ranks share.
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

/// An object that some ranks cannot save, or load.
struct ThrowingObject {
  bool throws_on_save = false;
  bool throws_on_load = false;
  int64_t value = 0;
};

inline torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                   const ThrowingObject& throwing_object) {
  if (throwing_object.throws_on_save) throw std::runtime_error("I will not be saved");
  archive.write("value", c10::IValue(throwing_object.value));
  return archive;
}

inline torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                  ThrowingObject& throwing_object) {
  c10::IValue value;
  archive.read("value", value);
  throwing_object.value = value.toInt();
  if (throwing_object.throws_on_load) throw std::runtime_error("I will not be loaded");
  return archive;
}

inline std::vector<std::string> gather_strings(const BackendPtr& ranks, const std::string& own) {
  return mezzo::detail::all_gather_strings(ranks, own);
}

/// What all ranks throw, if those are the same words; what two of them throw otherwise.
template <class Call>
std::string common_message_of(const BackendPtr& ranks, const Call& call) {
  const std::vector<std::string> errors = gather_strings(ranks, message_of(call));
  for (const std::string& error : errors) {
    if (error != errors[0]) return "different words:\n" + errors[0] + "\nand\n" + error;
  }
  return errors[0];
}

/// A directory of rank 0's that all ranks use; it goes when all are done with it.
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
  std::vector<std::string> temporaries() const {
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

inline mezzo::CheckpointManagerOptions warning_into(std::vector<std::string>& warnings) {
  return {.on_warning = [&warnings](const std::string& text) { warnings.push_back(text); }};
}

using ShardedAdamW = mezzo::ShardedOptimizer<AdamW>;
inline constexpr mezzo::GradReducerOptions kSmallShards{.bucket_cap_bytes = 512};

/// Every rank computes the same, so that any number of ranks takes the steps of one alone.
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

/// One of some number of ranks, or (with an AdamW) a process that knows of none.
template <class Optimizer>
struct Alike {
  template <class... Args>
  explicit Alike(uint64_t seed, const Args&... args)
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

using AlikeAlone = Alike<AdamW>;
struct AlikeShard : Alike<ShardedAdamW> {
  AlikeShard(uint64_t seed, BackendPtr ranks)
      : Alike(seed, std::move(ranks), AdamWOptions(1e-2), kSmallShards) {}
};

/// What each rank has of its own, and nothing else.
struct Own {
  explicit Own(BackendPtr ranks) : position(10 + ranks->getRank()) {
    torch::manual_seed(40 + static_cast<uint64_t>(ranks->getRank()));
    state.add("epoch", epoch).add_per_rank("position", position).add_rng_state();
  }
  int64_t epoch = 1;
  int64_t position;
  TrainingState state;
};

/// A state with a collective in it, and some of each rank's own.
struct Mixed {
  explicit Mixed(BackendPtr ranks, int64_t elements = 100)
      : run(3, ranks), own{torch::full({elements}, ranks->getRank(), at::kFloat)} {
    run.state.add_per_rank("own", own).add("throwing_object", throwing_object);
    run.run(0, 2);
  }
  bool is(int64_t value) const { return throwing_object.value == value && run.position == value; }
  void set(int64_t value) { throwing_object.value = run.position = value; }

  AlikeShard run;
  std::vector<at::Tensor> own;
  ThrowingObject throwing_object;
};

}  // namespace distributed_checkpoint_test
