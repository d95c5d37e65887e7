// Ranks that really die: mpirun starts watchdog_program, of which one rank goes wrong in its sixth
// collective, and what it prints is read here; mpirun ends those that do not end by themselves.
// MEZZO_MPIRUN and MEZZO_WATCHDOG_PROGRAM are commands.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>
#include <sys/wait.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "free_port.h"

namespace watchdog_faults_test {
namespace {

using Clock = std::chrono::steady_clock;
using distributed_test::free_port;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

struct Outcome {
  std::string printed;
  int status = -1;
  double seconds = -1;  ///< since a rank went wrong
};

struct Fault {
  std::string what;
  int victim;
  int ranks;
  bool recovery = false;  ///< mpirun leaves those that are left alone

  /// Between SIGTERM and SIGKILL, which mpirun always waits, and twice. One is its default; many
  /// ranks on a machine with few and busy cores may not all get to speak in it.
  int seconds_to_speak() const { return ranks > 2 ? 3 : 1; }
};

std::ostream& operator<<(std::ostream& to, const Fault& fault) {
  return to << fault.what << " rank " << fault.victim << " of " << fault.ranks
            << (fault.recovery ? " with --enable-recovery" : "");
}

Outcome outcome_of(const Fault& fault) {
  const std::string command =
      "MPIEXEC_TIMEOUT=40 OMPI_MCA_odls_base_sigkill_timeout=" +
      std::to_string(fault.seconds_to_speak()) + " MASTER_PORT=" + std::to_string(free_port()) +
      ' ' + MEZZO_MPIRUN + ' ' + std::to_string(fault.ranks) +
      (fault.recovery ? " --enable-recovery " : " ") + MEZZO_WATCHDOG_PROGRAM + ' ' + fault.what +
      ' ' + std::to_string(fault.victim) + " 2>&1";
  Outcome outcome;
  FILE* const pipe = popen(command.c_str(), "r");
  std::array<char, 4096> line{};
  std::optional<Clock::time_point> went_wrong;
  while (std::fgets(line.data(), static_cast<int>(line.size()), pipe) != nullptr) {
    outcome.printed += line.data();
    if (!went_wrong && outcome.printed.find("goes wrong") != std::string::npos) {
      went_wrong = Clock::now();
    }
  }
  if (went_wrong) {
    outcome.seconds = std::chrono::duration<double>(Clock::now() - *went_wrong).count();
  }
  const int status = pclose(pipe);
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return outcome;
}

/// What the rank said when it ended, or nothing.
std::string last_words(const Outcome& outcome, const Fault& fault, int rank) {
  const std::string begin =
      "mezzo: rank " + std::to_string(rank) + " of " + std::to_string(fault.ranks) + " ends: ";
  const std::size_t at = outcome.printed.find(begin);
  if (at == std::string::npos) return "";
  return outcome.printed.substr(at + begin.size(), outcome.printed.find('\n', at) - at);
}

class WatchdogFaults : public testing::TestWithParam<Fault> {};

TEST_P(WatchdogFaults, EveryRankThatIsLeftEndsInTimeNamingRankAndCollective) {
  const Fault& fault = GetParam();
  const Outcome outcome = outcome_of(fault);
  SCOPED_TRACE(outcome.printed);
  const std::string victim = "rank " + std::to_string(fault.victim);
  // Of mpirun that recovers 0 is all that can be had.
  EXPECT_EQ(outcome.status == 0, fault.recovery);
  if (!fault.recovery && fault.what == "kill") {
    EXPECT_EQ(outcome.status, 128 + SIGKILL);
  }
  if (fault.what == "stop" || fault.what == "hang") {
    EXPECT_EQ(outcome.status, 75) << "try again";
  }
  // heartbeat_timeout is 2 s, collective_timeout 2.2, and an interval 0.2; the rest is mpirun's and
  // the machine's.
  ASSERT_GE(outcome.seconds, 0.) << "no rank went wrong";
  EXPECT_LT(outcome.seconds, 2.2 + 4 * 0.2 + 2 * fault.seconds_to_speak() + 4.);

  const char* const collective = "all_reduce(sum) of 64 Float (collective 6)";
  const bool host_died = fault.victim == 0 && (fault.what == "kill" || fault.what == "exit");
  for (int rank = 0; rank < fault.ranks; ++rank) {
    if (rank == fault.victim) continue;
    const std::string words = last_words(outcome, fault, rank);
    EXPECT_THAT(words, AllOf(HasSubstr(victim), HasSubstr(collective))) << "rank " << rank;
    if (host_died) {
      EXPECT_THAT(words, HasSubstr("the connection to rank 0"));
    }
    if (fault.what == "throw") {
      EXPECT_THAT(words, HasSubstr(victim + " failed: the disk is full"));
    }
    if (fault.what == "hang") {
      EXPECT_THAT(words, AllOf(HasSubstr(victim + " has not called all_reduce"),
                               HasSubstr(victim + " is alive")));
    }
  }
  if (fault.what == "hang") {
    EXPECT_THAT(last_words(outcome, fault, fault.victim), HasSubstr(victim + " has not called"));
  }
  if (fault.what == "throw") {
    EXPECT_THAT(outcome.printed, HasSubstr("caught: the disk is full"));
  }
}

std::string name_of(const testing::TestParamInfo<Fault>& test) {
  return test.param.what + std::to_string(test.param.victim) + "of" +
         std::to_string(test.param.ranks) + (test.param.recovery ? "WithRecovery" : "");
}

std::vector<Fault> all_faults() {
  std::vector<Fault> all;
  for (const int ranks : {2, 4}) {
    for (int victim = 0; victim < ranks; ++victim) {
      for (const char* const what : {"kill", "stop", "hang", "throw", "exit"}) {
        all.push_back({what, victim, ranks});
      }
      all.push_back({"kill", victim, ranks, /*recovery=*/true});
    }
  }
  return all;
}

// One of each kind, and rank 0 among them; the others take minutes.
INSTANTIATE_TEST_SUITE_P(Quick, WatchdogFaults,
                         testing::Values(Fault{"kill", 1, 2}, Fault{"stop", 0, 2},
                                         Fault{"hang", 1, 2}, Fault{"throw", 0, 2}),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Full, WatchdogFaults, testing::ValuesIn(all_faults()), name_of);

/// A rank that has fewer batches than the others, or whose exception the program catches.
TEST(WithoutAWatchdog, ARankThatLeavesTheOthersEndsAllAndIsNamed) {
  for (const char* const what : {"unwatched_leave", "unwatched_throw"}) {
    for (const int victim : {0, 1}) {
      const Fault fault{what, victim, 2};
      const Outcome outcome = outcome_of(fault);
      SCOPED_TRACE(outcome.printed);
      EXPECT_EQ(outcome.status, 75);
      ASSERT_GE(outcome.seconds, 0.) << "no rank went wrong";
      EXPECT_LT(outcome.seconds, 15.);
      const std::string end = "the end of this group on rank " + std::to_string(victim);
      EXPECT_THAT(outcome.printed, AllOf(HasSubstr("mezzo: MpiEnvironment ends, but " + end),
                                         HasSubstr("caught: all_reduce(sum) of 64 Float on rank " +
                                                   std::to_string(1 - victim)),
                                         HasSubstr("has a rank fewer batches, or thrown?")));
    }
  }
}

class WatchdogHealthy : public testing::TestWithParam<Fault> {};

TEST_P(WatchdogHealthy, RanksThatAreSlowAreLeftAlone) {
  const Outcome outcome = outcome_of(GetParam());
  EXPECT_EQ(outcome.status, 0) << outcome.printed;
  EXPECT_THAT(outcome.printed, Not(HasSubstr("mezzo:")));
}

// All compute for longer than any timeout; or one does, for which the others wait for longer than
// heartbeat_timeout.
INSTANTIATE_TEST_SUITE_P(Quick, WatchdogHealthy, testing::Values(Fault{"slow", 0, 2}), name_of);
INSTANTIATE_TEST_SUITE_P(Full, WatchdogHealthy,
                         testing::Values(Fault{"none", 0, 4}, Fault{"compute", 0, 2},
                                         Fault{"slow", 3, 4}),
                         name_of);

}  // namespace
}  // namespace watchdog_faults_test
