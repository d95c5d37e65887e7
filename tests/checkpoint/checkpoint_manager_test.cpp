// CheckpointManager: the checkpoints of a directory, and its lock.

#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/optim/lr_schedule.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "../support/message_of.h"
#include "../support/temp_dir.h"

namespace {

using mezzo::CheckpointManager;
using mezzo::TrainingState;
using test_support::message_of;
using test_support::TempDir;
using testing::AllOf;
using testing::HasSubstr;

TEST(CheckpointManager, SaveThrowsWithoutHigherSequenceNumber) {
  const TempDir temp_dir;
  int64_t value = 0;
  const auto last = temp_dir.path() / "checkpoint-18446744073709551615-step-0.pt";
  test_support::write_file(last, "not a checkpoint");
  EXPECT_THAT(message_of([&] {
                CheckpointManager(temp_dir.path()).save(TrainingState().add("a", value), 1);
              }),
              AllOf(HasSubstr(last.filename().string()), HasSubstr("move it elsewhere")));
}

TEST(CheckpointManager, LoadLatestReturnsNulloptIfEmpty) {
  const TempDir temp_dir;
  int64_t value = 3;
  const auto state = TrainingState().add("a", value);
  EXPECT_FALSE(CheckpointManager(temp_dir.path() / "none").load_latest(state));
  EXPECT_FALSE(CheckpointManager(temp_dir.path()).load_latest(state));
  EXPECT_EQ(value, 3);
  EXPECT_FALSE(std::filesystem::exists(temp_dir.path() / "none"));
}

TEST(CheckpointManager, LoadStepPrefersLastSaved) {
  const TempDir temp_dir;
  int64_t value = 0;
  TrainingState state;
  state.add("value", value);
  CheckpointManager checkpoints(temp_dir.path(), {.max_to_keep = 9});
  for (const int64_t step : {10, 20, 10, 30}) {
    ++value;
    checkpoints.save(state, step);
  }
  const auto loaded = checkpoints.load(state, 10);
  EXPECT_EQ(loaded.path.filename(), "checkpoint-000003-step-10.pt");
  EXPECT_EQ(loaded.step, 10);
  EXPECT_EQ(value, 3);
  EXPECT_THAT(message_of([&] { checkpoints.load(state, 11); }),
              HasSubstr("has no checkpoint of step 11; load one of the steps 30, 10, 20, 10"));
  EXPECT_THAT(message_of([&] { CheckpointManager(temp_dir.path() / "none").load(state, 1); }),
              HasSubstr("has no checkpoint of step 1, nor of any other step"));
}

TEST(SaveCheckpoint, ReplacesFileAndCreatesDirectory) {
  const TempDir temp_dir;
  int64_t value = 4;
  TrainingState state;
  state.add("value", value);
  const auto file = temp_dir.path() / "deep" / "best.pt";
  const auto saved = mezzo::save_checkpoint(file, state, 7);
  EXPECT_EQ(saved.size_bytes, std::filesystem::file_size(file));
  value = 5;
  mezzo::save_checkpoint(file, state, 8);
  value = 0;
  EXPECT_EQ(mezzo::load_checkpoint(file, state).step, 8);
  EXPECT_EQ(value, 5);
  EXPECT_THAT(message_of([&] { mezzo::save_checkpoint(file, TrainingState()); }),
              HasSubstr("save_checkpoint: the state is empty"));
  EXPECT_THAT(message_of([&] { mezzo::save_checkpoint(file, state, -1); }),
              HasSubstr("step is -1"));
  const auto names = std::distance(std::filesystem::directory_iterator(file.parent_path()), {});
  EXPECT_EQ(names, 1) << "no temporary is left";

  const auto directory = std::filesystem::current_path();
  std::filesystem::current_path(temp_dir.path());
  mezzo::save_checkpoint("here.pt", state);
  EXPECT_EQ(mezzo::load_checkpoint("here.pt", state).step, 0);
  std::filesystem::current_path(directory);
}

TEST(CheckpointManager, KeepsLastSavedRegardlessOfStep) {
  const TempDir temp_dir;
  int64_t value = 0;
  TrainingState state;
  state.add("value", value);
  CheckpointManager checkpoints(temp_dir.path() / "deep" / "run", {.max_to_keep = 2});
  for (const int64_t step : {900, 1000, 10}) checkpoints.save(state, step);
  ASSERT_EQ(checkpoints.checkpoints().size(), 2U);
  EXPECT_EQ(checkpoints.checkpoints()[0].filename(), "checkpoint-000003-step-10.pt");
  EXPECT_EQ(checkpoints.load_latest(state)->step, 10);
}

TEST(CheckpointManager, SecondWriterThrowsWhileFirstLives) {
  const TempDir temp_dir;
  int64_t value = 0;
  const auto state = TrainingState().add("value", value);
  CheckpointManager second(temp_dir.path());
  {
    CheckpointManager first(temp_dir.path());
    first.save(state, 1);
    EXPECT_THAT(message_of([&] { second.save(state, 2); }),
                HasSubstr("is being saved to by another process"));
    EXPECT_EQ(second.load_latest(state)->step, 1);
  }
  second.save(state, 2);
  EXPECT_EQ(second.load_latest(state)->step, 2);
}

TEST(CheckpointManager, ForkedChildDoesNotInheritLock) {
  const TempDir temp_dir;
  int64_t value = 1;
  const auto state = TrainingState().add("value", value);
  CheckpointManager checkpoints(temp_dir.path());
  checkpoints.save(state, 1);
  const auto saves_in_child = [&] {
    const pid_t child = fork();
    if (child == 0) {
      _exit(message_of([&] { checkpoints.save(state, 2); }) == "no error" ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  };
  EXPECT_FALSE(saves_in_child());
  checkpoints.save(state, 3);
  EXPECT_EQ(checkpoints.checkpoints().size(), 2U);
}

/// A pipe with which one process signals another to continue.
class Signal {
 public:
  Signal() { EXPECT_EQ(::pipe(ends_.data()), 0); }
  ~Signal() {
    for (const int end : ends_) ::close(end);
  }
  Signal(const Signal&) = delete;
  Signal& operator=(const Signal&) = delete;
  void give() const { (void)!::write(ends_[1], "x", 1); }
  void await() const {
    char c = 0;
    (void)!::read(ends_[0], &c, 1);
  }

 private:
  std::array<int, 2> ends_{};
};

TEST(CheckpointManager, ForkedChildDoesNotExtendLock) {
  const TempDir temp_dir;
  int64_t value = 1;
  const auto state = TrainingState().add("value", value);
  const Signal saved, over;
  const pid_t trainer = fork();
  if (trainer == 0) {
    CheckpointManager checkpoints(temp_dir.path());
    checkpoints.save(state, 1);
    if (fork() == 0) {  // such as a data loader worker
      saved.give();
      over.await();
      _exit(0);
    }
    over.await();
    _exit(0);
  }
  saved.await();
  std::vector<std::string> warnings;
  const auto record_warnings = [&](const std::string& text) { warnings.push_back(text); };
  CheckpointManager next(temp_dir.path(), {.on_warning = record_warnings});
  EXPECT_THAT(warnings, testing::ElementsAre(
                            HasSubstr("is being saved to by process " + std::to_string(trainer))));
  EXPECT_THAT(message_of([&] { next.save(state, 2); }), HasSubstr("is being saved to by another"));
  kill(trainer, SIGKILL);
  waitpid(trainer, nullptr, 0);
  EXPECT_EQ(message_of([&] { next.save(state, 2); }), "no error");
  over.give();
}

/// A custom object with a tuple.
struct Pair {
  torch::Tensor tensor = torch::zeros({2});
};
torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                            const Pair& pair) {
  archive.write("pair", c10::ivalue::Tuple::create({pair.tensor, 1}));
  return archive;
}
torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive, Pair& pair) {
  c10::IValue value;
  archive.read("pair", value);
  pair.tensor = value.toTupleRef().elements()[0].toTensor();
  return archive;
}

/// Everything that differs in how it is copied: tied and transposed weights, an optimizer's state,
/// a view, a tuple, numbers.
struct AsyncTraining {
  AsyncTraining() {
    state.add("model", model).add("optimizer", optimizer).add("schedule", schedule);
    state.add("view", view).add("step", step).add("order", order).add_rng_state();
    state.add("pair", pair);
    torch::Tensor transposed = model[1]->as<torch::nn::Linear>()->weight;
    transposed.set_data(transposed.detach().t().contiguous().t());
    train();
  }
  void train() {
    optimizer.zero_grad();
    model->forward(torch::randn({2, 3})).sum().backward();
    optimizer.step();
    schedule.step();
    view.add_(1), pair.tensor.add_(1);
    order.push_back(++step);
  }

  torch::nn::Linear tied{3, 3};
  torch::nn::Sequential model{tied, torch::nn::Linear(3, 3), tied};
  torch::optim::AdamW optimizer{tied->parameters()};
  mezzo::LinearSchedule schedule{optimizer, {.total_steps = 10}};
  torch::Tensor view = torch::zeros({9}).slice(0, 2, 5);
  int64_t step = 0;
  std::vector<int64_t> order;
  Pair pair;
  TrainingState state;
};

TEST(CheckpointManagerSaveAsync, SavesStateOfCallWhileTrainingContinues) {
  const TempDir temp_dir;
  AsyncTraining run;
  const auto expected = CheckpointManager(temp_dir.path() / "a").save(run.state, 7);
  CheckpointManager checkpoints(temp_dir.path() / "b");
  for (int64_t step = 5; step <= 7; ++step) checkpoints.save_async(run.state, step);
  run.train();
  checkpoints.wait();
  ASSERT_EQ(checkpoints.checkpoints().size(), 2U);
  const auto path = checkpoints.checkpoints()[0];
  EXPECT_EQ(path.filename(), "checkpoint-000003-step-7.pt");
  EXPECT_LE(std::filesystem::file_size(path), expected.size_bytes) << "tied weights are saved once";
  const auto load_and_save = [&](const std::filesystem::path& from) {
    AsyncTraining other;
    mezzo::load_checkpoint(from, other.state);
    return test_support::read_file(mezzo::save_checkpoint(temp_dir.path() / "c", other.state).path);
  };
  EXPECT_TRUE(load_and_save(path) == load_and_save(expected.path));
}

TEST(SaveCheckpoint, FollowsSymlinksAndPreservesMode) {
  namespace fs = std::filesystem;
  const TempDir temp_dir;
  int64_t value = 4;
  const auto state = TrainingState().add("value", value);
  const auto target = temp_dir.path() / "store" / "best.pt", link = temp_dir.path() / "best.pt";
  mezzo::save_checkpoint(target, state, 1);
  fs::permissions(target, fs::perms::owner_read | fs::perms::owner_write);
  fs::create_symlink("store/best.pt", link);
  mezzo::save_checkpoint(link, state, 2);
  EXPECT_TRUE(fs::is_symlink(link));
  EXPECT_EQ(mezzo::load_checkpoint(target, state).step, 2);
  EXPECT_EQ(fs::status(target).permissions(), fs::perms::owner_read | fs::perms::owner_write);
  fs::remove(target);
  mezzo::save_checkpoint(link, state, 3);
  EXPECT_TRUE(fs::is_symlink(link));
  EXPECT_EQ(mezzo::load_checkpoint(target, state).step, 3);
}

TEST(SaveCheckpoint, ThrowsForNonRegularFile) {
  const TempDir temp_dir;
  int64_t value = 4;
  const auto state = TrainingState().add("value", value);
  const auto pipe = temp_dir.path() / "pipe", device = temp_dir.path() / "null";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  std::filesystem::create_symlink("/dev/null", device);
  for (const auto& path : {pipe, device, temp_dir.path()}) {
    EXPECT_THAT(message_of([&] { mezzo::save_checkpoint(path, state, 1); }),
                HasSubstr("is not a regular file"));
  }
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
}

TEST(CheckpointManager, ReacquiresLockAfterDirectoryRemoval) {
  const TempDir temp_dir;
  const auto directory = temp_dir.path() / "run";
  int64_t value = 1;
  const auto state = TrainingState().add("value", value);
  CheckpointManager first(directory), second(directory);
  first.save(state, 1);
  std::filesystem::remove_all(directory);
  first.save(state, 2);
  EXPECT_EQ(first.checkpoints().size(), 1U);
  EXPECT_THAT(message_of([&] { second.save(state, 3); }),
              HasSubstr("is being saved to by another"));
  std::filesystem::remove(directory / ".lock");
  second.save(state, 4);
  EXPECT_THAT(message_of([&] { first.save(state, 5); }), HasSubstr("is being saved to by another"));
}

TEST(CheckpointManager, ResolvesRelativeDirectoryAtConstruction) {
  const TempDir temp_dir;
  int64_t value = 1;
  const auto state = TrainingState().add("value", value);
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(temp_dir.path());
  CheckpointManager checkpoints("run");
  checkpoints.save(state, 1);
  std::filesystem::create_directory("elsewhere");
  std::filesystem::current_path("elsewhere");
  const auto saved = checkpoints.save(state, 2);
  const auto loaded = checkpoints.load_latest(state);
  std::filesystem::current_path(before);
  EXPECT_TRUE(std::filesystem::exists(saved.path));
  EXPECT_EQ(saved.path.parent_path(), temp_dir.path() / "run");
  EXPECT_EQ(loaded->step, 2);
  EXPECT_EQ(checkpoints.checkpoints().size(), 2U);
}

TEST(CheckpointManager, PreservesUnrelatedFiles) {
  const TempDir temp_dir;
  int64_t value = 0;
  CheckpointManager checkpoints(temp_dir.path(), {.max_to_keep = 1});
  for (const char* name :
       {"checkpoint-000001-step-2.pt.bak", "checkpoint-x-step-2.pt",
        ".checkpoint-000001-step-2.pt.tmp", ".checkpoint-000001-step-2.pt.7.tmp.x",
        ".checkpoint-000001-step-2.pt.x.tmp", "checkpoint-000001-step-.pt", "notes"}) {
    test_support::write_file(temp_dir.path() / name, "not a checkpoint");
  }
  const auto state = TrainingState().add("value", value);
  checkpoints.save(state, 1);
  checkpoints.save(state, 2);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(temp_dir.path()), {}), 7 + 2);
}

}  // namespace
