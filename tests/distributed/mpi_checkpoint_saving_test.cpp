// DistributedCheckpointManager::save: succeeds on all ranks, or throws the same message on all.

#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/distributed/checkpoint_manager.h>
#include <mezzo/optim/ema.h>
#include <mezzo/optim/ema_guard.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fcntl.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../support/scoped_syscalls.h"
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
using testing::IsEmpty;
using testing::SizeIs;

TEST(DistributedCheckpointManager, FileExistsWhenSaveReturns) {
  const SharedDirectory directory;
  const BackendPtr world = make_world_backend();
  MixedState mixed(world);
  const auto saved = DistributedCheckpointManager(directory.path(), world).save(mixed.run.state, 1);
  EXPECT_TRUE(std::filesystem::exists(saved.path));
  EXPECT_EQ(std::filesystem::file_size(saved.path), saved.size_bytes);
}

TEST(DistributedCheckpointManager, UnwritableDirectoryThrowsOnAllRanks) {
  const SharedDirectory directory;
  const BackendPtr world = make_world_backend();
  MixedState mixed(world);
  const auto place = directory.path() / "here";
  if (world->getRank() == 0)
    test_support::write_file(place, "a file where the directory should be");
  barrier(world);
  DistributedCheckpointManager checkpoints(place, world);
  EXPECT_THAT(common_message_of(world, [&] { checkpoints.save(mixed.run.state, 3); }),
              HasSubstr("DistributedCheckpointManager::save: rank 0 of"));
  if (world->getRank() == 0) std::filesystem::remove(place);
  barrier(world);
  checkpoints.save(mixed.run.state, 3);
  EXPECT_THAT(checkpoints.checkpoints(), SizeIs(1));
  barrier(world);
}

/// System calls in which `name` fails for a checkpoint on rank 0.
test_support::Syscalls failing_on_rank_0(const std::string& name) {
  test_support::Syscalls calls = test_support::libc_syscalls();
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank != 0) return calls;
  const auto made = std::make_shared<std::atomic<int>>(-1);  // other threads have their own files
  const auto fails = [](int error) {
    errno = error;
    return -1;
  };
  calls.open = [=, real = calls.open](const char* path, int flags, mode_t mode) {
    const int file = real(path, flags, mode);
    if ((flags & O_CREAT) != 0 && std::string(path).ends_with(".tmp")) *made = file;
    return file;
  };
  if (name == "write") {
    calls.write = [=, real = calls.write](int file, const void* from, std::size_t count) {
      return file == *made ? fails(ENOSPC) : real(file, from, count);
    };
  }
  if (name == "fsync") {
    calls.fsync = [=, real = calls.fsync](int file) {
      return file == *made ? fails(EIO) : real(file);
    };
  }
  if (name == "rename") {
    calls.rename = [=](const char* /*from*/, const char* /*to*/) { return fails(EIO); };
  }
  return calls;
}

TEST(DistributedCheckpointManager, DiskErrorThrowsOnAllRanks) {
  const SharedDirectory directory;
  const BackendPtr world = make_world_backend();
  MixedState mixed(world);
  DistributedCheckpointManager checkpoints(directory.path(), world);
  mixed.set(1);
  checkpoints.save_async(mixed.run.state, 1);
  mixed.set(9);
  for (const std::string name : {"write", "fsync", "rename", "async write"}) {
    checkpoints.wait();
    mixed.set(2);
    {
      const bool is_async = name.starts_with("async");
      const test_support::ScopedSyscalls failing(failing_on_rank_0(is_async ? "write" : name));
      if (is_async) checkpoints.save_async(mixed.run.state, 2);
      EXPECT_THAT(common_message_of(world, [&] { checkpoints.save(mixed.run.state, 2); }),
                  AllOf(HasSubstr("rank 0 of"),
                        HasSubstr(std::strerror(name.ends_with("write") ? ENOSPC : EIO))))
          << name;
    }
    EXPECT_THAT(directory.list_temporaries(), IsEmpty()) << name;
    EXPECT_THAT(checkpoints.checkpoints(), SizeIs(1)) << name;
    EXPECT_EQ(checkpoints.load_latest(mixed.run.state)->step, 1) << name;
    EXPECT_TRUE(mixed.is(1)) << name;
    barrier(world);
  }
  checkpoints.save(mixed.run.state, 3);
  EXPECT_THAT(checkpoints.checkpoints(), SizeIs(2));
  barrier(world);
}

TEST(DistributedCheckpointManager, FailedSaveThrowsOnAllRanks) {
  const SharedDirectory directory;
  const BackendPtr world = make_world_backend();
  const int last = world->getSize() - 1;
  for (int victim = 0; victim <= last; ++victim) {
    TrainingState state;
    ThrowingObject throwing_object;
    ShardedRun run(3, world);
    run.run(0, 2);
    // Objects that call collectives precede and follow the throwing one.
    state.add("before", run.optimizer).add("throwing_object", throwing_object);
    ShardedRun other(4, world);
    state.add("behind", other.optimizer);
    DistributedCheckpointManager checkpoints(directory.path(), world);
    const std::size_t files = checkpoints.checkpoints().size();
    barrier(world);
    throwing_object.throws_on_save = world->getRank() == victim;
    EXPECT_THAT(common_message_of(world, [&] { checkpoints.save(state, 1); }),
                AllOf(HasSubstr("rank " + std::to_string(victim) + " of"),
                      HasSubstr("\"throwing_object\""), HasSubstr("thrown by save")));
    EXPECT_EQ(checkpoints.checkpoints().size(), files);
    barrier(world);
    throwing_object.throws_on_save = false;
    checkpoints.save(state, 1);
    EXPECT_GE(checkpoints.checkpoints().size(), 1U);
    barrier(world);
  }
}

// Detected before a ShardedOptimizer waits for this rank.
TEST(DistributedCheckpointManager, EmaGuardThrowsOnAllRanks) {
  const SharedDirectory directory;
  const BackendPtr world = make_world_backend();
  MixedState mixed(world);
  mezzo::Ema ema(mixed.run.net->parameters());
  DistributedCheckpointManager checkpoints(directory.path(), world);
  checkpoints.save(mixed.run.state, 1);
  {
    std::optional<mezzo::EmaGuard> averages;
    if (world->getRank() == world->getSize() - 1) averages.emplace(ema);
    const std::string who = "rank " + std::to_string(world->getSize() - 1) + " of";
    EXPECT_THAT(common_message_of(world, [&] { checkpoints.save(mixed.run.state, 2); }),
                AllOf(HasSubstr(who), HasSubstr("an EmaGuard is alive")));
    EXPECT_THAT(common_message_of(world, [&] { checkpoints.load_latest(mixed.run.state); }),
                AllOf(HasSubstr(who), HasSubstr("an EmaGuard is alive")));
  }
  checkpoints.save(mixed.run.state, 2);
}

TEST(DistributedCheckpointManager, ReportsDifferencesBetweenRanks) {
  const BackendPtr world = make_world_backend();
  if (world->getSize() == 1) return;
  const SharedDirectory directory;
  DistributedCheckpointManager checkpoints(directory.path(), world);
  const bool is_last = world->getRank() == world->getSize() - 1;
  const std::string who = "rank " + std::to_string(world->getSize() - 1) + " has ";
  PerRankState own(world);
  EXPECT_THAT(common_message_of(world, [&] { checkpoints.save(own.state, is_last ? 4 : 3); }),
              HasSubstr(who + "\"step 4\" where rank 0 has \"step 3\""));
  torch::manual_seed(1);
  torch::nn::Linear linear(3, is_last ? 5 : 4);
  TrainingState other_shape;
  other_shape.add("model", linear);
  EXPECT_THAT(common_message_of(world, [&] { checkpoints.save(other_shape, 3); }),
              HasSubstr(who + "\"model.weight: Float [5, 3]"));
  const TrainingState empty;
  EXPECT_THAT(common_message_of(world, [&] { checkpoints.save(is_last ? empty : own.state, 3); }),
              HasSubstr("the state is empty"));
  EXPECT_THAT(
      common_message_of(world, [&] { checkpoints.load_latest(is_last ? empty : own.state); }),
      HasSubstr("the state is empty"));
  EXPECT_THAT(checkpoints.checkpoints(), IsEmpty());
  EXPECT_THAT(common_message_of(world, [&] { checkpoints.save(own.state, -1); }),
              HasSubstr("rank 0 of " + std::to_string(world->getSize()) +
                        ": CheckpointManager::save: step is -1"));
}

TEST(DistributedCheckpointManager, SaveThrowsForDivergedWeights) {
  const BackendPtr world = make_world_backend();
  if (world->getSize() == 1) return;
  const SharedDirectory directory;
  DistributedCheckpointManager checkpoints(directory.path(), world);
  ShardedRun run(3, world);
  const bool is_last = world->getRank() == world->getSize() - 1;
  {
    const torch::NoGradGuard no_grad;
    if (is_last) run.net->parameters()[1].flatten()[2].add_(1e-6);
  }
  EXPECT_THAT(common_message_of(world, [&] { checkpoints.save(run.state, 1); }),
              HasSubstr("rank " + std::to_string(world->getSize() - 1) +
                        " has \"model.0.bias: Float [17], CRC-32C"));
  EXPECT_THAT(checkpoints.checkpoints(), IsEmpty());
}

}  // namespace
}  // namespace distributed_checkpoint_test
