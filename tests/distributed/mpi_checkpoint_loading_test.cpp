// DistributedCheckpointManager::load_latest: the same checkpoint on all ranks, or no changes.

#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/distributed/checkpoint_manager.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "../support/temp_dir.h"
#include "distributed_checkpoint_fixtures.h"
#include "test_backends.h"

namespace distributed_checkpoint_test {
using distributed_test::BackendPtr;
using distributed_test::barrier;
using distributed_test::make_world_backend;

namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::SizeIs;

TEST(DistributedCheckpointManager, FailedLoadThrowsOnAllRanks) {
  const SharedDirectory directory;
  const BackendPtr world = make_world_backend();
  MixedState mixed(world);
  mixed.set(2);
  DistributedCheckpointManager checkpoints(directory.path(), world);
  checkpoints.save(mixed.run.state, 2);
  for (int victim = 0; victim < world->getSize(); ++victim) {
    mixed.throwing_object.throws_on_load = world->getRank() == victim;
    EXPECT_THAT(common_message_of(world, [&] { checkpoints.load_latest(mixed.run.state); }),
                AllOf(HasSubstr("rank " + std::to_string(victim) + " of"),
                      HasSubstr("\"throwing_object\""), HasSubstr("thrown by load")));
  }
}

TEST(DistributedCheckpointManager, RanksFallBackToSameCheckpoint) {
  const SharedDirectory directory;
  const BackendPtr world = make_world_backend();
  MixedState mixed(world);
  std::vector<std::string> warnings;
  DistributedCheckpointManager checkpoints(directory.path(), world, record_warnings(warnings));
  mixed.set(1);
  checkpoints.save(mixed.run.state, 1);
  mixed.set(2);
  const auto newest = checkpoints.save(mixed.run.state, 2);
  if (world->getRank() == 0) {
    std::string bytes = test_support::read_file(newest.path);
    bytes[bytes.size() / 2] ^= 1;
    test_support::write_file(newest.path, bytes);
  }
  barrier(world);
  EXPECT_EQ(checkpoints.load_latest(mixed.run.state)->step, 1);
  EXPECT_TRUE(mixed.is(1));
  EXPECT_THAT(warnings, SizeIs(world->getRank() == 0 ? 1 : 0));
  // Corrupt checkpoints do not count as kept.
  checkpoints.save(mixed.run.state, 3);
  barrier(world);
  EXPECT_THAT(checkpoints.checkpoints(), SizeIs(3));
}

TEST(DistributedCheckpointManager, WarningHandlerThrowsOnAllRanks) {
  const SharedDirectory directory;
  const BackendPtr world = make_world_backend();
  MixedState mixed(world);
  mezzo::CheckpointManagerOptions options;
  options.on_warning = [](const std::string& text) {
    throw std::runtime_error("handler threw: " + text);
  };
  DistributedCheckpointManager checkpoints(directory.path(), world, options);
  const auto saved = checkpoints.save(mixed.run.state, 1);
  if (world->getRank() == 0) test_support::write_file(saved.path, "nothing");
  barrier(world);
  EXPECT_THAT(common_message_of(world, [&] { checkpoints.load_latest(mixed.run.state); }),
              AllOf(HasSubstr("rank 0 of"), HasSubstr("handler threw: ")));
}

TEST(DistributedCheckpointManager, LoadLatestThrowsIfAllCorrupt) {
  const SharedDirectory directory;
  const BackendPtr world = make_world_backend();
  MixedState mixed(world);
  std::vector<std::string> warnings;
  DistributedCheckpointManager checkpoints(directory.path(), world, record_warnings(warnings));
  const auto saved = checkpoints.save(mixed.run.state, 1);
  if (world->getRank() == 0) test_support::write_file(saved.path, "nothing");
  barrier(world);
  EXPECT_THAT(common_message_of(world, [&] { checkpoints.load_latest(mixed.run.state); }),
              HasSubstr("has no intact checkpoint"));
}

TEST(DistributedCheckpointManager, LoadLatestReturnsNulloptIfEmpty) {
  const SharedDirectory directory;
  PerRankState own(make_world_backend());
  EXPECT_FALSE(
      DistributedCheckpointManager(directory.path(), make_world_backend()).load_latest(own.state));
}

TEST(DistributedCheckpointManager, ReportsRankWithOtherDirectory) {
  const BackendPtr world = make_world_backend();
  const int last = world->getSize() - 1;
  if (last == 0) return;
  const SharedDirectory directory;
  PerRankState own(world);
  DistributedCheckpointManager checkpoints(
      directory.path() / (world->getRank() == last ? "elsewhere" : ""), world);
  checkpoints.save(own.state, 1);
  EXPECT_THAT(common_message_of(world, [&] { checkpoints.load_latest(own.state); }),
              AllOf(HasSubstr("cannot be opened"), HasSubstr("on rank " + std::to_string(last))));
}

}  // namespace
}  // namespace distributed_checkpoint_test
