// The program as a user runs it: what it prints, where, and how it ends.
#include "program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "checkpoint.h"
#include "text.h"
#include "tiny_bert.h"

namespace bert_ner {
namespace {

namespace fs = std::filesystem;
using test::Arguments;
using test::Outcome;
using testing::AllOf;
using testing::HasSubstr;
using testing::MatchesRegex;
using testing::StartsWith;

class Program : public test::ProgramRuns {
 protected:
  /// One line on standard error that holds all of `parts`, no output, and the status.
  void expect_failure(const Outcome& outcome, int status, const Arguments& parts) const {
    EXPECT_EQ(outcome.status, status) << outcome.err;
    EXPECT_EQ(outcome.out, "");
    for (const auto& part : parts) EXPECT_THAT(outcome.err, HasSubstr(part));
    EXPECT_THAT(outcome.err, MatchesRegex("(epoch[^\n]*\n|amp[^\n]*\n|not needed[^\n]*\n)*"
                                          "bert_ner: [^\n]+\n"));
  }
};

TEST_F(Program, PrintsATableOfAllPrecisionsEachFromAProcessOfItsOwn) {
  const auto json = scratch_ / "results.json";
  const auto outcome =
      run(training({"--learning-rate", "0.01", "--quiet", "--json", json.string()}));
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(
      outcome.out,
      MatchesRegex("\\| name +\\| +F1 \\| +memory \\| bytes/param \\| tokens/s \\| speed \\| "
                   "skipped \\|\n"
                   "\\|[-:|]+\\|\n"
                   "\\| fp32 +\\| [^\n]* MiB \\| +16\\.0 \\| +[0-9]+ \\| +1\\.00 \\| +0 \\|\n"
                   "\\| amp no scale +\\| [^\n]*\n"
                   "\\| amp dynamic scale +\\| [^\n]*\n"
                   "\\| amp . 8-bit moments +\\| [^\n]*\n"
                   "\\| bf16 . split master +\\| [^\n]* +14\\.0 \\| [^\n]*\n"
                   "\\| bf16 . stochastic rounding +\\| [^\n]* +8\\.0 \\| [^\n]*\n"
                   "(\\| fp16 dynamic scale +\\| [^\n]*\n)?"
                   "(\nThe speeds do not compare[^\n]*\n)?"));  // where others run too
  const auto results = read_json(json);
  ASSERT_GE(results.at("rows").size(), 5U);
  EXPECT_EQ(results.at("float32_speeds").size(), results.at("rows").size() + 1);
  EXPECT_EQ(results.at("rows")[0].at("autocast"), "off");
  EXPECT_EQ(results.at("rows")[2].at("loss_scale"), 65536.0);
  for (const auto& row : results.at("rows")) {
    EXPECT_GT(row.at("f1").get<double>(), 0.5);  // the sentences are easy
    EXPECT_GT(row.at("peak_memory_bytes").get<double>(), 50e6);
    EXPECT_GT(row.at("tokens_per_second").get<double>(), 0);
  }
}

TEST_F(Program, RunsEachRowWithAllSeeds) {
  const auto outcome =
      run(training({"--max-steps", "2", "--seed", "5", "--seeds", "2", "--quiet", "--json", "-"}));
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const auto table = nlohmann::json::parse(outcome.out);
  for (const auto& row : table.at("rows")) {
    ASSERT_EQ(row.at("runs").size(), 2U);
    EXPECT_EQ(row.at("runs").at(0).at("seed"), 5);
    EXPECT_EQ(row.at("runs").at(1).at("seed"), 6);
    EXPECT_EQ(row.at("runs").at(1).at("steps"), 2);
  }
}

TEST_F(Program, WritesTheRunAsAPage) {
  const auto page = scratch_ / "run.html";
  const auto outcome = run(
      training({"--precision", "amp", "--max-steps", "5", "--quiet", "--report", page.string()}));
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  std::ifstream file(page);
  const std::string html{std::istreambuf_iterator<char>(file), {}};
  EXPECT_THAT(html, AllOf(StartsWith("<!doctype html>"),
                          HasSubstr("<h1>BERT, amp dynamic scale (autocast bfloat16)</h1>"),
                          HasSubstr("<dt>steps</dt><dd>5</dd>"), HasSubstr("<svg"),
                          HasSubstr("loss scale"), HasSubstr("gradient norm before clipping"),
                          HasSubstr("learning rate, by step"), HasSubstr("<dt>F1</dt>"),
                          HasSubstr("<dt>mean tokens/s</dt>"), HasSubstr("libtorch: ")));
  const auto nowhere = run(training({"--precision", "amp", "--report", "no/such/folder/run.html"}));
  expect_failure(nowhere, 1, {"no/such/folder", "cannot be created"});
}

TEST_F(Program, LeavesAPageAndACheckpointWhenItIsStopped) {
  for (const int signal : {SIGTERM, SIGINT}) {
    const auto page = scratch_ / ("stopped" + std::to_string(signal) + ".html");
    const auto saved = scratch_ / ("stopped" + std::to_string(signal));
    auto arguments = training({"--precision", "amp", "--report", page.string(), "--save",
                               saved.string(), "--save-every", "1", "--quiet"});
    *(std::find(arguments.begin(), arguments.end(), "--epochs") + 1) = "100000";
    const pid_t child = start(arguments);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (test::checkpoint_names(saved).empty() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    kill(child, signal);
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == signal) << status;
    EXPECT_THAT(test_support::bytes_of(page),
                AllOf(StartsWith("<!doctype html>"),
                      HasSubstr(signal == SIGTERM ? "stopped by SIGTERM" : "stopped by Ctrl-C")));
    EXPECT_GT(read_saved_run(saved).position.steps, 0);
  }
}

TEST_F(Program, LabelsTextWithWhatItSaved) {
  const auto saved = (scratch_ / "saved").string();
  const auto trained =
      run(training({"--precision", "fp32", "--learning-rate", "0.01", "--save", saved, "--quiet"}));
  ASSERT_EQ(trained.status, 0) << trained.err;
  const auto outcome = run({"predict", "--saved", saved, "carol smith lives in new york ."});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(outcome.out,
            "carol\tB-person\nsmith\tI-person\nlives\tO\nin\tO\nnew\tB-place\nyork\tI-place\n"
            ".\tO\n\n");
}

TEST_F(Program, ObeysTheEnvironmentInItsAmpRows) {
  setenv("MEZZO_AUTOCAST", "off", 1);
  const auto off = run(training({"--precision", "amp", "--max-steps", "1"}));
  setenv("MEZZO_AUTOCAST", "fast", 1);
  const auto wrong = run(training({"--precision", "amp", "--max-steps", "1"}));
  unsetenv("MEZZO_AUTOCAST");
  EXPECT_THAT(off.err, HasSubstr("autocast off"));
  EXPECT_EQ(wrong.status, 1);
  EXPECT_THAT(wrong.err, AllOf(HasSubstr("MEZZO_AUTOCAST"), HasSubstr("bf16")));
}

TEST_F(Program, TellsUsageErrorsFromOthersByItsStatus) {
  expect_failure(run({"--no-such-flag"}), 2, {"--no-such-flag", "--help"});
  expect_failure(run({"--resume", (scratch_ / "nowhere").string()}), 1,
                 {"nowhere/checkpoints: holds no checkpoint"});
  const auto help = run({"--help"});
  EXPECT_EQ(help.status, 0);
  EXPECT_EQ(help.err, "");
}

TEST_F(Program, SaysWhichFileAndLineIsWrong) {
  const auto with_corpus = [&](std::string_view text) {
    return Arguments{"--model", test::tiny_bert_folder().string(),       "--precision", "amp",
                     "--data",  scratch_.write("bad.txt", text).string()};
  };
  const auto refused = [&](std::string_view text, const Arguments& parts) {
    expect_failure(run(with_corpus(text)), 1, parts);
  };
  refused("alice\tB-person\nlives\n\n", {"bad.txt:2: "});
  refused("alice\tB-person\nlives\tX-verb\n\n", {"bad.txt:2: ", "X-verb"});
  refused("alice\tB-person\n\xff\xfe\tO\n\n", {"bad.txt:2: ", "UTF-8"});
  refused("", {"bad.txt"});
  refused("alice\tB-person\n\n",
          {"--held-out 0.2 of 1 sentences"});  // one sentence cannot be split
}

TEST_F(Program, SaysSoWhenTheDiskIsFullAndKeepsTheCheckpoint) {
  const auto saved = scratch_ / "saved";
  const Arguments flags{"--precision", "amp", "--max-steps", "2", "--save", saved.string()};
  ASSERT_EQ(run(training(flags)).status, 0);
  const auto before = test::checkpoint_names(saved);
  constexpr rlim_t kLessThanTheWeights = 20000;
  expect_failure(
      run({"--resume", saved.string(), "--save", saved.string(), "--quiet"}, kLessThanTheWeights),
      1, {"model.safetensors", "File too large", "untouched"});
  EXPECT_EQ(test::checkpoint_names(saved), before);
  test::load_tiny_bert(saved);
}

/// Starts the program, waits until it has saved once more, and kills it some milliseconds later, in
/// the middle of one of the next saves. \returns whether it did save
bool kill_after_a_save(pid_t child, const fs::path& saved, int milliseconds) {
  const auto before = test::checkpoint_names(saved);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (test::checkpoint_names(saved) == before && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const bool did_save = test::checkpoint_names(saved) != before;
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  return did_save;
}

TEST_F(Program, SurvivesKillsWhileItSaves) {
  const auto saved = scratch_ / "saved";
  const Arguments flags{"--save", saved.string(), "--save-every", "1", "--quiet"};
  auto arguments = training(flags);
  *(std::find(arguments.begin(), arguments.end(), "--epochs") + 1) = "100000";
  const char* rounds = std::getenv("BERT_NER_KILL_ROUNDS");  // more of them in the full tier
  for (int round = 0; round < (rounds != nullptr ? std::atoi(rounds) : 3); ++round) {
    constexpr int kPrime = 7, kSpread = 60;
    if (round == 0) arguments.insert(arguments.end(), {"--precision", "amp"});
    ASSERT_TRUE(kill_after_a_save(start(arguments), saved, round * kPrime % kSpread))
        << test_support::bytes_of(scratch_ / "stderr");
    ASSERT_GT(read_saved_run(saved).position.steps, round);
    test::load_tiny_bert(saved);
    for (const auto& file : mezzo::CheckpointManager(saved / "checkpoints").files()) {
      int64_t steps = 0;  // no torso under a whole one's name
      mezzo::load_checkpoint(file, mezzo::TrainingState().add("steps", steps), {.subset = true});
      EXPECT_GT(steps, 0);
    }
    arguments = flags;
    arguments.insert(arguments.end(), {"--resume", saved.string()});
  }
}

}  // namespace
}  // namespace bert_ner
