// A run of two ranks that is killed at random moments and started again, until it is let end: it
// comes to the weights of one that nobody disturbed. MEZZO_MPIRUN and MEZZO_KILLED_PROGRAM are
// commands; MEZZO_KILL_ROUNDS is how often it is killed, 4 times if not given.

#include <mezzo/checkpoint/detail/checkpoint_folder.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../support/scratch.h"
#include "free_port.h"

namespace {

using namespace std::chrono_literals;
using distributed_test::free_port;
using test_support::Scratch;
using Clock = std::chrono::steady_clock;

constexpr int64_t kStepsBetweenFiles = 3;  // killed_program.cpp's
constexpr int kRanks = 2;

/// Kills `victim` so long after it was said for the `number`th time what begins like that.
struct Kill {
  int victim = 0;
  std::string after{};
  int number = 1;
  std::chrono::microseconds delay{};
};

/// A start of the program, to its end.
class Life {
 public:
  Life(const std::string& way, const std::filesystem::path& folder, int64_t steps,
       std::optional<Kill> kill = std::nullopt)
      : kill_(std::move(kill)) {
    const std::string command = "MASTER_PORT=" + std::to_string(free_port()) + " exec " +
                                MEZZO_MPIRUN + ' ' + std::to_string(kRanks) + ' ' +
                                MEZZO_KILLED_PROGRAM + ' ' + way + ' ' + folder.string() + ' ' +
                                std::to_string(steps) + " 2>&1";
    FILE* const pipe = popen(command.c_str(), "r");
    read_from(fileno(pipe));
    const int status = pclose(pipe);
    status_ = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  int status() const { return status_; }
  bool was_killed() const { return was_killed_; }
  const std::string& printed() const { return printed_; }
  const std::map<int, pid_t>& processes() const { return processes_; }

  /// The number behind the last line that begins like that.
  std::optional<int64_t> last(const std::string& begin) const {
    const std::size_t at = ('\n' + printed_).rfind('\n' + begin + ' ');
    if (at == std::string::npos) return std::nullopt;
    return std::atoll(printed_.c_str() + at + begin.size() + 1);
  }
  /// What stands behind `begin`, up to its line's end, in the order of the alphabet.
  std::vector<std::string> all(const std::string& begin) const {
    std::vector<std::string> found;
    for (std::size_t at = printed_.find(begin); at != std::string::npos;
         at = printed_.find(begin, at + 1)) {
      const std::size_t from = at + begin.size();
      found.push_back(printed_.substr(from, printed_.find('\n', from) - from));
    }
    std::sort(found.begin(), found.end());
    return found;
  }

 private:
  void read_from(int file) {
    constexpr auto kNotYet = Clock::time_point::max();
    auto moment = kNotYet;
    std::array<char, 4096> block{};
    while (true) {
      if (Clock::now() >= moment) {
        was_killed_ = ::kill(processes_.at(kill_->victim), SIGKILL) == 0;
        moment = kNotYet;
        kill_.reset();
      }
      pollfd poll_file{file, POLLIN, 0};
      if (poll(&poll_file, 1, moment == kNotYet ? 100 : 0) == 0) continue;
      const ssize_t count = read(file, block.data(), block.size());
      if (count <= 0) return;
      printed_.append(block.data(), static_cast<std::size_t>(count));
      note_processes();
      if (moment == kNotYet && is_due()) moment = Clock::now() + kill_->delay;
    }
  }

  void note_processes() {
    for (int rank = 0; rank < kRanks; ++rank) {
      const std::string begin = "rank " + std::to_string(rank) + " is ";
      const std::size_t at = printed_.find(begin);
      if (at == std::string::npos || printed_.find('\n', at) == std::string::npos) continue;
      processes_[rank] = std::atoi(printed_.c_str() + at + begin.size());
    }
  }

  bool is_due() const {
    return kill_ && processes_.count(kill_->victim) > 0 &&
           static_cast<int>(all(kill_->after).size()) >= kill_->number;
  }

  std::optional<Kill> kill_;
  std::string printed_;
  std::map<int, pid_t> processes_;
  bool was_killed_ = false;
  int status_ = -1;
};

int64_t newest_step(const std::filesystem::path& folder) {
  const auto found = mezzo::detail::checkpoints_in(folder);
  return found.empty() ? 0 : found.front().step;
}

std::size_t temporaries(const std::filesystem::path& folder) {
  const auto names = mezzo::detail::names_in(folder);
  return static_cast<std::size_t>(std::count_if(
      names.begin(), names.end(), [](const std::string& name) { return name.ends_with(".tmp"); }));
}

/// mpirun has ended, and all that it started within a moment.
void expect_no_process_of(const Life& life) {
  for (const auto& [rank, process] : life.processes()) {
    const auto deadline = Clock::now() + 5s;
    while (::kill(process, 0) == 0 && Clock::now() < deadline) std::this_thread::sleep_for(5ms);
    EXPECT_NE(::kill(process, 0), 0) << "rank " << rank << " lives on\n" << life.printed();
  }
}

/// From the program's first line, before the ranks have met, to anywhere in a step or a save.
Kill any_moment(std::mt19937& random) {
  const auto below = [&random](int end) {
    return static_cast<int>(random() % static_cast<unsigned>(end));
  };
  const int victim = below(kRanks);
  if (below(6) == 0) return {victim, "rank ", kRanks, std::chrono::milliseconds(below(700))};
  const auto within = [&below](int end) { return std::chrono::microseconds(below(end)); };
  if (below(2) == 0) return {victim, "did ", 1 + below(7), within(12'000)};
  return {victim, "saving ", 1 + below(2), within(45'000)};  // about as long as it takes
}

class Kills : public testing::TestWithParam<std::string> {};

TEST_P(Kills, AtRandomMomentsCostNothingButTheStepsSinceTheCheckpoint) {
  const char* const wanted = std::getenv("MEZZO_KILL_ROUNDS");
  const int rounds = wanted == nullptr ? 4 : std::atoi(wanted);
  const int64_t steps = 15 * rounds + 10;  // a life comes to fewer than 15
  const Scratch undisturbed_folder, folder;
  const Life undisturbed(GetParam(), undisturbed_folder.path(), steps);
  ASSERT_EQ(undisturbed.status(), 0) << undisturbed.printed();
  ASSERT_EQ(undisturbed.all("end ").size(), 2U) << undisturbed.printed();

  std::mt19937 random(GetParam() == "zero" ? 1 : 2);  // NOLINT: the same each time
  int kills = 0, inside_saves = 0;
  for (int round = 0; round < rounds; ++round) {
    const int64_t before = newest_step(folder.path());
    const Life life(GetParam(), folder.path(), steps, any_moment(random));
    SCOPED_TRACE(life.printed());
    ASSERT_TRUE(life.was_killed());
    ++kills;
    EXPECT_NE(life.status(), 0);
    EXPECT_EQ(life.last("from").value_or(before), before);
    const int64_t after = newest_step(folder.path());
    EXPECT_GE(after, before);
    EXPECT_LE(life.last("did").value_or(0) - after, kStepsBetweenFiles);
    EXPECT_GE(after, life.last("saved").value_or(0)) << "what was said to be saved is there";
    EXPECT_LE(temporaries(folder.path()), 1U);
    inside_saves += static_cast<int>(temporaries(folder.path()));
    expect_no_process_of(life);
  }
  const int64_t before = newest_step(folder.path());
  const Life last(GetParam(), folder.path(), steps);
  SCOPED_TRACE(last.printed());
  EXPECT_EQ(last.status(), 0);
  EXPECT_EQ(last.last("from").value_or(-1), before);
  EXPECT_GT(before, 0) << "no life was long enough to save";
  const std::string weights = undisturbed.all("end ")[0];
  EXPECT_THAT(last.all("end "), testing::ElementsAre(weights, weights));
  EXPECT_EQ(last.all("own "), undisturbed.all("own "));
  EXPECT_EQ(temporaries(folder.path()), 0U);
  EXPECT_EQ(mezzo::detail::checkpoints_in(folder.path()).size(), 2U);
  expect_no_process_of(last);
  std::cout << kills << " kills, " << inside_saves
            << " of them left half a file; the last start of " << steps << " steps went on from "
            << before << '\n';
}

INSTANTIATE_TEST_SUITE_P(Of, Kills, testing::Values("ddp", "zero"),
                         [](const auto& test) { return test.param; });

}  // namespace
