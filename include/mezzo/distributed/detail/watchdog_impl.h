#pragma once

#include <c10/util/Exception.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collective_log.h>
#include <mezzo/distributed/detail/watchdog_threads.h>
#include <mezzo/distributed/detail/watched_communicator.h>
#include <mezzo/distributed/watchdog.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <future>
#include <iostream>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline constexpr const char* kNoFault = "none";

inline std::string encode(const WatchdogFault& fault) {
  FieldWriter to;
  to.number(static_cast<int64_t>(fault.kind));
  to.number(static_cast<int64_t>(fault.ranks.size()));
  for (const int rank : fault.ranks) to.number(rank);
  to.text(fault.what);
  return to.all();
}

inline WatchdogFault decode_fault(const std::string& text) {
  FieldReader from(text);
  WatchdogFault fault;
  fault.kind = static_cast<WatchdogFault::Kind>(from.number());
  for (int64_t left = from.number(); left > 0; --left) {
    fault.ranks.push_back(static_cast<int>(from.number()));
  }
  fault.what = from.text();
  return fault;
}

/// What a program has printed so far, unless a thread that is stuck holds stdio.
inline void try_to_flush() {
  const auto flushed = std::make_shared<std::promise<void>>();
  std::thread([flushed] {
    std::fflush(nullptr);
    flushed->set_value();
  }).detach();
  flushed->get_future().wait_for(std::chrono::milliseconds(200));
}

inline WatchdogThreads::WatchdogThreads(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                        const WatchdogOptions& options,
                                        std::shared_ptr<CollectiveLog> log)
    : store_(std::move(store)),
      rank_(rank),
      size_(size),
      options_(options),
      log_(std::move(log)),
      termination_(options.explain_sigterm),
      has_come_(static_cast<std::size_t>(size), false),
      last_look_(Clock::now()),
      peers_(rank, size, options) {
  // Several in a row may use one store: each has keys of its own.
  const std::string all = "mezzo/watchdog/";
  const int64_t number = store_->add(all + "starts/" + std::to_string(rank_), 1);
  prefix_ = all + std::to_string(number) + '/';
  store_->compareSet(fault_key(), "", kNoFault);
  store_->set(key_of(rank_), sign_of_life().encode());
}

inline void WatchdogThreads::start() {
  exchanging_ = std::thread([self = shared_from_this()] {
    self->exchange_until_over();
    const std::lock_guard lock(self->mutex_);
    self->has_stopped_exchanging_ = true;
    self->changed_.notify_all();
  });
  looking_ = std::thread([self = shared_from_this()] { self->look_until_over(); });
}

/// One that never comes back from the store keeps what it needs.
inline void WatchdogThreads::join() {
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

inline void WatchdogThreads::wake() {
  is_woken_ = true;
  changed_.notify_all();
}

inline void WatchdogThreads::over() {
  const std::lock_guard lock(mutex_);
  is_over_ = true;
  changed_.notify_all();
}

inline void WatchdogThreads::finish() {
  std::unique_lock lock(mutex_);
  if (!is_settled_) state_ = Heartbeat::State::finished;
  wake();
  changed_.wait(lock, [&] { return is_over_; });
}

inline void WatchdogThreads::fail(const std::string& what) {
  std::unique_lock lock(mutex_);
  if (!is_settled_) failure_ = what;
  wake();
  // It ends with the others' having read it, or with the process where there is another fault.
  changed_.wait(lock, [&] { return is_over_; });
}

inline Heartbeat WatchdogThreads::sign_of_life() {
  Heartbeat heartbeat;
  log_->describe(heartbeat);
  const std::lock_guard lock(mutex_);
  heartbeat.count = ++count_;
  heartbeat.state = state_;
  return heartbeat;
}

inline void WatchdogThreads::exchange_until_over() {
  try {
    exchange_until_done();
  } catch (const std::exception& error) {
    std::unique_lock lock(mutex_);
    const std::string last = peers_.last_seen(0);
    // Rank 0 goes when all are done.
    const bool expected = state_ == Heartbeat::State::finished || failure_;
    lock.unlock();
    if (expected) return over();
    settle({WatchdogFault::Kind::silent,
            {0},
            "the connection to rank 0, which hosts the store, broke (killed, or ended without a "
            "word): " +
                one_line(error.what()) + last},
           false);
  }
}

inline void WatchdogThreads::exchange_until_done() {
  for (;;) {
    exchange();
    std::unique_lock lock(mutex_);
    if (is_over_) return;
    if (failure_) {
      const std::string words = *failure_;
      lock.unlock();
      return publish_failure(words);
    }
    if (fault_) {
      const WatchdogFault fault = *fault_;
      lock.unlock();
      return settle(fault, true);
    }
    if (is_done(lock)) return;
    const bool told = state_ == Heartbeat::State::told;
    changed_.wait_for(lock, told ? kIntervalWhenTold : options_.interval,
                      [&] { return is_woken_; });
    is_woken_ = false;
  }
}

/// This rank has said so, and on rank 0 all others have too.
inline bool WatchdogThreads::is_done(std::unique_lock<std::mutex>& lock) {
  if (state_ != Heartbeat::State::finished || is_woken_) return false;
  if (rank_ == 0 && !peers_.all_others_finished()) return false;
  lock.unlock();
  over();
  return true;
}

/// Gives a sign of life, and reads those of the others and whether one of them has found a fault.
inline void WatchdogThreads::exchange() {
  const Heartbeat own = sign_of_life();
  store_->set(key_of(rank_), own.encode());
  // Rank 0 may take this for the last rank's end, and its store with it.
  if (own.state == Heartbeat::State::finished && rank_ != 0) return;
  find_who_has_come();
  std::vector<std::string> keys = {fault_key()};
  for (int rank = 0; rank < size_; ++rank) {
    if (has_come_[static_cast<std::size_t>(rank)]) keys.push_back(key_of(rank));
  }
  const std::vector<std::vector<uint8_t>> values = store_->multiGet(keys);
  const auto text = [&](std::size_t i) { return std::string(values[i].begin(), values[i].end()); };
  std::vector<std::optional<Heartbeat>> heartbeats(static_cast<std::size_t>(size_));
  for (std::size_t rank = 0, i = 1; rank < heartbeats.size(); ++rank) {
    if (has_come_[rank]) heartbeats[rank] = Heartbeat::decode(text(i++));
  }
  heartbeats[static_cast<std::size_t>(rank_)] = own;
  take_note(std::move(heartbeats), text(0));
}

inline void WatchdogThreads::find_who_has_come() {
  for (int rank = 0; rank < size_; ++rank) {
    const auto number = static_cast<std::size_t>(rank);
    if (rank != rank_ && !has_come_[number]) has_come_[number] = store_->check({key_of(rank)});
  }
}

inline void WatchdogThreads::take_note(std::vector<std::optional<Heartbeat>> heartbeats,
                                       const std::string& published) {
  const auto now = Clock::now();
  const auto passed =
      std::chrono::duration_cast<std::chrono::milliseconds>(now - std::exchange(last_look_, now));
  std::unique_lock lock(mutex_);
  last_answer_ = now;
  store_silence_ = std::chrono::milliseconds(0);
  peers_.look(passed, heartbeats);
  if (is_settled_ || fault_ || failure_) return;
  if (published != kNoFault) {
    fault_ = decode_fault(published);
    return;
  }
  const std::optional<WatchdogFault> found = peers_.judge();
  if (!found) return;
  lock.unlock();
  const WatchdogFault agreed = publish(*found);
  lock.lock();
  fault_ = agreed;
}

/// \returns the fault that was published first, by whichever rank.
inline WatchdogFault WatchdogThreads::publish(const WatchdogFault& fault) {
  return decode_fault(store_->compareSet(fault_key(), kNoFault, encode(fault)));
}

inline void WatchdogThreads::publish_failure(const std::string& words) {
  const WatchdogFault fault = publish(
      {WatchdogFault::Kind::failed,
       {rank_},
       names_of({rank_}) + " failed: " + one_line(words) + "; it " + sign_of_life().doing()});
  if (!claim(Heartbeat::State::failed)) return;
  linger(fault, true);
  over();
}

/// Only one thread deals with the end, and once.
inline bool WatchdogThreads::claim(Heartbeat::State state) {
  const std::lock_guard lock(mutex_);
  if (is_settled_) return false;
  is_settled_ = true;
  settled_at_ = Clock::now();
  state_ = state;
  return true;
}

inline void WatchdogThreads::look_until_over() {
  const auto tick = std::min(options_.interval / 4, std::chrono::milliseconds(50));
  auto last = Clock::now();
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      if (changed_.wait_for(lock, tick, [&] { return is_over_; })) return;
    }
    const auto now = Clock::now();
    const auto passed =
        std::chrono::duration_cast<std::chrono::milliseconds>(now - std::exchange(last, now));
    if (look(passed)) return;
  }
}

/// \returns whether there is nothing more to be seen.
inline bool WatchdogThreads::look(std::chrono::milliseconds passed) {
  std::unique_lock lock(mutex_);
  if (termination_.received() && state_ == Heartbeat::State::running) {
    state_ = Heartbeat::State::told;
    wake();
    lock.unlock();
    explain_termination();
    return true;
  }
  if (is_settled_) {
    // The thread that settles it may be stuck in a store that has stopped since.
    if (Clock::now() < settled_at_ + 6 * options_.interval) return false;
    lock.unlock();
    conclude();
    return true;
  }
  store_silence_ += std::min(passed, 2 * options_.interval);
  if (store_silence_ <= options_.heartbeat_timeout) return false;
  const WatchdogFault fault{WatchdogFault::Kind::silent,
                            {0},
                            "rank 0, which hosts the store, has not answered for " +
                                in_seconds(store_silence_) + " (stopped or cut off)" +
                                peers_.last_seen(0)};
  lock.unlock();
  settle(fault, false);
  return true;
}

inline void WatchdogThreads::explain_termination() {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kExplainAfter, [&] { return is_over_; });
  const bool mine = !std::exchange(is_settled_, true);
  settled_at_ = Clock::now();
  const WatchdogFault fault = peers_.explain_end(
      std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - last_answer_));
  lock.unlock();
  if (mine) report(fault);
  TerminationSignal::obey();
}

inline void WatchdogThreads::settle(const WatchdogFault& fault, bool store_answers) {
  if (!claim(Heartbeat::State::ended)) return;
  {
    const std::lock_guard lock(mutex_);
    to_end_ = fault;
  }
  report(fault);
  linger(fault, store_answers);
  conclude();
}

inline void WatchdogThreads::conclude() {
  std::optional<WatchdogFault> fault;
  {
    const std::lock_guard lock(mutex_);
    fault = std::exchange(to_end_, std::nullopt);
  }
  if (fault) end(*fault);
  over();
}

/// A launcher ends the ranks that are left when the first one goes: all have spoken before that.
inline void WatchdogThreads::linger(const WatchdogFault& fault, bool store_answers) {
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
  } catch (const std::exception&) {  // rank 0 has gone: so has the store, and with it all news
    store_answers = false;
  }
  // Each rank sees for itself that the store is gone, within an interval.
  if (!store_answers) std::this_thread::sleep_for(options_.interval * 3 / 2);
}

inline void WatchdogThreads::report(const WatchdogFault& fault) {
  const std::string line = "mezzo: rank " + std::to_string(rank_) + " of " + std::to_string(size_) +
                           " ends: " + fault.what + ". This rank " + sign_of_life().doing() + '\n';
  if (options_.report) {
    options_.report(fault, line);
  } else {
    std::cerr << line << std::flush;
  }
}

inline void WatchdogThreads::end(const WatchdogFault& fault) {
  if (options_.end) return options_.end(fault);
  try_to_flush();
  std::_Exit(kWatchdogExitStatus);
}

inline void check_watchdog_arguments(int rank, int size, const WatchdogOptions& options) {
  using std::chrono::milliseconds;
  TORCH_CHECK(size >= 1 && rank >= 0 && rank < size, "Watchdog: `rank` must be 0 to size - 1, but ",
              "is ", rank, " of ", size);
  TORCH_CHECK(options.interval >= milliseconds(4),
              "Watchdog: `interval` must be 4 ms or more, but ", "is ", options.interval.count(),
              " ms");
  TORCH_CHECK(options.heartbeat_timeout >= 3 * options.interval,
              "Watchdog: `heartbeat_timeout` must be three intervals or more, so that one sign of "
              "life may be late, but is ",
              options.heartbeat_timeout.count(), " ms where `interval` is ",
              options.interval.count(), " ms");
  TORCH_CHECK(options.collective_timeout > milliseconds(0),
              "Watchdog: `collective_timeout` must be positive, but is ",
              options.collective_timeout.count(), " ms");
}

}  // namespace detail

inline Watchdog::Watchdog(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                          const WatchdogOptions& options)
    : store_(store),
      log_(std::make_shared<detail::CollectiveLog>()),
      exceptions_(std::uncaught_exceptions()) {
  TORCH_CHECK(store, "Watchdog: `store` is null; mezzo::rendezvous makes one");
  detail::check_watchdog_arguments(rank, size, options);
  threads_ = std::make_shared<detail::WatchdogThreads>(store->clone(), rank, size, options, log_);
  threads_->start();
}

inline Watchdog::~Watchdog() {
  if (std::uncaught_exceptions() > exceptions_) {
    threads_->fail("an exception left the scope of its Watchdog (Watchdog::run quotes it)");
  } else {
    threads_->finish();
  }
  threads_->join();
}

inline AnyCommunicator Watchdog::watch(AnyCommunicator communicator) {
  return detail::WatchedCommunicator(std::move(communicator), log_);
}

inline void Watchdog::fail(const std::string& what) noexcept { threads_->fail(what); }

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
