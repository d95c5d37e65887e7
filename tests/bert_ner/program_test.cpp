// Runs bert_ner, and checks its output, files and exit status.
#include <mezzo/checkpoint/checkpoint.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../support/temp_dir.h"

namespace {

namespace fs = std::filesystem;
using test_support::read_file;
using testing::AllOf;
using testing::ElementsAre;
using testing::Gt;
using testing::HasSubstr;
using testing::MatchesRegex;
using testing::StartsWith;
using Arguments = std::vector<std::string>;

/// `count` sentences "NAME [SURNAME] lives in PLACE .", tagged, as CoNLL.
std::string tiny_corpus(std::size_t count) {
  constexpr std::array kNames = {"alice\tB-person\n", "bob\tB-person\nsmith\tI-person\n",
                                 "carol\tB-person\njones\tI-person\n", "carol\tB-person\n"};
  constexpr std::array kVerbs = {"lives\tO\nin\tO\n", "works\tO\nat\tO\n", "visits\tO\n"};
  constexpr std::array kPlaces = {"paris\tB-place\n", "rome\tB-place\n",
                                  "new\tB-place\nyork\tI-place\n"};
  std::string text;
  for (std::size_t i = 0; i < count; ++i) {
    text += std::string(kNames[i % 4]) + kVerbs[i % 3] + kPlaces[i / 2 % 3] + ".\tO\n\n";
  }
  return text;
}

/// Returns the checkpoints in a directory of --save, the latest first.
std::vector<fs::path> list_checkpoints(const fs::path& saved) {
  std::vector<fs::path> files;
  std::error_code error;  // another process may write it
  fs::directory_iterator entry(saved / "checkpoints", error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    if (entry->path().filename().string().starts_with("checkpoint-")) files.push_back(*entry);
  }
  std::ranges::sort(files, std::greater());
  return files;
}

int64_t read_steps(const fs::path& checkpoint) {
  int64_t steps = 0;
  mezzo::load_checkpoint(checkpoint, mezzo::TrainingState().add("steps", steps),
                         {.ignore_unexpected = true});
  return steps;
}

struct Outcome {
  int status = 0;
  std::string out, err;
};

class BertNerProgram : public testing::Test {
 protected:
  /// Starts the program with its output redirected to files.
  pid_t start(Arguments arguments, rlim_t largest_file = RLIM_INFINITY) const {
    arguments.insert(arguments.begin(), BERT_NER_PROGRAM);
    setenv("OMP_NUM_THREADS", "1", 1);  // faster for a tiny model
    std::vector<char*> pointers;
    for (auto& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    const auto out = (temp_dir_ / "stdout").string(), err = (temp_dir_ / "stderr").string();
    const pid_t child = fork();
    if (child != 0) return child;
    dup2(open(out.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600), STDOUT_FILENO);
    dup2(open(err.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600), STDERR_FILENO);
    const rlimit limit{largest_file, RLIM_INFINITY};
    setrlimit(RLIMIT_FSIZE, &limit);
    execv(pointers.front(), pointers.data());
    _exit(127);
  }

  Outcome run(Arguments arguments, rlim_t largest_file = RLIM_INFINITY) const {
    int status = 0;
    waitpid(start(std::move(arguments), largest_file), &status, 0);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
            read_file(temp_dir_ / "stdout"), read_file(temp_dir_ / "stderr")};
  }

  /// Returns the arguments of a short run with the tiny model.
  Arguments training_arguments(const Arguments& more, const std::string& epochs = "8") const {
    Arguments arguments{"--model",  BERT_NER_TEST_DATA "/tiny_bert",
                        "--data",   corpus_.string(),
                        "--epochs", epochs,
                        "--quiet",  "--batch-size",
                        "4"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }

  /// Expects `status`, no output, and one line on standard error with all of `parts`.
  void expect_failure(const Outcome& outcome, int status, const Arguments& parts) const {
    EXPECT_EQ(outcome.status, status) << outcome.err;
    EXPECT_EQ(outcome.out, "");
    for (const auto& part : parts) EXPECT_THAT(outcome.err, HasSubstr(part));
    EXPECT_THAT(outcome.err, MatchesRegex("(note: [^\n]+\n)*bert_ner: [^\n]+\n"));
  }

  /// Waits for a checkpoint that is not in `before`.
  void wait_for_checkpoint(const fs::path& saved, const std::vector<fs::path>& before) const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (list_checkpoints(saved) == before && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  test_support::TempDir temp_dir_;
  fs::path corpus_ = temp_dir_.write("corpus.txt", tiny_corpus(36));
  std::string saved_ = (temp_dir_ / "saved").string();
};

TEST_F(BertNerProgram, RunsEachPrecisionInSeparateProcess) {
  const auto json = temp_dir_ / "results.json";
  const auto outcome =
      run(training_arguments({"--learning-rate", "0.01", "--json", json.string()}));
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(
      outcome.out,
      MatchesRegex("\\| name +\\| +F1 \\| +memory \\| bytes/param \\| tokens/s \\| +speed \\| "
                   "skipped \\|\n"
                   "\\|[-:|]+\\|\n"
                   "\\| fp32 +\\| [^\n]* MiB \\(1\\.00\\) \\| +16\\.0 \\| +[0-9]+ \\| +[0-9.]+ ± "
                   "[0-9.]+ \\| +0 \\|\n"
                   "\\| amp no scale +\\| [^\n]*\n"
                   "\\| amp dynamic scale +\\| [^\n]*\n"
                   "\\| amp . 8-bit moments +\\| [^\n]*\n"
                   "\\| bf16 . split master +\\| [^\n]* +14\\.0 \\| [^\n]*\n"
                   "\\| bf16 . stochastic rounding +\\| [^\n]* +8\\.0 \\| [^\n]*\n"
                   "(\\| fp16 dynamic scale +\\| [^\n]*\n)?"));
  const auto results = nlohmann::json::parse(read_file(json));
  ASSERT_GE(results.at("rows").size(), 5U);
  EXPECT_EQ(results.at("rows")[0].at("autocast"), "off");
  EXPECT_EQ(results.at("rows")[2].at("loss_scale"), 65536.0);
  for (const auto& row : results.at("rows")) {
    EXPECT_GT(row.at("f1").get<double>(), 0.5);  // the sentences are easy
    EXPECT_GT(row.at("peak_memory_bytes").get<double>(), 50e6);
    EXPECT_GT(row.at("tokens_per_second").get<double>(), 0);
    // Relative to the float32 steps before and after the row.
    EXPECT_THAT(row.at("relative_speeds").get<std::vector<double>>(), ElementsAre(Gt(0), Gt(0)));
  }
}

TEST_F(BertNerProgram, RunsEachRowWithAllSeeds) {
  const auto outcome = run(training_arguments(
      {"--max-steps", "2", "--seed", "5", "--seeds", "2", "--json", "-", "--warmup", "0.5"}));
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  for (const auto& row : nlohmann::json::parse(outcome.out).at("rows")) {
    ASSERT_EQ(row.at("runs").size(), 2U);
    EXPECT_EQ(row.at("relative_speeds").size(), 4U);
    EXPECT_EQ(row.at("runs").at(0).at("seed"), 5);
    EXPECT_EQ(row.at("runs").at(1).at("seed"), 6);
    EXPECT_EQ(row.at("runs").at(1).at("steps"), 2);
  }
}

TEST_F(BertNerProgram, WritesHtmlReport) {
  const auto page = temp_dir_ / "run.html";
  const auto outcome = run(
      training_arguments({"--precision", "amp", "--max-steps", "5", "--report", page.string()}));
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(read_file(page),
              AllOf(StartsWith("<!doctype html>"),
                    HasSubstr("<h1>BERT, amp dynamic scale (autocast bfloat16)</h1>"),
                    HasSubstr("<dt>steps</dt><dd>5</dd>"), HasSubstr("<svg"),
                    HasSubstr("learning rate, by step"), HasSubstr("<dt>F1</dt>")));
  const auto nowhere =
      run(training_arguments({"--precision", "amp", "--report", "no/such/folder/run.html"}));
  expect_failure(nowhere, 1, {"no/such/folder", "cannot be created"});
}

TEST_F(BertNerProgram, SigtermWritesReportAndCheckpoint) {
  for (const int signal : {SIGTERM, SIGINT}) {
    const auto page = temp_dir_ / "stopped.html";
    const auto saved = temp_dir_ / ("stopped" + std::to_string(signal));
    const pid_t child = start(training_arguments({"--precision", "amp", "--report", page.string(),
                                                  "--save", saved.string(), "--save-every", "1"},
                                                 "100000"));
    wait_for_checkpoint(saved, {});
    kill(child, signal);
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == signal) << status;
    EXPECT_THAT(read_file(page), HasSubstr(signal == SIGTERM ? "by SIGTERM" : "by Ctrl-C"));
    EXPECT_GT(read_steps(list_checkpoints(saved).front()), 0);
  }
}

TEST_F(BertNerProgram, LabelsTextWithSavedModel) {
  const auto trained = run(training_arguments(
      {"--precision", "fp32", "--learning-rate", "0.01", "--save", saved_}, "24"));
  ASSERT_EQ(trained.status, 0) << trained.err;
  const auto outcome = run({"predict", "--saved", saved_, "carol smith lives in new york ."});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(outcome.out,
            "carol\tB-person\nsmith\tI-person\nlives\tO\nin\tO\nnew\tB-place\nyork\tI-place\n"
            ".\tO\n\n");
}

TEST_F(BertNerProgram, ResumedRunIsBitwiseIdentical) {
  for (const char* precision : {"amp", "amp-8bit", "bf16-split-master", "bf16-stochastic"}) {
    SCOPED_TRACE(precision);
    const auto uninterrupted = (temp_dir_ / precision).string(),
               resumed = uninterrupted + " resumed";
    // 29 sentences are 8 steps per epoch; step 12 is in the middle of the second epoch.
    const auto train = [&](const std::string& folder, const Arguments& more) {
      auto arguments =
          training_arguments({"--precision", precision, "--save", folder, "--dropout", "0.1"}, "3");
      arguments.insert(arguments.end(), more.begin(), more.end());
      const auto outcome = run(arguments);
      EXPECT_EQ(outcome.status, 0) << outcome.err;
    };
    train(uninterrupted, {});
    train(resumed, {"--max-steps", "12"});
    train(resumed, {"--resume"});
    EXPECT_EQ(read_steps(list_checkpoints(resumed).front()), 24);
    for (const char* file : {"model.safetensors", "config.json", "vocab.txt"}) {
      EXPECT_EQ(read_file(fs::path(uninterrupted) / file), read_file(fs::path(resumed) / file))
          << file;
    }
  }
}

TEST_F(BertNerProgram, ResumingDifferentRunFails) {
  const auto resumed = [&](const Arguments& more) {
    auto arguments =
        training_arguments({"--precision", "amp", "--save", saved_, "--max-steps", "1"});
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments);
  };
  expect_failure(resumed({"--resume"}), 1, {"saved/checkpoints: has no checkpoint"});
  ASSERT_EQ(resumed({}).status, 0);
  expect_failure(resumed({"--resume", "--learning-rate", "0.5"}), 1, {"had other learning_rate"});
  temp_dir_.write("corpus.txt", tiny_corpus(35));
  expect_failure(resumed({"--resume"}), 1, {"had other sentences"});
  temp_dir_.write("corpus.txt", tiny_corpus(36));
  const auto file = list_checkpoints(saved_).front();
  fs::resize_file(file, 1000);
  expect_failure(resumed({"--resume"}), 1, {file.string(), "is corrupt"});
}

TEST_F(BertNerProgram, AmpReadsMixedPrecisionVariable) {
  setenv("MEZZO_MIXED_PRECISION", "no", 1);
  const auto off =
      run(training_arguments({"--precision", "amp", "--max-steps", "1", "--json", "-"}));
  setenv("MEZZO_MIXED_PRECISION", "fast", 1);
  const auto wrong = run(training_arguments({"--precision", "amp", "--max-steps", "1"}));
  unsetenv("MEZZO_MIXED_PRECISION");
  EXPECT_THAT(off.out, HasSubstr("\"autocast\": \"off\""));
  expect_failure(wrong, 1, {"MEZZO_MIXED_PRECISION", "bf16"});
}

TEST_F(BertNerProgram, ExitStatusDistinguishesUsageErrors) {
  expect_failure(run({"--no-such-flag"}), 2, {"--no-such-flag", "--help"});
  expect_failure(run(training_arguments({"--epochs", "0"})), 2, {"--epochs"});
  const auto help = run({"--help"});
  EXPECT_EQ(help.status, 0);
  EXPECT_EQ(help.err, "");
}

TEST_F(BertNerProgram, ErrorNamesFileAndLine) {
  const auto expect_error = [&](std::string_view text, const Arguments& parts) {
    expect_failure(run({"--model", BERT_NER_TEST_DATA "/tiny_bert", "--precision", "amp", "--data",
                        temp_dir_.write("bad.txt", text).string()}),
                   1, parts);
  };
  expect_error("alice\tB-person\nlives\n\n", {"bad.txt:2: "});
  expect_error("alice\tB-person\nlives\tX-verb\n\n", {"bad.txt:2: ", "X-verb"});
  expect_error("alice\tB-person\n\xff\xfe\tO\n\n", {"bad.txt:2: ", "UTF-8"});
  expect_error("", {"bad.txt"});
  expect_error("alice\tB-person\n\n",
               {"--held-out 0.2 of 1 sentences"});  // one sentence cannot be split
}

TEST_F(BertNerProgram, InconsistentModelDirectoryFails) {
  fs::copy(BERT_NER_TEST_DATA "/tiny_bert", saved_);
  const auto expect_error = [&](const char* file, const std::string& bytes,
                                const Arguments& parts) {
    const auto path = fs::path(saved_) / file;
    const auto before = read_file(path);
    test_support::write_file(path, bytes);
    expect_failure(run({"--model", saved_, "--data", corpus_.string(), "--precision", "amp"}), 1,
                   parts);
    test_support::write_file(path, before);
  };
  auto config = nlohmann::json::parse(read_file(fs::path(saved_) / "config.json"));
  const auto weights = read_file(fs::path(saved_) / "model.safetensors");
  expect_error("config.json", "{", {"config.json", "not valid JSON"});
  expect_error("model.safetensors", weights.substr(0, 5), {"model.safetensors", "truncated"});
  expect_error("model.safetensors", weights.substr(0, weights.size() - 4),
               {"model.safetensors", "bytes of data"});
  config["intermediate_size"] = 7;
  expect_error("config.json", config.dump(), {"model.safetensors", "of the same model?"});
  config["hidden_size"] = -1;
  expect_error("config.json", config.dump(), {"\"hidden_size\" is -1"});
}

TEST_F(BertNerProgram, FullDiskFailsAndPreservesCheckpoint) {
  auto arguments = training_arguments({"--precision", "amp", "--save", saved_, "--max-steps", "2"});
  ASSERT_EQ(run(arguments).status, 0);
  const auto before = list_checkpoints(saved_);
  constexpr rlim_t kFileSizeLimit = 20000;
  arguments.insert(arguments.end(), {"--resume", "--max-steps", "4"});
  expect_failure(run(arguments, kFileSizeLimit), 1,
                 {"model.safetensors", "File too large", "unchanged"});
  EXPECT_EQ(list_checkpoints(saved_), before);
  EXPECT_EQ(run({"predict", "--saved", saved_, "alice ."}).status, 0);
}

TEST_F(BertNerProgram, SurvivesKillDuringSave) {
  auto arguments =
      training_arguments({"--precision", "amp", "--save", saved_, "--save-every", "1"}, "100000");
  for (int round = 0; round < 20; ++round) {
    const auto before = list_checkpoints(saved_);
    const pid_t child = start(arguments);
    wait_for_checkpoint(saved_, before);
    ASSERT_NE(list_checkpoints(saved_), before) << read_file(temp_dir_ / "stderr");
    // During one of the next saves.
    std::this_thread::sleep_for(std::chrono::milliseconds(round * 7 % 60));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    ASSERT_EQ(run({"predict", "--saved", saved_, "alice ."}).status, 0);
    ASSERT_GT(read_steps(list_checkpoints(saved_).front()), round);
    EXPECT_GT(read_steps(list_checkpoints(saved_).back()), 0);  // no partial file
    if (round == 0) arguments.push_back("--resume");
  }
}

}  // namespace
