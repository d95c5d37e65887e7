// How a folder of checkpoints is kept.

#include <mezzo/checkpoint/checkpoint.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "../support/error_of.h"
#include "../support/scratch.h"

namespace {

using mezzo::CheckpointManager;
using mezzo::TrainingState;
using test_support::error_of;
using test_support::Scratch;
using testing::AllOf;
using testing::HasSubstr;

TEST(CheckpointManager, WithoutAHigherNumberNothingIsSaved) {
  const Scratch scratch;
  int64_t value = 0;
  const auto last = scratch.path() / "checkpoint-18446744073709551615-step-0.pt";
  test_support::put_bytes(last, "somebody's");
  EXPECT_THAT(
      error_of([&] { CheckpointManager(scratch.path()).save(TrainingState().add("a", value), 1); }),
      AllOf(HasSubstr(last.string()), HasSubstr("move it elsewhere")));
}

TEST(CheckpointManager, AFolderWithoutAnyIsAFreshStart) {
  const Scratch scratch;
  int64_t value = 3;
  EXPECT_FALSE(
      CheckpointManager(scratch.path() / "none").load_newest(TrainingState().add("a", value)));
  EXPECT_FALSE(std::filesystem::exists(scratch.path() / "none"));
}

TEST(CheckpointManager, KeepTheNewestByWhenTheyWereSavedNotByStep) {
  const Scratch scratch;
  int64_t value = 0;
  TrainingState state;
  state.add("value", value);
  CheckpointManager checkpoints(scratch.path() / "deep" / "run", {.keep = 2});
  for (const int64_t step : {900, 1000, 10}) checkpoints.save(state, step);
  ASSERT_EQ(checkpoints.files().size(), 2U);
  EXPECT_EQ(checkpoints.files()[0].filename(), "checkpoint-000003-step-10.pt");
  EXPECT_EQ(checkpoints.load_newest(state)->step, 10);
}

TEST(CheckpointManager, ASecondWriterIsRefusedAsLongAsTheFirstLives) {
  const Scratch scratch;
  int64_t value = 0;
  const auto state = TrainingState().add("value", value);
  CheckpointManager second(scratch.path());
  {
    CheckpointManager first(scratch.path());
    first.save(state, 1);
    EXPECT_THAT(error_of([&] { second.save(state, 2); }),
                HasSubstr("is being saved to by another process"));
    EXPECT_EQ(second.load_newest(state)->step, 1);
  }
  second.save(state, 2);
  EXPECT_EQ(second.load_newest(state)->step, 2);
}

TEST(CheckpointManager, LeaveOtherFilesAlone) {
  const Scratch scratch;
  int64_t value = 0;
  CheckpointManager checkpoints(scratch.path(), {.keep = 1});
  for (const char* name :
       {"checkpoint-1-step-2.pt.bak", "checkpoint-x-step-2.pt", ".checkpoint-1-step-2.pt.tmp",
        ".checkpoint-1-step-2.pt.7.tmp.x", "checkpoint-1-step-.pt", "notes"}) {
    test_support::put_bytes(scratch.path() / name, "somebody's");
  }
  const auto state = TrainingState().add("value", value);
  checkpoints.save(state, 1);
  checkpoints.save(state, 2);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(scratch.path()), {}), 6 + 2);
}

}  // namespace
