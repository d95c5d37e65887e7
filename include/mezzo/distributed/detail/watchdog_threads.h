#pragma once

#include <c10/util/intrusive_ptr.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collective_log.h>
#include <mezzo/distributed/detail/heartbeat.h>
#include <mezzo/distributed/detail/peer_watch.h>
#include <mezzo/distributed/detail/termination_signal.h>
#include <mezzo/distributed/watchdog_options.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

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
                  const WatchdogOptions& options, std::shared_ptr<CollectiveLog> log);
  void start();

  /// Of this rank: it is done. Returns when the others know, and on rank 0 when they are done too.
  void finish();
  /// Returns when the others have read it, or after four intervals.
  void fail(const std::string& what);
  /// After one of them.
  void join();

 private:
  void exchange_until_over();
  void exchange_until_done();
  void exchange();
  bool is_done(std::unique_lock<std::mutex>& lock);
  Heartbeat sign_of_life();
  void find_who_has_come();
  void take_note(std::vector<std::optional<Heartbeat>> heartbeats, const std::string& published);
  WatchdogFault publish(const WatchdogFault& fault);
  void publish_failure(const std::string& words);

  void look_until_over();
  bool look(std::chrono::milliseconds passed);
  void explain_termination();

  bool claim(Heartbeat::State state);
  void settle(const WatchdogFault& fault, bool store_answers);
  void conclude();
  void linger(const WatchdogFault& fault, bool store_answers);
  void report(const WatchdogFault& fault);
  void end(const WatchdogFault& fault);
  void over();
  void wake();

  std::string key_of(int rank) const { return prefix_ + std::to_string(rank); }
  std::string fault_key() const { return prefix_ + "fault"; }

  c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int size_;
  const WatchdogOptions options_;
  const std::shared_ptr<CollectiveLog> log_;
  TerminationSignal termination_;
  std::string prefix_;

  // Of the thread that exchanges.
  int64_t count_ = 0;
  std::vector<bool> has_come_;
  Clock::time_point last_look_;

  std::mutex mutex_;  // what follows
  std::condition_variable changed_;
  PeerWatch peers_;
  Heartbeat::State state_ = Heartbeat::State::running;
  std::optional<WatchdogFault> fault_;
  std::optional<std::string> failure_;            ///< what `fail` was told
  bool is_woken_ = false;                         ///< the thread that exchanges is to do so at once
  Clock::time_point last_answer_ = Clock::now();  ///< of the store
  std::chrono::milliseconds store_silence_{0};    ///< of which only seen time counts
  bool is_settled_ = false;                       ///< one of the threads reports, or has
  Clock::time_point settled_at_;
  std::optional<WatchdogFault> to_end_;  ///< for which the process is still to be ended
  bool is_over_ = false;                 ///< nothing is watched any more
  bool has_stopped_exchanging_ = false;

  std::thread exchanging_;
  std::thread looking_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
