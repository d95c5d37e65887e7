// Saving a checkpoint of several ranks: all of them succeed, or all throw the same words.

#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/distributed/checkpoint_manager.h>
#include <mezzo/optim/ema.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../support/scratch.h"
#include "checkpoint_ranks.h"
#include "ranks.h"

namespace checkpoint_ranks {
using distributed_test::barrier;
using distributed_test::everyone;
using distributed_test::Ranks;

namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

/// More than one piece holds.
constexpr int64_t kTwoPieces = 1'100'000;

TEST(DistributedCheckpoints, AFullDiskOfRank0IsToldToAllAndTheNextSaveGoesWell) {
  const SharedFolder folder;
  const Ranks world = everyone();
  Mixed mixed(world, kTwoPieces);
  mixed.set(2);
  DistributedCheckpointManager(folder.path(), world).save(mixed.run.state, 2);
  bool has_failed = true;
  int failures = 0;
  for (int number = 1; has_failed; number += number < 2 ? 1 : 2 * world_size()) {
    FileCalls calls;
    int left = number;
    calls.write = [&left](int file, const void* from, std::size_t count) -> ssize_t {
      if (--left > 0) return ::write(file, from, count);
      errno = ENOSPC;
      return -1;
    };
    DistributedCheckpointManager checkpoints = manager(folder.path(), world, {.keep = 1}, calls);
    mixed.set(3);
    const std::string error = common_error_of(world, [&] { checkpoints.save(mixed.run.state, 3); });
    has_failed = error != "no error";
    if (!has_failed) break;
    ++failures;
    EXPECT_THAT(error, AllOf(HasSubstr("DistributedCheckpointManager::save: rank 0 of"),
                             HasSubstr("No space left on device")));
    barrier(world);
    EXPECT_THAT(folder.temporaries(), IsEmpty());
    EXPECT_THAT(checkpoints.files(), SizeIs(1));
    EXPECT_THAT(checkpoints.files()[0].filename().string(), HasSubstr("step-2"));
    left = std::numeric_limits<int>::max();
    if (number != 2) continue;
    const auto saved = checkpoints.save(mixed.run.state, 2);
    barrier(world);
    EXPECT_EQ(std::filesystem::file_size(saved.file), saved.bytes);
    Mixed other(world, kTwoPieces);
    other.own[0].zero_();
    EXPECT_EQ(checkpoints.load_newest(other.run.state)->file, saved.file);
    EXPECT_TRUE(other.is(3));
    EXPECT_TRUE(at::equal(other.own[0], mixed.own[0]));
  }
  EXPECT_GT(failures, 2) << "a write for each MiB";
}

TEST(DistributedCheckpoints, OnlyRank0Writes) {
  const SharedFolder folder;
  const Ranks world = everyone();
  int calls_made = 0;
  FileCalls calls;
  calls.open = [&, real = calls.open](const char* path, int flags) {
    return ++calls_made, real(path, flags);
  };
  calls.write = [&](int file, const void* from, std::size_t count) {
    return ++calls_made, ::write(file, from, count);
  };
  Mixed mixed(world);
  DistributedCheckpointManager checkpoints = manager(folder.path(), world, {}, calls);
  const auto saved = checkpoints.save(mixed.run.state, 1);
  EXPECT_EQ(calls_made > 0, world->getRank() == 0);
  EXPECT_TRUE(std::filesystem::exists(saved.file)) << "when save returns, on any rank";
  EXPECT_TRUE(saved.durable);
  EXPECT_EQ(std::filesystem::file_size(saved.file), saved.bytes);
}

TEST(DistributedCheckpoints, WhereOneRankCannotSaveNoneDoesAndTheNextSaveGoesWell) {
  const SharedFolder folder;
  const Ranks world = everyone();
  const int last = world->getSize() - 1;
  for (int victim = 0; victim <= last; ++victim) {
    TrainingState state;
    Fussy fussy;
    AlikeShard run(3, world);
    run.run(0, 2);
    // Before the one that refuses, and behind it, is one for which all ranks must come.
    state.add("before", run.optimizer).add("fussy", fussy);
    AlikeShard other(4, world);
    state.add("behind", other.optimizer);
    DistributedCheckpointManager checkpoints(folder.path(), world);
    const std::size_t files = checkpoints.files().size();
    barrier(world);
    fussy.refuses_saving = world->getRank() == victim;
    EXPECT_THAT(common_error_of(world, [&] { checkpoints.save(state, 1); }),
                AllOf(HasSubstr("rank " + std::to_string(victim) + " of"), HasSubstr("\"fussy\""),
                      HasSubstr("I will not be saved")));
    EXPECT_EQ(checkpoints.files().size(), files);
    barrier(world);
    fussy.refuses_saving = false;
    checkpoints.save(state, 1);
    EXPECT_GE(checkpoints.files().size(), 1U);
    barrier(world);
  }
}

/// Which is found before a ShardedOptimizer waits for the rank that has them.
TEST(DistributedCheckpoints, AveragesInTheWeightsOfOneRankAreToldToAll) {
  const SharedFolder folder;
  const Ranks world = everyone();
  Mixed mixed(world);
  mezzo::Ema ema(mixed.run.net->parameters());
  DistributedCheckpointManager checkpoints(folder.path(), world);
  checkpoints.save(mixed.run.state, 1);
  {
    std::optional<mezzo::EmaScope> averages;
    if (world->getRank() == world->getSize() - 1) averages.emplace(ema);
    const std::string who = "rank " + std::to_string(world->getSize() - 1) + " of";
    EXPECT_THAT(common_error_of(world, [&] { checkpoints.save(mixed.run.state, 2); }),
                AllOf(HasSubstr(who), HasSubstr("an EmaScope is alive")));
    EXPECT_THAT(common_error_of(world, [&] { checkpoints.load_newest(mixed.run.state); }),
                AllOf(HasSubstr(who), HasSubstr("an EmaScope is alive")));
  }
  checkpoints.save(mixed.run.state, 2);
}

TEST(DistributedCheckpoints, RanksThatDifferAreNamedWithWhatTheyHave) {
  const Ranks world = everyone();
  if (world->getSize() == 1) return;
  const SharedFolder folder;
  DistributedCheckpointManager checkpoints(folder.path(), world);
  const bool is_last = world->getRank() == world->getSize() - 1;
  const std::string who = "rank " + std::to_string(world->getSize() - 1) + " has ";
  Own own(world);
  EXPECT_THAT(common_error_of(world, [&] { checkpoints.save(own.state, is_last ? 4 : 3); }),
              HasSubstr(who + "\"step 4\" where rank 0 has \"step 3\""));
  own.epoch = is_last ? 8 : 7;
  EXPECT_THAT(common_error_of(world, [&] { checkpoints.save(own.state, 3); }),
              AllOf(HasSubstr(who + "\"epoch: integer 8\" where rank 0 has \"epoch: integer 7\""),
                    HasSubstr("add_per_rank")));
  TrainingState common_generator;
  at::Generator generator = at::detail::createCPUGenerator(is_last ? 1 : 2);
  common_generator.add("order", generator);
  EXPECT_THAT(common_error_of(world, [&] { checkpoints.save(common_generator, 3); }),
              HasSubstr(who + "\"order: generator"));
  torch::manual_seed(1);
  torch::nn::Linear linear(3, is_last ? 5 : 4);
  TrainingState other_shape;
  other_shape.add("model", linear);
  EXPECT_THAT(common_error_of(world, [&] { checkpoints.save(other_shape, 3); }),
              HasSubstr(who + "\"model: module"));
  const TrainingState empty;
  EXPECT_THAT(
      common_error_of(world, [&] { checkpoints.save(is_last ? empty : common_generator, 3); }),
      HasSubstr("the state is empty"));
  EXPECT_THAT(common_error_of(world, [&] { checkpoints.load_newest(is_last ? empty : own.state); }),
              HasSubstr("the state is empty"));
  EXPECT_THAT(checkpoints.files(), IsEmpty());
  EXPECT_THAT(common_error_of(world, [&] { checkpoints.save(other_shape, -1); }),
              HasSubstr(who + "\"model: module"));
  own.epoch = 7;
  EXPECT_THAT(common_error_of(world, [&] { checkpoints.save(own.state, -1); }),
              HasSubstr("rank 0 of " + std::to_string(world->getSize()) +
                        ": CheckpointManager::save: step is -1"));
}

/// What one rank has of each kind of object that all share.
struct Shared {
  explicit Shared(const Ranks& ranks) : net(net_without_dropout(3)) {
    optimizer = std::make_unique<AdamW>(net->parameters(), AdamWOptions(1e-2));
    sharded_net = net_without_dropout(4);
    sharded = std::make_unique<ShardedAdamW>(sharded_net->parameters(), ranks, AdamWOptions(1e-2));
    plain_net = net_without_dropout(5);
    plain = std::make_unique<torch::optim::Adam>(plain_net->parameters(), 1e-2);
    take_steps(net, *optimizer, 0, 2);
    take_steps(sharded_net, *sharded, 0, 2);
    take_steps(plain_net, *plain, 0, 2);
    ema = std::make_unique<mezzo::Ema>(net->parameters());
    state.add("model", net).add("optimizer", *optimizer).add("sharded", *sharded);
    state.add("plain", *plain).add("scaler", scaler).add("ema", *ema);
    state.add("mean", mean).add("list", list).add("norm", norm);
  }
  torch::nn::Sequential net, sharded_net, plain_net;
  torch::nn::BatchNorm1d norm{3};
  std::unique_ptr<AdamW> optimizer;
  std::unique_ptr<ShardedAdamW> sharded;
  std::unique_ptr<torch::optim::Adam> plain;
  std::unique_ptr<mezzo::Ema> ema;
  mezzo::GradScaler scaler;
  at::Tensor mean = torch::ones({3});
  std::vector<at::Tensor> list{torch::ones({2}), torch::ones({4})};
  TrainingState state;
};

TEST(DistributedCheckpoints, ARankWithOtherBitsOfAnyObjectIsNamedOnAllAndNothingIsSaved) {
  const Ranks world = everyone();
  if (world->getSize() == 1) return;
  const SharedFolder folder;
  DistributedCheckpointManager checkpoints(folder.path(), world);
  const bool is_last = world->getRank() == world->getSize() - 1;
  const std::string who = "rank " + std::to_string(world->getSize() - 1) + " has ";
  const auto error_after = [&](const auto& change) {
    Shared shared(world);
    const torch::NoGradGuard no_grad;
    if (is_last) change(shared);
    return common_error_of(world, [&] { checkpoints.save(shared.state, 1); });
  };
  EXPECT_THAT(error_after([](Shared& own) { own.net->parameters()[1].flatten()[2].add_(1e-6); }),
              HasSubstr(who + "\"model: module"));
  EXPECT_THAT(error_after([](Shared& own) {
                auto* const first = own.net->parameters()[0].unsafeGetTensorImpl();
                auto& state = *own.optimizer->state().at(first);
                static_cast<mezzo::optim::AdamWParamState&>(state).exp_avg().mul_(2);
              }),
              HasSubstr(who + "\"optimizer: state with the CRC-32C"));
  EXPECT_THAT(
      error_after([](Shared& own) { own.optimizer->param_groups()[0].options().set_lr(0.5); }),
      HasSubstr(who + "\"optimizer: optimizer group 0 lr: 0.5\" where rank 0 has \"optimizer: "
                      "optimizer group 0 lr: 0.01\""));
  EXPECT_THAT(
      error_after([](Shared& own) { own.sharded->param_groups()[0].options().set_lr(0.5); }),
      HasSubstr(who + "\"sharded: optimizer group 0 lr: 0.5\""));
  EXPECT_THAT(error_after([](Shared& own) { own.plain->state().clear(); }),
              HasSubstr(who + "\"plain: state with the CRC-32C"));
  EXPECT_THAT(error_after([](Shared& own) {
                auto state = own.scaler.state_dict();
                state["_growth_tracker"] = 7;
                own.scaler.load_state_dict(state);
              }),
              HasSubstr(who + "\"scaler: object"));
  EXPECT_THAT(error_after([](Shared& own) { own.ema->update(); }),
              HasSubstr(who + "\"ema: object"));
  EXPECT_THAT(error_after([](Shared& own) { own.mean[1] = 3; }), HasSubstr(who + "\"mean: tensor"));
  EXPECT_THAT(error_after([](Shared& own) { own.list[1][3] = 3; }),
              HasSubstr(who + "\"list: tensors"));
  EXPECT_THAT(checkpoints.files(), IsEmpty());
  EXPECT_EQ(error_after([](Shared& own) {
              own.norm->running_mean.add_(1);  // each rank's own, until the next forward pass
            }),
            "no error");
}

TEST(DistributedCheckpoints, ANameThatEntriesOfRanksTakeIsRefusedByAll) {
  const Ranks world = everyone();
  if (world->getSize() == 1) return;
  const SharedFolder folder;
  Own own(world);
  int64_t other = 0;
  own.state.add("position, rank 1", other);
  EXPECT_THAT(
      common_error_of(
          world, [&] { DistributedCheckpointManager(folder.path(), world).save(own.state, 1); }),
      HasSubstr("\"position, rank 1\" is given twice"));
}

}  // namespace
}  // namespace checkpoint_ranks
