// Loading a checkpoint on several ranks: the same file on all of them, or nothing changes on any.

#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/distributed/checkpoint_manager.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <string>
#include <utility>
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
using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;

TEST(DistributedCheckpoints, WhereOneRankRefusesToLoadAllGetBackWhatTheyHad) {
  const SharedFolder folder;
  const Ranks world = everyone();
  {
    Mixed mixed(world);
    mixed.set(2);
    DistributedCheckpointManager(folder.path(), world).save(mixed.run.state, 2);
  }
  for (int victim = 0; victim < world->getSize(); ++victim) {
    Mixed mixed(world), untouched(world);
    mixed.run.run(2, 4);
    untouched.run.run(2, 4);
    mixed.set(9);
    mixed.own[0].fill_(50 + world->getRank());
    mixed.fussy.refuses_loading = world->getRank() == victim;
    DistributedCheckpointManager checkpoints(folder.path(), world);
    EXPECT_THAT(common_error_of(world, [&] { checkpoints.load_newest(mixed.run.state); }),
                AllOf(HasSubstr("rank " + std::to_string(victim) + " of"), HasSubstr("\"fussy\""),
                      HasSubstr("I will not be loaded"),
                      HasSubstr("\"fussy\" could not be put back")));  // it refuses that too
    EXPECT_EQ(mixed.run.position, 9);
    EXPECT_EQ(mixed.fussy.value, 9);
    EXPECT_EQ(mixed.own[0][0].item<float>(), static_cast<float>(50 + world->getRank()));
    mixed.run.run(4, 6);
    untouched.run.run(4, 6);
    mixed.run.expect_weights_of(untouched.run.net, "as if nothing had been");
    mixed.fussy.refuses_loading = false;
    EXPECT_TRUE(checkpoints.load_newest(mixed.run.state));
    EXPECT_TRUE(mixed.is(2));
  }
}

TEST(DistributedCheckpoints, OfADamagedNewestFileAllFallBackToTheSameOlderOne) {
  const SharedFolder folder;
  const Ranks world = everyone();
  Mixed mixed(world);
  std::vector<std::string> warnings;
  DistributedCheckpointManager checkpoints(folder.path(), world, warning_into(warnings));
  mixed.set(1);
  checkpoints.save(mixed.run.state, 1);
  mixed.set(2);
  const auto newest = checkpoints.save(mixed.run.state, 2);
  if (world->getRank() == 0) {
    std::string bytes = test_support::bytes_of(newest.file);
    bytes[bytes.size() / 2] ^= 1;
    test_support::put_bytes(newest.file, bytes);
  }
  barrier(world);
  EXPECT_EQ(checkpoints.load_newest(mixed.run.state)->step, 1);
  EXPECT_TRUE(mixed.is(1));
  EXPECT_THAT(warnings, SizeIs(world->getRank() == 0 ? 1 : 0));
  // A damaged file is none of those that stay.
  checkpoints.save(mixed.run.state, 3);
  barrier(world);
  EXPECT_THAT(checkpoints.files(), SizeIs(3));
}

TEST(DistributedCheckpoints, OfAFileThatOneRankCannotReadAllFallBack) {
  const SharedFolder folder;
  const Ranks world = everyone();
  const int last = world->getSize() - 1;
  Mixed mixed(world);
  std::vector<std::string> warnings;
  FileCalls calls;
  bool is_broken = false;
  calls.pread = [&](int file, void* to, std::size_t count, off_t offset) -> ssize_t {
    if (!std::exchange(is_broken, false)) return ::pread(file, to, count, offset);
    errno = EIO;
    return -1;
  };
  DistributedCheckpointManager checkpoints =
      manager(folder.path(), world, warning_into(warnings), calls);
  mixed.set(1);
  checkpoints.save(mixed.run.state, 1);
  mixed.set(2);
  checkpoints.save(mixed.run.state, 2);
  is_broken = world->getRank() == last;
  EXPECT_EQ(checkpoints.load_newest(mixed.run.state)->step, 1);
  EXPECT_TRUE(mixed.is(1));
  if (world->getRank() == 0) {
    EXPECT_THAT(warnings, ElementsAre(AllOf(HasSubstr("Input/output error"),
                                            HasSubstr("on rank " + std::to_string(last)))));
  }
  barrier(world);
  if (world->getRank() == 0) {
    for (const auto& file : checkpoints.files()) test_support::put_bytes(file, "nothing");
  }
  barrier(world);
  EXPECT_THAT(common_error_of(world, [&] { checkpoints.load_newest(mixed.run.state); }),
              HasSubstr("has no checkpoint that is whole"));
}

TEST(DistributedCheckpoints, AnEmptyFolderIsNoCheckpointOnAllRanks) {
  const SharedFolder folder;
  Own own(everyone());
  EXPECT_FALSE(DistributedCheckpointManager(folder.path(), everyone()).load_newest(own.state));
}

TEST(DistributedCheckpoints, ARankWithAnotherFolderIsNamed) {
  const Ranks world = everyone();
  const int last = world->getSize() - 1;
  if (last == 0) return;
  const SharedFolder folder;
  Own own(world);
  DistributedCheckpointManager checkpoints(
      folder.path() / (world->getRank() == last ? "elsewhere" : ""), world);
  checkpoints.save(own.state, 1);
  EXPECT_THAT(common_error_of(world, [&] { checkpoints.load_newest(own.state); }),
              AllOf(HasSubstr("rank " + std::to_string(last) + " of"),
                    HasSubstr("all ranks must see the folder")));
}

}  // namespace
}  // namespace checkpoint_ranks
