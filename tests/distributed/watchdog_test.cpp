#include <torch/torch.h>
//
#include <mezzo/distributed/watchdog.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../support/error_of.h"

namespace watchdog_test {
namespace {

using namespace std::chrono_literals;
using mezzo::Watchdog;
using mezzo::WatchdogFault;
using mezzo::WatchdogOptions;
using mezzo::detail::Heartbeat;
using mezzo::detail::PeerWatch;
using test_support::error_of;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using State = Heartbeat::State;

// What is made of signs of life, with a clock of the test's.

WatchdogOptions timeouts() {
  return {.interval = 1s, .heartbeat_timeout = 5s, .collective_timeout = 20s};
}

Heartbeat running(int64_t count, int64_t calls, bool waits = false) {
  return {.count = count,
          .activity = {.calls = {calls},
                       .waits = waits,
                       .waited_ms = 1'000'000,
                       .sequence = calls,
                       .collective = "barrier"}};
}

TEST(CollectiveLog, OfARefusedCallLeavesWhatAnotherThreadCalledMeanwhile) {
  mezzo::detail::CollectiveLog log;
  const int64_t one = log.add_group(), other = log.add_group();
  const mezzo::detail::CollectiveCall barrier = c10d::OpType::BARRIER;
  log.called(one, barrier);
  const auto refused = log.called(one, barrier);
  log.called(other, barrier);
  log.refused(refused);
  EXPECT_THAT(log.activity().calls, ElementsAre(1, 1));
  EXPECT_EQ(log.activity().group, other);
  EXPECT_EQ(log.activity().sequence, 1);
}

TEST(PeerWatch, ARankIsSilentWhenItsSignsOfLifeStayTheSameForTooLong) {
  PeerWatch watch(0, 3, timeouts());
  for (int64_t second = 0; second <= 8; ++second) {
    const int64_t last = std::min<int64_t>(second, 3);
    watch.look(1s, {running(second, 4), running(last, 2), running(second, 4)});
    EXPECT_FALSE(watch.judge().has_value()) << second;
  }
  watch.look(1s, {running(9, 4), running(3, 2), running(9, 4)});
  const auto fault = watch.judge();
  ASSERT_TRUE(fault.has_value());
  EXPECT_EQ(fault->kind, WatchdogFault::Kind::unresponsive);
  EXPECT_THAT(fault->ranks, ElementsAre(1));
  EXPECT_EQ(
      fault->what,
      "rank 1 has given no sign of life for 6.0 s (killed, stopped or cut off), when last seen "
      "it had last called barrier (collective 2)");
  EXPECT_THAT(watch.others_to_report(*fault), ElementsAre(2));
}

TEST(PeerWatch, RanksThatWereNotWatchedMeanwhileAreNotSilent) {
  // This rank was itself stopped for an hour, and may not blame others for it.
  PeerWatch watch(0, 2, timeouts());
  watch.look(1s, {running(1, 0), running(1, 0)});
  watch.look(1h, {running(2, 0), running(1, 0)});
  EXPECT_FALSE(watch.judge().has_value());
}

TEST(PeerWatch, RanksThatAreDoneMayBeSilent) {
  PeerWatch watch(0, 3, timeouts());
  Heartbeat done = running(1, 4), failed = running(1, 4);
  done.state = State::finished;
  failed.state = State::failed;
  for (int64_t second = 0; second < 30; ++second) {
    watch.look(1s, {running(second, 4), done, failed});
    EXPECT_FALSE(watch.judge().has_value());
  }
}

TEST(PeerWatch, WhoHasNotCalledWhatThisRankWaitsForIsMissing) {
  PeerWatch watch(2, 4, timeouts());
  const auto look = [&](int64_t second, int64_t called) {
    Heartbeat own = running(second, 7, true);
    own.activity.waited_ms = second * 1000;
    watch.look(1s, {running(second, called), running(second, 7, true), own, std::nullopt});
  };
  for (int64_t second = 0; second <= 20; ++second) {
    look(second, 6);
    EXPECT_FALSE(watch.judge().has_value()) << second;
  }
  look(21, 6);
  const auto fault = watch.judge();
  ASSERT_TRUE(fault.has_value());
  EXPECT_EQ(fault->kind, WatchdogFault::Kind::missing);
  EXPECT_THAT(fault->ranks, ElementsAre(0, 3));
  EXPECT_EQ(
      fault->what,
      "ranks 0 and 3 have not called barrier (collective 7), for which rank 2 has been waiting "
      "for 21.0 s; rank 0 is alive, and last called barrier (collective 6); rank 3 has never "
      "given a sign of life");
}

TEST(PeerWatch, WaitingForOneCollectiveAfterAnotherIsNoFault) {
  PeerWatch watch(0, 2, timeouts());
  for (int64_t second = 0; second < 100; ++second) {
    Heartbeat own = running(second, second / 15, true);
    watch.look(1s, {own, running(second, second / 15 - 1)});
    EXPECT_FALSE(watch.judge().has_value()) << second;
  }
}

TEST(PeerWatch, ACollectiveThatAllHaveCalledAndThatDoesNotEndIsStuck) {
  PeerWatch watch(0, 2, timeouts());
  for (int64_t second = 0; second <= 22; ++second) {
    watch.look(1s, {running(second, 7, true), running(second, 8)});
  }
  const auto fault = watch.judge();
  ASSERT_TRUE(fault.has_value());
  EXPECT_EQ(fault->kind, WatchdogFault::Kind::stuck);
  EXPECT_TRUE(fault->ranks.empty());
  EXPECT_THAT(fault->what, HasSubstr("all ranks have called barrier (collective 7)"));
}

TEST(PeerWatch, WhoIsDoneWillNotComeAndIsNotWaitedForSoLong) {
  PeerWatch watch(0, 2, timeouts());
  Heartbeat done = running(1, 6);
  done.state = State::finished;
  for (int64_t second = 0; second <= 5; ++second) {
    watch.look(1s, {running(second, 7, true), done});
    EXPECT_FALSE(watch.judge().has_value()) << second;
  }
  watch.look(1s, {running(6, 7, true), done});
  ASSERT_TRUE(watch.judge().has_value());
  EXPECT_THAT(watch.judge()->what, HasSubstr("rank 1 is done, and last called barrier"));
}

TEST(PeerWatch, WhoeverIsToldToEndSaysWhoIsNotThereAnyMore) {
  PeerWatch watch(0, 4, timeouts());
  Heartbeat done = running(1, 4);
  done.state = State::finished;
  watch.look(1s, {running(1, 4), running(1, 4), running(1, 3), done});
  watch.look(100ms, {running(2, 4), running(2, 4), running(1, 3), done});
  EXPECT_THAT(watch.explain_end(50ms).what, HasSubstr("all other ranks are alive"));
  watch.look(200ms, {running(3, 4), running(3, 4), running(1, 3), done});
  const WatchdogFault fault = watch.explain_end(50ms);
  EXPECT_THAT(fault.ranks, ElementsAre(2));
  EXPECT_EQ(fault.what,
            "a signal (SIGTERM) told it to; rank 2 has not been heard of for 0.3 s, when last seen "
            "it had last called barrier (collective 3)");
  EXPECT_THAT(watch.explain_end(3s).what,
              HasSubstr("rank 0, which hosts the store, has not answered for 3.0 s"));
}

TEST(PeerWatch, OfAStoreThatTorchrunsAgentServesNoRankIsBlamed) {
  PeerWatch watch(1, 2, timeouts(), /*agent_serves=*/true);
  watch.look(1s, {running(1, 4), running(1, 4)});
  for (int look = 0; look < 2; ++look) EXPECT_FALSE(watch.look_without_answer(2s));
  const WatchdogFault silent = watch.look_without_answer(2s).value(),
                      broke = watch.connection_broke("reset by peer"),
                      ended = watch.explain_end(3s);
  EXPECT_EQ(silent.what,
            "torchrun's agent, which hosts the store, has not answered for 6.0 s (stopped or cut "
            "off)");
  EXPECT_THAT(broke.what, HasSubstr("the connection to torchrun's agent, which hosts the store"));
  EXPECT_THAT(ended.what, HasSubstr("torchrun's agent, which hosts the store, has not answered"));
  for (const WatchdogFault& fault : {silent, broke, ended}) EXPECT_TRUE(fault.ranks.empty());
}

TEST(Heartbeat, ReadsWhatItWroteAndRefusesWhatItDidNot) {
  Heartbeat beat{.count = 1LL << 40,
                 .state = State::terminated,
                 .activity = {.calls = {3, 0, 9},
                              .waits = true,
                              .waited_ms = 1234,
                              .group = 2,
                              .sequence = 9,
                              .collective = "all_gather\nof 3 Float"}};
  const Heartbeat read = mezzo::detail::decode_heartbeat(mezzo::detail::encode(beat));
  EXPECT_EQ(read.count, beat.count);
  EXPECT_EQ(read.state, beat.state);
  EXPECT_EQ(read.activity.calls, beat.activity.calls);
  EXPECT_EQ(read.activity.doing(),
            "is waiting for all_gather of 3 Float (collective 9 of group 2) since 1.2 s");
  EXPECT_TRUE(read.activity.has_called(2, 9));
  EXPECT_FALSE(read.activity.has_called(2, 10));
  EXPECT_FALSE(read.activity.has_called(3, 1));
  for (const char* const other : {"", "12", "x\n", "1\n2\n"}) {
    EXPECT_THAT(error_of([&] { mezzo::detail::decode_heartbeat(other); }),
                HasSubstr("the store holds something else"));
  }
}

// The threads, with ranks that share a store in one process.

/// A group whose collectives never end, until they are told to.
class Held : public c10d::Backend {
 public:
  struct Gate {
    std::mutex mutex;
    std::condition_variable opened;
    bool open = false;
  };
  explicit Held(std::shared_ptr<Gate> gate) : Backend(0, 2), gate_(std::move(gate)) {}
  const std::string getBackendName() const override { return "held"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& /*options*/) override {
    TORCH_CHECK(tensors[0].numel() > 0, "empty");
    return held();
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& /*output*/, at::Tensor& /*input*/,
      const c10d::AllgatherOptions& /*options*/) override {
    return held();
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& /*options*/) override {
    return held();
  }

 private:
  struct HeldWork : c10d::Work {
    explicit HeldWork(std::shared_ptr<Gate> of) : gate(std::move(of)) {}
    bool isCompleted() override {
      const std::lock_guard lock(gate->mutex);
      return gate->open;
    }
    bool wait(std::chrono::milliseconds /*timeout*/) override {
      std::unique_lock lock(gate->mutex);
      gate->opened.wait(lock, [&] { return gate->open; });
      return true;
    }
    std::shared_ptr<Gate> gate;
  };
  c10::intrusive_ptr<c10d::Work> held() { return c10::make_intrusive<HeldWork>(gate_); }
  std::shared_ptr<Gate> gate_;
};

/// What a rank's watchdog has said.
struct Said {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::string> lines;
  std::vector<WatchdogFault::Kind> kinds;
  int ends = 0;

  std::string wait_for_end() {
    std::unique_lock lock(mutex);
    if (!changed.wait_for(lock, 30s, [&] { return ends > 0; })) return "nothing";
    return lines.empty() ? "no line" : lines.front();
  }
};

WatchdogOptions saying(Said& said) {
  WatchdogOptions options{.interval = 20ms, .heartbeat_timeout = 2s, .collective_timeout = 300ms};
  options.report = [&said](const WatchdogFault& fault, const std::string& line) {
    const std::lock_guard lock(said.mutex);
    said.lines.push_back(line);
    said.kinds.push_back(fault.kind);
  };
  options.end = [&said](const WatchdogFault& /*fault*/) {
    const std::lock_guard lock(said.mutex);
    ++said.ends;
    said.changed.notify_all();
  };
  return options;
}

struct TwoRanks {
  c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  Said said[2];
  std::shared_ptr<Held::Gate> gate = std::make_shared<Held::Gate>();

  std::unique_ptr<Watchdog> watchdog(int rank) {
    return std::make_unique<Watchdog>(store, rank, 2, saying(said[rank]));
  }
  c10::intrusive_ptr<c10d::Backend> world(Watchdog& of) {
    return of.watch(c10::make_intrusive<Held>(gate));
  }
  void open() {
    const std::lock_guard lock(gate->mutex);
    gate->open = true;
    gate->opened.notify_all();
  }
};

TEST(Watchdog, WordsOfAnExceptionReachTheOtherRanksWithTheCollectiveTheyWaitFor) {
  TwoRanks ranks;
  auto first = ranks.watchdog(0), second = ranks.watchdog(1);
  auto world = ranks.world(*first);
  std::thread waiting([&] { world->barrier()->wait(); });
  while (ranks.store->get_to_str("mezzo/watchdog/1/0").find("barrier") == std::string::npos) {
    std::this_thread::sleep_for(1ms);
  }
  EXPECT_THROW(second->run([]() -> int { throw std::runtime_error("the disk\nis full"); }),
               std::runtime_error);
  EXPECT_THAT(ranks.said[0].wait_for_end(),
              AllOf(HasSubstr("mezzo: rank 0 of 2 ends: rank 1 failed: the disk is full; it has "
                              "called no collective. This rank is waiting for barrier (collective "
                              "1)")));
  EXPECT_TRUE(ranks.said[1].lines.empty()) << "it speaks for itself";
  ranks.open();
  waiting.join();
}

TEST(Watchdog, ARankThatNeverCallsTheCollectiveIsNamedOnAllRanks) {
  TwoRanks ranks;
  auto first = ranks.watchdog(0), second = ranks.watchdog(1);
  auto world = ranks.world(*first);
  auto unused = ranks.world(*second);
  std::thread waiting([&] {
    std::vector<at::Tensor> tensors = {at::ones({8})};
    world->allreduce(tensors)->wait();
  });
  for (Said& said : ranks.said) {
    EXPECT_THAT(said.wait_for_end(),
                AllOf(HasSubstr("rank 1 has not called all_reduce(sum) of 8 Float (collective 1), "
                                "for which rank 0 has been waiting for 0."),
                      HasSubstr("rank 1 is alive, and has called no collective")));
    EXPECT_EQ(said.ends, 1);
    EXPECT_THAT(said.kinds, ElementsAre(WatchdogFault::Kind::missing));
  }
  ranks.open();
  waiting.join();
}

TEST(Watchdog, RanksThatAreDoneOneAfterAnotherSayNothing) {
  TwoRanks ranks;
  auto first = ranks.watchdog(0), second = ranks.watchdog(1);
  EXPECT_EQ(first->run([] { return 3; }), 3);
  bool gone = false;
  std::mutex mutex;
  std::thread host([&] {
    first.reset();
    const std::lock_guard lock(mutex);
    gone = true;
  });
  std::this_thread::sleep_for(150ms);
  {
    const std::lock_guard lock(mutex);
    EXPECT_FALSE(gone) << "rank 0 hosts what rank 1 still needs";
  }
  second.reset();
  host.join();
  for (const Said& said : ranks.said) EXPECT_TRUE(said.lines.empty());
}

TEST(Watchdog, OneLeftByAnExceptionSaysSoToTheOthers) {
  TwoRanks ranks;
  auto first = ranks.watchdog(0);
  try {
    const auto second = ranks.watchdog(1);
    throw std::runtime_error("outside of run");
  } catch (const std::runtime_error&) {
  }
  EXPECT_THAT(ranks.said[0].wait_for_end(), HasSubstr("an exception left the scope"));
}

TEST(Watchdog, SeveralInARowUseOneStore) {
  TwoRanks ranks;
  for (int round = 0; round < 2; ++round) {
    Said said[2];
    auto first = std::make_unique<Watchdog>(ranks.store, 0, 2, saying(said[0]));
    auto second = std::make_unique<Watchdog>(ranks.store, 1, 2, saying(said[1]));
    std::this_thread::sleep_for(100ms);
    EXPECT_TRUE(said[0].lines.empty()) << "of the round before: " << said[0].lines.front();
    second->fail("round " + std::to_string(round));
    EXPECT_THAT(said[0].wait_for_end(), HasSubstr("failed: round " + std::to_string(round)));
  }
}

TEST(Watchdog, CollectivesPassThroughAndRefusedOnesDoNotCount) {
  TwoRanks ranks;
  auto watchdog = std::make_unique<Watchdog>(ranks.store, 0, 1, saying(ranks.said[0]));
  auto world = ranks.world(*watchdog);
  EXPECT_EQ(world->getSize(), 2);
  EXPECT_EQ(world->getBackendName(), "held");
  std::vector<at::Tensor> empty = {at::zeros({0})};
  EXPECT_THAT(error_of([&] { world->allreduce(empty)->wait(); }), HasSubstr("empty"));
  at::Tensor output = at::ones({4}), input = at::ones({2});
  const auto work = world->_allgather_base(output, input);
  EXPECT_FALSE(work->isCompleted());
  ranks.open();
  EXPECT_TRUE(work->isCompleted());
  work->wait();
  watchdog->fail("to see what it says");
  const std::string fault = ranks.store->get_to_str("mezzo/watchdog/1/fault");
  EXPECT_THAT(fault, HasSubstr("it last called all_gather of 2 Float (collective 1)"));
}

TEST(Watchdog, WrongArgumentsAreNamed) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  const auto error = [&](int rank, const WatchdogOptions& options) {
    return error_of([&] { Watchdog(store, rank, 2, options); });
  };
  EXPECT_THAT(error(2, {}), HasSubstr("`rank` must be 0 to size - 1, but is 2 of 2"));
  EXPECT_THAT(error(0, {.interval = 0ms}), HasSubstr("`interval` must be 4 ms or more"));
  EXPECT_THAT(error(0, {.interval = 1s, .heartbeat_timeout = 2s}),
              HasSubstr("`heartbeat_timeout` must be three intervals or more"));
  EXPECT_THAT(error(0, {.collective_timeout = 0ms}),
              HasSubstr("`collective_timeout` must be positive"));
  EXPECT_THAT(error_of([] { Watchdog(c10::intrusive_ptr<c10d::Store>(), 0, 1); }),
              HasSubstr("`store` is null"));
}

void own_handler(int /*signal*/) {}

TEST(Watchdog, LeavesAHandlerOfTheProgramsForSigtermAlone) {
  const auto handler = [] {
    struct sigaction present {};
    sigaction(SIGTERM, nullptr, &present);
    return present.sa_handler;
  };
  ASSERT_EQ(handler(), SIG_DFL);
  Said said;
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  {
    const Watchdog watchdog(store, 0, 1, saying(said));
    EXPECT_NE(handler(), SIG_DFL);
  }
  EXPECT_EQ(handler(), SIG_DFL);
  signal(SIGTERM, own_handler);
  {
    const Watchdog watchdog(store, 0, 1, saying(said));
    EXPECT_EQ(handler(), own_handler);
  }
  EXPECT_EQ(handler(), own_handler);
  signal(SIGTERM, SIG_DFL);
}

}  // namespace
}  // namespace watchdog_test
