// The program as mpirun starts it: several processes that train one model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <regex>
#include <span>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "program.h"
#include "safetensors.h"
#include "text.h"

namespace bert_ner {
namespace {

namespace fs = std::filesystem;
using test::Arguments;
using test::Outcome;
using testing::HasSubstr;

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

/// The loss in the last line of progress.
double last_loss(const std::string& progress) {
  const auto at = progress.rfind("  loss ");
  return at == std::string::npos ? NAN : std::stod(progress.substr(at + 7));
}

/// Of the last row of a table: "0.188 | 0.200 | 0.176", F1, precision and recall.
std::string scores_in(const std::string& table) {
  std::smatch match;
  const std::regex scores("(0\\.\\d+ \\| +0\\.\\d+ \\| +0\\.\\d+) \\| +\\d+ MiB");
  return std::regex_search(table, match, scores) ? match[1].str() : "no scores in " + table;
}

class Distributed : public test::ProgramRuns {
 protected:
  void SetUp() override {
    for (const char* name : {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
                             "OMPI_MCA_rmaps_base_oversubscribe"}) {
      setenv(name, "1", 1);  // containers run as root, and have fewer cores than ranks
    }
    setenv("MPIEXEC_TIMEOUT", "60", 1);
  }

  Outcome run_ranks(int ranks, const Arguments& arguments) {
    return finish(start_ranks(ranks, arguments));
  }

  pid_t start_ranks(int ranks, Arguments arguments) {
    launcher_ = {BERT_NER_MPIEXEC, "-np", std::to_string(ranks)};
    arguments.insert(arguments.begin(), "--distributed");
    const pid_t child = start(std::move(arguments));
    launcher_.clear();
    return child;
  }

  /// Two epochs of four steps, of batches that do not come out even: the last has one sentence. The
  /// scores are of four batches.
  Arguments short_run(const std::string& save, Arguments more = {}) const {
    Arguments arguments{"--model",         BERT_NER_TEST_DATA "/tiny_bert",
                        "--train",         corpus_.string(),
                        "--valid",         valid_.string(),
                        "--epochs",        "2",
                        "--batch-size",    "5",
                        "--accumulate",    "2",
                        "--class-weights", "B-person=2",
                        "--precision",     "fp32",
                        "--learning-rate", "0.003",
                        "--save",          (scratch_ / save).string()};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }

  /// The newest checkpoint.
  fs::path latest(const std::string& saved) const {
    const auto names = test::checkpoint_names(scratch_ / saved);
    return scratch_ / saved / "checkpoints" / (names.empty() ? "none" : names.back());
  }

  /// As its name has it.
  int step_of_latest(const std::string& saved) const {
    std::smatch match;
    const auto name = latest(saved).filename().string();
    return std::regex_search(name, match, std::regex("-step-(\\d+)\\.pt")) ? std::stoi(match[1])
                                                                           : -1;
  }

  /// The weights of two checkpoints are the same within rounding.
  void expect_like(const std::string& saved, const std::string& expected) const {
    const auto one = read_safetensors(scratch_ / saved / "model.safetensors");
    const auto other = read_safetensors(scratch_ / expected / "model.safetensors");
    EXPECT_EQ(step_of_latest(saved), step_of_latest(expected));
    ASSERT_EQ(one.tensors.size(), other.tensors.size());
    for (const auto& [name, tensor] : one.tensors) {
      // A key's bias moves all scores of a query alike: its gradient is rounding, blown up by Adam.
      if (name.ends_with("key.bias")) continue;
      EXPECT_LT((tensor - other.find(name)).abs().max().item<double>(), 1e-5) << name;
    }
  }

  /// The CPU's generator of a rank, of a run without a scaler. A name stands before its bytes,
  /// which begin at a multiple of 64.
  std::string random_state(const std::string& saved, int rank) const {
    constexpr std::size_t kAlignment = 64, kGeneratorBytes = 5056;
    const auto file = test::read_bytes(latest(saved));
    const std::string name = "archive/data/7." + std::to_string(rank) + ".0FB";
    const auto end = file.find(name) + name.size();
    return file.substr((end + kAlignment - 1) / kAlignment * kAlignment, kGeneratorBytes);
  }

  /// Every rank has ended, and one of them has said why.
  static void expect_one_error(const Outcome& outcome, int status, const Arguments& parts) {
    EXPECT_EQ(outcome.status, status) << outcome.err;
    EXPECT_EQ(outcome.out, "");
    EXPECT_EQ(count_of(outcome.err, "bert_ner: "), 1U) << outcome.err;
    for (const auto& part : parts) EXPECT_THAT(outcome.err, HasSubstr(part));
  }

  fs::path valid_ = test::write_tiny_corpus(scratch_, "valid.txt", 100);
};

TEST_F(Distributed, RanksFollowOneProcess) {
  const auto alone = run(short_run("alone"));
  ASSERT_EQ(alone.status, 0) << alone.err;
  for (const int ranks : {2, 4}) {
    const auto saved = "ranks" + std::to_string(ranks);
    const auto outcome = run_ranks(ranks, short_run(saved));
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_NEAR(last_loss(outcome.err), last_loss(alone.err), 2e-4);  // it has four digits
    EXPECT_EQ(scores_in(outcome.out), scores_in(alone.out));
    expect_like(saved, "alone");
  }
}

TEST_F(Distributed, ResumesOnAnotherNumberOfRanks) {
  ASSERT_EQ(run(short_run("alone")).status, 0);
  const auto go_on = [&](const std::string& saved) {
    const auto folder = (scratch_ / saved).string();
    return Arguments{"--resume", folder, "--save", folder, "--quiet"};
  };
  ASSERT_EQ(run_ranks(2, short_run("fewer", {"--max-steps", "3"})).status, 0);
  const auto fewer = run(go_on("fewer"));
  EXPECT_EQ(fewer.status, 0) << fewer.err;
  expect_like("fewer", "alone");
  ASSERT_EQ(run(short_run("more", {"--max-steps", "5"})).status, 0);
  const auto more = run_ranks(2, go_on("more"));
  EXPECT_EQ(more.status, 0) << more.err;
  expect_like("more", "alone");
}

TEST_F(Distributed, ResumesBitForBitOnTheSameNumber) {
  ASSERT_EQ(run_ranks(2, short_run("straight", {"--dropout", "0.1"})).status, 0);
  ASSERT_EQ(run_ranks(2, short_run("resumed", {"--dropout", "0.1", "--max-steps", "3"})).status, 0);
  const auto folder = (scratch_ / "resumed").string();
  const auto outcome = run_ranks(2, {"--resume", folder, "--save", folder, "--quiet"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(test::read_bytes(scratch_ / "resumed" / "model.safetensors"),
            test::read_bytes(scratch_ / "straight" / "model.safetensors"));
  EXPECT_EQ(step_of_latest("resumed"), step_of_latest("straight"));
  for (const int rank : {0, 1}) {
    EXPECT_EQ(random_state("resumed", rank), random_state("straight", rank));
  }
  EXPECT_EQ(random_state("straight", 0).size(), 5056U);
  EXPECT_NE(random_state("straight", 0), random_state("straight", 1));  // other neurons drop out
}

TEST_F(Distributed, SaysOnceWhatAllRanksFindWrong) {
  expect_one_error(run_ranks(2, {"--no-such-flag"}), 2,
                   {"bert_ner: rank 0: The", "--no-such-flag"});
  expect_one_error(run_ranks(2, {"--model", (scratch_ / "nowhere").string(), "--data", corpus_,
                                 "--precision", "amp"}),
                   1, {"nowhere: is not a folder"});
}

TEST_F(Distributed, EndsAllRanksWithTheErrorOfTheOneThatFails) {
  expect_one_error(run_ranks(2, short_run("/proc/nowhere", {"--quiet"})), 1,
                   {"bert_ner: rank 0: ", "/proc/nowhere"});
}

TEST_F(Distributed, NamesARankThatWasStartedDifferently) {
  launcher_ = {BERT_NER_MPIEXEC, "-np", "1"};
  auto arguments =
      training({"--distributed", "--precision", "fp32", ":", "-np", "1", BERT_NER_PROGRAM});
  const auto other = training({"--distributed", "--precision", "fp32", "--seed", "2"});
  arguments.insert(arguments.end(), other.begin(), other.end());
  expect_one_error(run(arguments), 1, {"the ranks have different options"});
}

/// The processes that `parent` has started; their threads' too.
std::vector<pid_t> children_of(pid_t parent) {
  std::vector<pid_t> children;
  const auto tasks = "/proc/" + std::to_string(parent) + "/task";
  for (const auto& task : fs::directory_iterator(tasks)) {
    std::istringstream list(test::read_bytes(task.path() / "children"));
    for (pid_t child = 0; list >> child;) children.push_back(child);
  }
  return children;
}

/// Is it there, and more than the memory of a process that nobody has asked about?
bool is_alive(pid_t process) {
  const auto status = test::read_bytes("/proc/" + std::to_string(process) + "/status");
  return !status.empty() && status.find("State:\tZ") == std::string::npos;
}

TEST_F(Distributed, EndsWhenARankIsKilledAndGoesOnFromTheCheckpoint) {
  auto arguments = short_run("saved", {"--save-every", "1", "--quiet"});
  *(std::ranges::find(arguments, "--epochs") + 1) = "100000";
  const pid_t mpirun = start_ranks(2, arguments);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (step_of_latest("saved") < 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  const auto ranks = children_of(mpirun);
  ASSERT_EQ(ranks.size(), 2U) << test::read_bytes(scratch_ / "stderr");
  kill(ranks.back(), SIGKILL);
  const auto outcome = finish(mpirun);
  EXPECT_NE(outcome.status, 0);
  EXPECT_EQ(outcome.out, "");
  while (is_alive(ranks.front()) && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_FALSE(is_alive(ranks.front()));

  const int before = step_of_latest("saved");
  const auto folder = (scratch_ / "saved").string();
  const auto resumed = run_ranks(2, {"--resume", folder, "--save", folder, "--quiet", "--max-steps",
                                     std::to_string(before + 2)});
  EXPECT_EQ(resumed.status, 0) << resumed.err;
  EXPECT_EQ(step_of_latest("saved"), before + 2);
}

}  // namespace
}  // namespace bert_ner
