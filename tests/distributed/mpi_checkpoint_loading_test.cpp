// Loading a checkpoint on several ranks: the same file on all of them, or nothing changes on any.

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
#include "checkpoint_ranks.h"
#include "ranks.h"

namespace checkpoint_ranks {
using distributed_test::barrier;
using distributed_test::everyone;
using distributed_test::Ranks;

namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::SizeIs;

TEST(DistributedCheckpoints, WhereOneRankRefusesToLoadAllThrowItsWords) {
  const SharedFolder directory;
  const Ranks world = everyone();
  Mixed mixed(world);
  mixed.set(2);
  DistributedCheckpointManager checkpoints(directory.path(), world);
  checkpoints.save(mixed.run.state, 2);
  for (int victim = 0; victim < world->getSize(); ++victim) {
    mixed.fussy.refuses_loading = world->getRank() == victim;
    EXPECT_THAT(common_error_of(world, [&] { checkpoints.load_latest(mixed.run.state); }),
                AllOf(HasSubstr("rank " + std::to_string(victim) + " of"), HasSubstr("\"fussy\""),
                      HasSubstr("I will not be loaded")));
  }
}

TEST(DistributedCheckpoints, OfADamagedNewestFileAllFallBackToTheSameOlderOne) {
  const SharedFolder directory;
  const Ranks world = everyone();
  Mixed mixed(world);
  std::vector<std::string> warnings;
  DistributedCheckpointManager checkpoints(directory.path(), world, warning_into(warnings));
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
  // A corrupt file is none of those that stay.
  checkpoints.save(mixed.run.state, 3);
  barrier(world);
  EXPECT_THAT(checkpoints.checkpoints(), SizeIs(3));
}

TEST(DistributedCheckpoints, WarningHandlerThatThrowsOnRank0ThrowsOnAllRanks) {
  const SharedFolder directory;
  const Ranks world = everyone();
  Mixed mixed(world);
  mezzo::CheckpointManagerOptions options;
  options.on_warning = [](const std::string& text) { throw std::runtime_error("heard " + text); };
  DistributedCheckpointManager checkpoints(directory.path(), world, options);
  const auto saved = checkpoints.save(mixed.run.state, 1);
  if (world->getRank() == 0) test_support::write_file(saved.path, "nothing");
  barrier(world);
  EXPECT_THAT(common_error_of(world, [&] { checkpoints.load_latest(mixed.run.state); }),
              AllOf(HasSubstr("rank 0 of"), HasSubstr("heard ")));
}

TEST(DistributedCheckpoints, WhereNoFileIsWholeNoneStartsAfresh) {
  const SharedFolder directory;
  const Ranks world = everyone();
  Mixed mixed(world);
  std::vector<std::string> warnings;
  DistributedCheckpointManager checkpoints(directory.path(), world, warning_into(warnings));
  const auto saved = checkpoints.save(mixed.run.state, 1);
  if (world->getRank() == 0) test_support::write_file(saved.path, "nothing");
  barrier(world);
  EXPECT_THAT(common_error_of(world, [&] { checkpoints.load_latest(mixed.run.state); }),
              HasSubstr("has no checkpoint that is whole"));
}

TEST(DistributedCheckpoints, AnEmptyFolderIsNoCheckpointOnAllRanks) {
  const SharedFolder directory;
  Own own(everyone());
  EXPECT_FALSE(DistributedCheckpointManager(directory.path(), everyone()).load_latest(own.state));
}

TEST(DistributedCheckpoints, ARankWithAnotherFolderIsNamed) {
  const Ranks world = everyone();
  const int last = world->getSize() - 1;
  if (last == 0) return;
  const SharedFolder directory;
  Own own(world);
  DistributedCheckpointManager checkpoints(
      directory.path() / (world->getRank() == last ? "elsewhere" : ""), world);
  checkpoints.save(own.state, 1);
  EXPECT_THAT(common_error_of(world, [&] { checkpoints.load_latest(own.state); }),
              AllOf(HasSubstr("cannot be opened"), HasSubstr("on rank " + std::to_string(last))));
}

}  // namespace
}  // namespace checkpoint_ranks
