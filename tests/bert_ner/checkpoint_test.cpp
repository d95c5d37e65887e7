#include "checkpoint.h"

#include <caffe2/serialize/inline_container.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "run.h"
#include "text.h"
#include "tiny_bert.h"

namespace bert_ner {
namespace {

namespace fs = std::filesystem;
using test_support::Scratch;
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
    const std::string name(flag_of(base.training.precision));
    auto straight = base;
    straight.save = folder(name + " straight").string();
    run_training(straight);
    auto first = base;
    first.save = folder(name + " resumed").string();
    first.max_steps = stop;
    run_training(first);
    torch::manual_seed(12345);  // what happens between must not matter
    RunOptions second;
    second.resume = second.save = first.save;
    second.quiet = true;
    run_training(second);
    return {straight.save, second.save};
  }

  /// A run that saved one step. \returns its folder
  fs::path one_step() const {
    auto run = options();
    run.save = folder("saved").string();
    run.max_steps = 1;
    run_training(run);
    return run.save;
  }

  Scratch scratch_;
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

/// The checkpoints of a folder, the newest first.
std::vector<fs::path> checkpoints_in(const fs::path& saved) {
  return mezzo::CheckpointManager(saved / "checkpoints").files();
}

/// The bytes of all tensors of a checkpoint, in an order that does not depend on where a process
/// had its parameters, which libtorch names their state by.
std::vector<std::string> tensor_bytes(const fs::path& checkpoint) {
  caffe2::serialize::PyTorchStreamReader reader(checkpoint.string());
  std::vector<std::string> all;
  for (const auto& name : reader.getAllRecords()) {
    if (!name.starts_with("data/")) continue;
    const auto [bytes, size] = reader.getRecord(name);
    all.emplace_back(static_cast<const char*>(bytes.get()), size);
  }
  std::ranges::sort(all);
  return all;
}

/// The model folders are the same, and so is every tensor in the newest checkpoints.
void expect_same_files(const fs::path& a, const fs::path& b, const std::string& step) {
  ASSERT_EQ(names_in(a), names_in(b));
  for (const auto& name : names_in(a)) {
    if (name == "checkpoints") continue;
    EXPECT_EQ(test_support::bytes_of(a / name), test_support::bytes_of(b / name)) << name;
  }
  const auto one = checkpoints_in(a).front(), other = checkpoints_in(b).front();
  EXPECT_THAT(one.filename().string(), testing::EndsWith(step));
  EXPECT_THAT(other.filename().string(), testing::EndsWith(step));
  EXPECT_GT(tensor_bytes(one).size(), 100U);
  EXPECT_TRUE(tensor_bytes(one) == tensor_bytes(other));
}

TEST_F(Checkpoint, AResumedRunEndsBitForBitWhereTheStraightOneDoes) {
  for (const auto precision : {Precision::amp, Precision::amp_8bit, Precision::bf16_split_master,
                               Precision::bf16_stochastic}) {
    SCOPED_TRACE(flag_of(precision));
    // 29 sentences: 8 batches, 4 steps an epoch; step 6 lies in the middle of the second.
    const auto [straight, resumed] = straight_and_resumed(options(precision), 6);
    expect_same_files(straight, resumed, "-step-12.pt");
  }
}

TEST_F(Checkpoint, IsRefusedForOtherData) {
  const auto saved = one_step();
  test::write_tiny_corpus(scratch_, "corpus.txt", 35);
  EXPECT_THAT(error_of_resuming(saved), HasSubstr("had other sentences"));
}

TEST_F(Checkpoint, IsRefusedForAnotherVocabulary) {
  const auto saved = one_step();
  auto vocabulary = test_support::bytes_of(saved / "vocab.txt");
  vocabulary.replace(vocabulary.find_last_not_of('\n'), 1, "~");  // of the last token
  std::ofstream(saved / "vocab.txt") << vocabulary;
  EXPECT_THAT(error_of_resuming(saved), HasSubstr("had other config.json, vocab.txt"));
}

TEST_F(Checkpoint, ThatIsTruncatedIsRefusedByName) {
  const auto saved = one_step();
  const auto file = checkpoints_in(saved).front();
  fs::resize_file(file, 1000);
  EXPECT_THAT(error_of_resuming(saved), AllOf(HasSubstr(file.string()), HasSubstr("is damaged"),
                                              testing::Not(HasSubstr("\n"))));
}

}  // namespace
}  // namespace bert_ner
