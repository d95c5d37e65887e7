#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collective_log.h>
#include <mezzo/distributed/detail/peer_watch.h>
#include <mezzo/distributed/watchdog_options.h>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

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

inline WatchdogFault connection_broke(const std::exception& error, const std::string& last_seen) {
  return {WatchdogFault::Kind::unresponsive,
          {0},
          "the connection to rank 0, which hosts the store, broke (killed, or ended without a "
          "word): " +
              one_line(error.what()) + last_seen};
}

/// For how long the store has not answered.
class StoreSilence {
 public:
  explicit StoreSilence(const WatchdogOptions& options)
      : longest_step_(2 * options.interval), timeout_(options.heartbeat_timeout) {}

  void answered() {
    last_answer_ = std::chrono::steady_clock::now();
    silence_ = std::chrono::milliseconds(0);
  }

  std::chrono::milliseconds since_answer() const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() -
                                                                 last_answer_);
  }

  /// `passed` since the last look. Of a longer time only so much counts: then it was this rank that
  /// was stopped. \returns the fault, if it has been too long
  std::optional<WatchdogFault> look(std::chrono::milliseconds passed,
                                    const std::string& last_seen) {
    silence_ += std::min(passed, longest_step_);
    if (silence_ <= timeout_) return std::nullopt;
    return WatchdogFault{WatchdogFault::Kind::unresponsive,
                         {0},
                         "rank 0, which hosts the store, has not answered for " +
                             in_seconds(silence_) + " (stopped or cut off)" + last_seen};
  }

 private:
  std::chrono::milliseconds longest_step_, timeout_;
  std::chrono::milliseconds silence_{0};
  std::chrono::steady_clock::time_point last_answer_ = std::chrono::steady_clock::now();
};

/// What the ranks' watchdogs tell each other through the store. One thread's at a time.
class WatchdogStore {
 public:
  /// Several watchdogs may use one store in turn: each has keys of its own.
  WatchdogStore(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
      : store_(std::move(store)), rank_(rank), has_come_(static_cast<std::size_t>(size), false) {
    const std::string all = "mezzo/watchdog/";
    const int64_t number = store_->add(all + "starts/" + std::to_string(rank_), 1);
    prefix_ = all + std::to_string(number) + '/';
    store_->compareSet(fault_key(), "", kNoFault);
  }

  /// Gives a sign of life.
  void put(const Heartbeat& own) { store_->set(key_of(rank_), own.encode()); }

  struct News {
    std::vector<std::optional<Heartbeat>> heartbeats;  ///< an element a rank, empty: not yet come
    std::optional<WatchdogFault> fault;                ///< that one of them has found
  };

  /// `own` is this rank's sign of life, which need not be fetched.
  News read(const Heartbeat& own) {
    find_who_has_come();
    std::vector<std::string> keys = {fault_key()};
    for (std::size_t rank = 0; rank < has_come_.size(); ++rank) {
      if (has_come_[rank]) keys.push_back(key_of(static_cast<int>(rank)));
    }
    const std::vector<std::vector<uint8_t>> values = store_->multiGet(keys);
    const auto text = [&](std::size_t i) {
      return std::string(values[i].begin(), values[i].end());
    };
    News news;
    news.heartbeats.resize(has_come_.size());
    for (std::size_t rank = 0, i = 1; rank < has_come_.size(); ++rank) {
      if (has_come_[rank]) news.heartbeats[rank] = Heartbeat::decode(text(i++));
    }
    news.heartbeats[static_cast<std::size_t>(rank_)] = own;
    if (text(0) != kNoFault) news.fault = decode_fault(text(0));
    return news;
  }

  /// \returns the fault that was published first, by whichever rank.
  WatchdogFault publish(const WatchdogFault& fault) {
    return decode_fault(store_->compareSet(fault_key(), kNoFault, encode(fault)));
  }

 private:
  static constexpr const char* kNoFault = "none";

  std::string key_of(int rank) const { return prefix_ + std::to_string(rank); }
  std::string fault_key() const { return prefix_ + "fault"; }

  void find_who_has_come() {
    for (int rank = 0; rank < static_cast<int>(has_come_.size()); ++rank) {
      const auto number = static_cast<std::size_t>(rank);
      if (rank != rank_ && !has_come_[number]) has_come_[number] = store_->check({key_of(rank)});
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  std::string prefix_;
  std::vector<bool> has_come_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
