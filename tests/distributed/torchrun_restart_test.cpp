// Two ranks under torchrun, which restarts them when one is killed, end bitwise identical to an
// uninterrupted run. MEZZO_TORCHRUN and MEZZO_RESTART_PROGRAM are commands; MEZZO_KILL_ROUNDS is
// the number of kills (default 3).

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../support/temp_dir.h"
#include "free_port.h"

namespace {

using distributed_test::free_port;
using test_support::TempDir;
using Clock = std::chrono::steady_clock;

constexpr int kRanks = 2;

struct Outcome {
  int status = -1;
  int kills = 0;
  std::vector<std::string> digests{};  ///< of the final weights and per-rank tensors, sorted
  double longest_recovery = 0;         ///< seconds from a kill to the next step
  std::string printed{};
};

/// Runs to the end, and kills a random rank after about five steps in each of the first `kills`
/// attempts.
Outcome run(const std::string& launcher, const std::string& mode, const TempDir& directory,
            int steps, int kills) {
  const std::string command = "exec env OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo " +
                              (MEZZO_TORCHRUN + (' ' + launcher)) + " --nproc-per-node " +
                              std::to_string(kRanks) + " --max-restarts 99 --no-python " +
                              MEZZO_RESTART_PROGRAM + ' ' + mode + ' ' + directory.path().string() +
                              ' ' + std::to_string(steps) + " 2>&1";
  std::mt19937 random(7);  // NOLINT: the same each time
  Outcome outcome;
  std::array<pid_t, kRanks> processes{};
  int did = 0, saved = 0, from = 0;
  Clock::time_point killed{};
  FILE* const pipe = popen(command.c_str(), "r");
  std::array<char, 4096> block{};
  while (std::fgets(block.data(), static_cast<int>(block.size()), pipe) != nullptr) {
    const std::string line = block.data();
    outcome.printed += line;
    int rank = 0, process = 0;
    if (std::sscanf(line.c_str(), "rank %d is %d", &rank, &process) == 2 && rank < kRanks) {
      processes.at(static_cast<std::size_t>(rank)) = process;
    }
    std::sscanf(line.c_str(), "saved %d", &saved);
    if (std::sscanf(line.c_str(), "from %d", &from) == 1) {
      did = 0;
      EXPECT_GE(from, saved) << "only steps since the last checkpoint are lost";
    }
    if (line.starts_with("end ") || line.starts_with("own ")) outcome.digests.push_back(line);
    if (!line.starts_with("did ")) continue;
    if (++did == 1 && outcome.kills > 0) {
      const double seconds = std::chrono::duration<double>(Clock::now() - killed).count();
      outcome.longest_recovery = std::max(outcome.longest_recovery, seconds);
    }
    if (did == 5 && outcome.kills < kills) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 12'000));
      killed = Clock::now();
      if (kill(processes.at(random() % kRanks), SIGKILL) == 0) ++outcome.kills;
    }
  }
  const int status = pclose(pipe);
  std::sort(outcome.digests.begin(), outcome.digests.end());
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return outcome;
}

/// Parameters: rendezvous and training mode.
class TorchrunRestart : public testing::TestWithParam<std::pair<std::string, std::string>> {};

TEST_P(TorchrunRestart, RandomKillsEndBitwiseIdentical) {
  if (std::system((std::string(MEZZO_TORCHRUN) + " --help > /dev/null 2>&1").c_str()) != 0) {
    GTEST_SKIP() << "no working torchrun (pip install torch): " << MEZZO_TORCHRUN;
  }
  const char* const kill_rounds = std::getenv("MEZZO_KILL_ROUNDS");
  const int kills = kill_rounds == nullptr ? 3 : std::atoi(kill_rounds);
  const int steps = 3 * kills + 8;
  const auto& [rendezvous, mode] = GetParam();
  const bool is_static = rendezvous == "Static";
  const auto launcher = [&] {
    return is_static ? "--nnodes 1 --node-rank 0 --master-addr 127.0.0.1 --master-port " +
                           std::to_string(free_port())
                     : std::string("--standalone");
  };
  const TempDir uninterrupted_directory, directory;
  const Outcome uninterrupted = run(launcher(), mode, uninterrupted_directory, steps, 0);
  ASSERT_EQ(uninterrupted.status, 0) << uninterrupted.printed;
  ASSERT_EQ(uninterrupted.digests.size(), 4U);
  EXPECT_THAT(uninterrupted.printed, testing::Not(testing::HasSubstr("ailed to bind")));
  const Outcome outcome = run(launcher(), mode, directory, steps, kills);
  SCOPED_TRACE(outcome.printed);
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.kills, kills);
  EXPECT_EQ(outcome.digests, uninterrupted.digests);
  EXPECT_LT(outcome.longest_recovery, 60.) << "seconds until all ranks had restarted";
  std::cout << outcome.kills << " kills, at most " << outcome.longest_recovery
            << " s until the next step\n";
}

INSTANTIATE_TEST_SUITE_P(Launchers, TorchrunRestart,
                         testing::Values(std::pair("Standalone", "ddp"),
                                         std::pair("Static", "zero")),
                         [](const auto& test) { return test.param.first + test.param.second; });

}  // namespace
