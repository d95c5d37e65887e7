#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collective_log.h>
#include <mezzo/distributed/detail/peer_watch.h>
#include <mezzo/distributed/detail/watchdog_end.h>
#include <mezzo/distributed/detail/watchdog_store.h>
#include <mezzo/distributed/watchdog_options.h>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The threads of a watchdog, and what they share.
///
/// One exchanges signs of life, and may be stuck in the store for as long as rank 0 is stopped. The
/// other never touches the store: it watches the first, and SIGTERM. Whoever is first to know of a
/// fault reports it and ends the process.
class WatchdogThreads : public std::enable_shared_from_this<WatchdogThreads> {
 public:
  using Clock = std::chrono::steady_clock;

  WatchdogThreads(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                  const WatchdogOptions& options, std::shared_ptr<CollectiveLog> log)
      : rank_(rank),
        size_(size),
        options_(options),
        log_(std::move(log)),
        termination_(options.explain_sigterm),
        store_(std::move(store), rank, size),
        peers_(rank, size, options, store_.agent_serves()) {
    store_.put(sign_of_life());
  }

  void start() {
    exchanging_ = std::thread([self = shared_from_this()] {
      self->exchange_until_over();
      const std::lock_guard lock(self->mutex_);
      self->has_stopped_exchanging_ = true;
      self->changed_.notify_all();
    });
    looking_ = std::thread([self = shared_from_this()] { self->look_until_over(); });
  }

  /// Of this rank: it is done. Returns when the others know, and on rank 0 when they are done too.
  void finish() {
    std::unique_lock lock(mutex_);
    if (!is_settled_) state_ = Heartbeat::State::finished;
    wait_for_end(lock);
  }

  /// Returns when the others have read it, or after four intervals; where there is another fault it
  /// may end the process.
  void fail(const std::string& what) {
    std::unique_lock lock(mutex_);
    if (!is_settled_) failure_ = what;
    wait_for_end(lock);
  }

  /// After one of them. A thread that never comes back from the store keeps what it needs.
  void join() {
    looking_.join();
    std::unique_lock lock(mutex_);
    const bool stopped =
        changed_.wait_for(lock, 2 * options_.interval, [&] { return has_stopped_exchanging_; });
    lock.unlock();
    if (stopped) {
      exchanging_.join();
    } else {
      exchanging_.detach();
    }
  }

 private:
  void wake() {
    is_woken_ = true;
    changed_.notify_all();
  }

  void wait_for_end(std::unique_lock<std::mutex>& lock) {
    wake();
    changed_.wait(lock, [&] { return is_over_; });
  }

  void over() {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
    changed_.notify_all();
  }

  static std::chrono::milliseconds since(Clock::time_point then) {
    return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - then);
  }

  Heartbeat sign_of_life() {
    RankActivity activity = log_->activity();
    const std::lock_guard lock(mutex_);
    return {.count = ++count_, .state = state_, .activity = std::move(activity)};
  }

  void exchange_until_over() {
    try {
      exchange_until_done();
    } catch (const std::exception& error) {
      std::unique_lock lock(mutex_);
      const WatchdogFault fault = peers_.connection_broke(one_line(error.what()));
      // Rank 0 goes when all are done.
      const bool expected = state_ == Heartbeat::State::finished || failure_;
      lock.unlock();
      expected ? over() : settle(fault, false);
    }
  }

  void exchange_until_done() {
    for (;;) {
      const std::optional<WatchdogFault> fault = exchange();
      std::unique_lock lock(mutex_);
      if (is_over_) return;
      // This rank has said so, and on rank 0 all others have too.
      const bool is_done = state_ == Heartbeat::State::finished && !is_woken_ &&
                           (rank_ != 0 || peers_.all_others_finished());
      if (failure_ || fault || is_done) {
        const std::optional<std::string> failure = failure_;
        lock.unlock();
        if (failure) return publish_failure(*failure);
        return fault ? settle(*fault, true) : over();
      }
      const bool terminated = state_ == Heartbeat::State::terminated;
      changed_.wait_for(lock, terminated ? kIntervalWhenTerminated : options_.interval,
                        [&] { return is_woken_; });
      is_woken_ = false;
    }
  }

  /// Gives a sign of life, and reads those of the others.
  /// \returns the fault, the same on all ranks, where this rank or another has found one
  std::optional<WatchdogFault> exchange() {
    const Heartbeat own = sign_of_life();
    store_.put(own);
    // Rank 0 may take this for the last rank's end, and its store with it.
    if (own.state == Heartbeat::State::finished && rank_ != 0) return std::nullopt;
    const WatchdogStore::News news = store_.read(own);
    std::unique_lock lock(mutex_);
    const auto passed = since(last_answer_);
    last_answer_ += passed;
    peers_.look(passed, news.heartbeats);
    if (is_settled_ || failure_) return std::nullopt;
    if (news.fault) return news.fault;
    const std::optional<WatchdogFault> found = peers_.judge();
    lock.unlock();
    return found ? std::optional(store_.publish(*found)) : std::nullopt;
  }

  void publish_failure(const std::string& words) {
    const WatchdogFault fault = store_.publish({WatchdogFault::Kind::failed,
                                                {rank_},
                                                names_of({rank_}) + " failed: " + one_line(words) +
                                                    "; it " + sign_of_life().activity.doing()});
    if (!claim(Heartbeat::State::failed, std::nullopt)) return;
    linger(fault, true);
    over();
  }

  /// Only one thread deals with the end, and once. `to_end`: for which the process is to be ended.
  bool claim(Heartbeat::State state, const std::optional<WatchdogFault>& to_end) {
    const std::lock_guard lock(mutex_);
    if (is_settled_) return false;
    is_settled_ = true;
    settled_at_ = Clock::now();
    state_ = state;
    to_end_ = to_end;
    return true;
  }

  void look_until_over() {
    const auto tick = std::min(options_.interval / 4, std::chrono::milliseconds(50));
    auto last = Clock::now();
    for (;;) {
      std::unique_lock lock(mutex_);
      if (changed_.wait_for(lock, tick, [&] { return is_over_; })) return;
      const auto passed = since(last);
      last += passed;
      if (look(passed, lock)) return;
    }
  }

  /// \returns whether there is nothing more to be seen.
  bool look(std::chrono::milliseconds passed, std::unique_lock<std::mutex>& lock) {
    if (termination_.received() && state_ == Heartbeat::State::running) {
      state_ = Heartbeat::State::terminated;
      wake();
      explain_termination(lock);
      return true;
    }
    if (is_settled_) {
      // The thread that settles it may be stuck in a store that has stopped since.
      if (Clock::now() < settled_at_ + 6 * options_.interval) return false;
      lock.unlock();
      conclude();
      return true;
    }
    const auto fault = peers_.look_without_answer(passed);
    if (!fault) return false;
    lock.unlock();
    settle(*fault, false);
    return true;
  }

  void explain_termination(std::unique_lock<std::mutex>& lock) {
    changed_.wait_for(lock, kExplainAfter, [&] { return is_over_; });
    const bool mine = !std::exchange(is_settled_, true);
    settled_at_ = Clock::now();
    const WatchdogFault fault = peers_.explain_end(since(last_answer_));
    lock.unlock();
    if (mine) report(fault);
    TerminationSignal::obey();
  }

  void settle(const WatchdogFault& fault, bool store_answers) {
    if (!claim(Heartbeat::State::ended, fault)) return;
    report(fault);
    linger(fault, store_answers);
    conclude();
  }

  void conclude() {
    std::unique_lock lock(mutex_);
    const std::optional<WatchdogFault> fault = std::exchange(to_end_, std::nullopt);
    lock.unlock();
    if (fault) end_process(options_, *fault);
    over();
  }

  /// A launcher ends the ranks that are left when the first one goes: all have spoken before that.
  void linger(const WatchdogFault& fault, bool store_answers) {
    const auto until = Clock::now() + 3 * options_.interval;
    const auto pause = std::clamp(options_.interval / 4, std::chrono::milliseconds(5),
                                  std::chrono::milliseconds(250));
    try {
      while (store_answers && Clock::now() < until) {
        exchange();
        {
          const std::lock_guard lock(mutex_);
          if (peers_.others_to_report(fault).empty()) return;
        }
        std::this_thread::sleep_for(pause);
      }
      if (store_answers) return;
    } catch (const std::exception&) {  // rank 0 has gone: so has the store, and with it all news
    }
    // Each rank sees for itself that the store is gone, within an interval.
    std::this_thread::sleep_for(options_.interval * 3 / 2);
  }

  void report(const WatchdogFault& fault) {
    report_end(options_, fault, rank_, size_, sign_of_life().activity.doing());
  }

  const int rank_;
  const int size_;
  const WatchdogOptions options_;
  const std::shared_ptr<CollectiveLog> log_;
  TerminationSignal termination_;

  WatchdogStore store_;  // of the thread that exchanges

  std::mutex mutex_;   // what follows
  int64_t count_ = 0;  ///< signs of life
  std::condition_variable changed_;
  PeerWatch peers_;
  Clock::time_point last_answer_ = Clock::now();  ///< of the store
  Heartbeat::State state_ = Heartbeat::State::running;
  std::optional<std::string> failure_;  ///< what `fail` was told
  bool is_woken_ = false;               ///< the thread that exchanges is to do so at once
  bool is_settled_ = false;             ///< one of the threads reports, or has
  Clock::time_point settled_at_;
  std::optional<WatchdogFault> to_end_;  ///< for which the process is still to be ended
  bool is_over_ = false;                 ///< nothing is watched any more
  bool has_stopped_exchanging_ = false;

  std::thread exchanging_;
  std::thread looking_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
