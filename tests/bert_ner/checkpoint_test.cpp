#include "checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <set>

#include "input_error.h"
#include "json_file.h"
#include "run.h"
#include "tiny_bert.h"

namespace bert_ner {
namespace {

namespace fs = std::filesystem;
using test::ScratchFolder;
using testing::AllOf;
using testing::HasSubstr;

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

/// Runs of the tiny model, in a folder of their own.
class Checkpoint : public testing::Test {
 protected:
  RunOptions options(Precision precision = Precision::amp) const {
    RunOptions run;
    run.model = test::tiny_bert_folder().string();
    run.data.data = corpus_.string();
    run.training.precision = precision;
    run.training.learning_rate = 3e-3;
    run.training.epochs = 3;
    run.training.batch_size = 4;
    run.training.accumulate = 2;
    run.training.dropout = 0.1;  // so that the random state matters
    run.threads = 1;
    run.quiet = true;
    return run;
  }

  fs::path folder(std::string_view name) const { return scratch_ / name; }

  /// Runs to the end in one go, and to `stop` and then on; \returns both folders.
  std::pair<fs::path, fs::path> straight_and_resumed(const RunOptions& base, int64_t stop) const {
    auto straight = base;
    straight.save = folder("straight").string();
    run_training(straight);
    auto first = base;
    first.save = folder("resumed").string();
    first.max_steps = stop;
    run_training(first);
    torch::manual_seed(12345);  // what happens between must not matter
    RunOptions second;
    second.resume = second.save = first.save;
    second.quiet = true;
    run_training(second);
    return {latest_checkpoint(straight.save), latest_checkpoint(second.save)};
  }

  /// A run that saved one step. \returns its checkpoint
  fs::path one_step() const {
    auto run = options();
    run.save = folder("saved").string();
    run.max_steps = 1;
    run_training(run);
    return latest_checkpoint(run.save);
  }

  ScratchFolder scratch_;
  fs::path corpus_ = test::write_tiny_corpus(scratch_, "corpus.txt", 36);
};

/// What is said of a checkpoint that cannot be resumed.
std::string error_of_resuming(const fs::path& from) {
  RunOptions run;
  run.resume = from.string();
  run.quiet = true;
  try {
    run_training(run);
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

void expect_same_files(const fs::path& a, const fs::path& b) {
  ASSERT_EQ(names_in(a), names_in(b));
  EXPECT_EQ(a.filename(), b.filename());
  for (const auto& name : names_in(a)) {
    EXPECT_EQ(test::read_bytes(a / name), test::read_bytes(b / name)) << name;
  }
}

TEST_F(Checkpoint, AResumedRunEndsBitForBitWhereTheStraightOneDoes) {
  // 29 sentences: 8 batches, 4 steps an epoch; step 6 lies in the middle of the second.
  const auto [straight, resumed] = straight_and_resumed(options(), 6);
  EXPECT_EQ(straight.filename(), "step-000012");
  expect_same_files(straight, resumed);
}

TEST_F(Checkpoint, ARunResumesFromTheEndOfAnEpochToo) {
  const auto [straight, resumed] = straight_and_resumed(options(Precision::fp32), 4);
  expect_same_files(straight, resumed);
}

TEST_F(Checkpoint, HoldsAScalerThatHasMoved) {
  auto run = options();
  run.save = folder("saved").string();
  run_training(run);
  const SafetensorsFile state(latest_checkpoint(run.save) / "training_state.safetensors");
  ASSERT_NE(state.find("scaler._growth_tracker"), nullptr);
  EXPECT_EQ(to_tensor(*state.find("scaler._growth_tracker")).item<double>(), 12);
}

TEST_F(Checkpoint, IsAModelToGoOnFrom) {
  auto run = options();
  run.save = folder("saved").string();
  run_training(run);
  const auto model = test::load_tiny_bert(latest_checkpoint(run.save));
  EXPECT_EQ(model->classifier->weight.size(0), 5);
}

TEST_F(Checkpoint, KeepsOneFolderAndClearsWhatAKillLeft) {
  auto run = options();
  run.save = folder("saved").string();
  run.save_every = 5;
  fs::create_directories(fs::path(run.save) / ".partial-step-000003");
  fs::create_directories(fs::path(run.save) / "notes");
  run_training(run);
  EXPECT_EQ(names_in(run.save), (std::set<std::string>{"latest", "step-000012", "notes"}));
  run_training(run);  // once more into the same folder
  EXPECT_EQ(names_in(run.save).size(), 3U);
  EXPECT_TRUE(fs::exists(latest_checkpoint(run.save) / "training_state.json"));
}

TEST_F(Checkpoint, OfAFailedWriteLeavesTheOldOneUntouched) {
  auto run = options();
  run.save = folder("saved").string();
  run.max_steps = 2;
  run_training(run);
  const auto before = latest_checkpoint(run.save);

  rlimit previous{};
  getrlimit(RLIMIT_FSIZE, &previous);
  const rlimit small{.rlim_cur = 20000, .rlim_max = previous.rlim_max};  // less than the weights
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &small);
  RunOptions more;
  more.resume = more.save = run.save;
  more.quiet = true;
  std::string message;
  try {
    run_training(more);
  } catch (const InputError& error) {
    message = error.what();
  }
  setrlimit(RLIMIT_FSIZE, &previous);
  std::signal(SIGXFSZ, handler);

  EXPECT_THAT(message, AllOf(HasSubstr("model.safetensors"), HasSubstr("File too large"),
                             testing::Not(HasSubstr("\n"))));
  EXPECT_EQ(latest_checkpoint(run.save), before);
  EXPECT_EQ(names_in(run.save), (std::set<std::string>{"latest", "step-000002"}));
  test::load_tiny_bert(before);
}

TEST_F(Checkpoint, IsRefusedForOtherData) {
  const auto saved = one_step();
  test::write_tiny_corpus(scratch_, "corpus.txt", 35);
  EXPECT_THAT(error_of_resuming(saved), HasSubstr("had other sentences"));
}

TEST_F(Checkpoint, ThatIsAModelAloneIsNoRun) {
  try {
    read_run_record(test::tiny_bert_folder());
    FAIL();
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("training_state.json"), HasSubstr("--model")));
  }
}

TEST_F(Checkpoint, WithAValueOfAnotherKindIsRefused) {
  const auto file = one_step() / "training_state.json";
  auto state = read_json(file);
  state["position"]["steps"] = "one";
  std::ofstream(file) << state.dump();
  EXPECT_THAT(error_of_resuming(folder("saved")),
              AllOf(HasSubstr("training_state.json: is no state of a run"), HasSubstr("string")));
}

TEST_F(Checkpoint, WithATruncatedFileIsRefusedByName) {
  const auto saved = one_step();
  fs::resize_file(saved / "training_state.safetensors", 1000);
  EXPECT_THAT(error_of_resuming(saved), HasSubstr("training_state.safetensors: is not the file"));
}

TEST_F(Checkpoint, WithAFileOfAnotherSaveIsRefusedByName) {
  const auto older = scratch_ / "older", torn = scratch_ / "torn";
  fs::copy(one_step(), older);
  auto run = options();
  run.save = folder("saved").string();
  run.max_steps = 2;
  run_training(run);
  const auto error_with_older = [&](const char* name) {
    fs::remove_all(torn);
    fs::copy(latest_checkpoint(run.save), torn);
    fs::copy_file(older / name, torn / name, fs::copy_options::overwrite_existing);
    return error_of_resuming(torn);
  };
  for (const std::string name : {"model.safetensors", "training_state.safetensors"}) {
    EXPECT_THAT(error_with_older(name.c_str()),
                HasSubstr("torn/" + name +
                          ": is not the file that was saved together with "
                          "training_state.json; resume from another checkpoint"));
  }
  EXPECT_THAT(error_with_older("training_state.json"),
              HasSubstr("is not the file that was saved together with training_state.json"));
  EXPECT_EQ(error_with_older("vocab.txt"), "no error");  // the same in both
}

TEST_F(Checkpoint, ThatLacksAFileIsRefusedByName) {
  const auto saved = one_step();
  fs::remove(saved / "training_state.safetensors");
  EXPECT_THAT(error_of_resuming(saved), HasSubstr("training_state.safetensors: cannot be opened"));
}

TEST_F(Checkpoint, WithAValueOutOfRangeIsRefusedByName) {
  const auto file = one_step() / "training_state.json";
  const auto good = read_json(file);
  const auto error_with = [&](const char* pointer, const nlohmann::json& value) {
    auto state = good;
    state[nlohmann::json::json_pointer(pointer)] = value;
    std::ofstream(file) << state.dump();
    return error_of_resuming(folder("saved"));
  };
  for (const char* field : {"accumulate", "batch_size", "epochs"}) {
    EXPECT_THAT(error_with((std::string("/training/") + field).c_str(), 0),
                AllOf(HasSubstr("training_state.json: \"" + std::string(field) + "\"")));
  }
  for (const char* field : {"epoch", "group", "steps"}) {
    EXPECT_THAT(error_with((std::string("/position/") + field).c_str(), -3),
                HasSubstr("training_state.json: \"" + std::string(field) + "\""));
  }
  EXPECT_THAT(error_with("/position/group", 100000), HasSubstr("do not fit together"));
  EXPECT_THAT(error_with("/position", {{"epoch", 0}, {"group", 0}, {"steps", 0}}),
              HasSubstr("training_state.safetensors: schedule.applied_steps is out of range"));
  EXPECT_THAT(error_with("/format", 99), HasSubstr("format 99, here 1"));
}

TEST_F(Checkpoint, KnowsTheModelAndTheChoicesOfItsRun) {
  auto run = options();
  run.save = folder("saved").string();
  run.max_steps = 1;
  run_training(run);
  RunOptions more;
  more.resume = run.save;
  const auto resumed = options_in_effect(more);
  EXPECT_EQ(resumed.model, run.model);
  EXPECT_EQ(resumed.data.data, run.data.data);
  EXPECT_EQ(resumed.training.batch_size, 4);
}

TEST(Checkpoints, OfALoopingLinkAreRefusedByName) {
  const ScratchFolder scratch;
  fs::create_symlink("latest", scratch / "latest");
  try {
    latest_checkpoint(scratch.path());
    FAIL();
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), HasSubstr("latest: cannot be followed"));
  }
}

TEST(ReplaceCheckpoint, RefusesToStandInForAFolderNamedLatest) {
  const ScratchFolder scratch;
  fs::create_directories(scratch / "latest");
  const auto replace = [&] {
    static_cast<void>(replace_checkpoint(scratch.path(), "step-000001", [](const fs::path&) {}));
  };
  EXPECT_THROW(replace(), InputError);
}

TEST(ReplaceCheckpoint, RemovesWhatAFailingWriterLeft) {
  const ScratchFolder scratch;
  const auto replace = [&] {
    static_cast<void>(replace_checkpoint(scratch.path(), "step-000001", [](const fs::path& folder) {
      std::ofstream(folder / "half") << "half";
      throw InputError("disk full");
    }));
  };
  EXPECT_THROW(replace(), InputError);
  EXPECT_EQ(names_in(scratch.path()).size(), 0U);
}

}  // namespace
}  // namespace bert_ner
