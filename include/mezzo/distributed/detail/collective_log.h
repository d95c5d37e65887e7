#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collective_call.h>
#include <mezzo/distributed/detail/heartbeat.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Which collectives this rank has called, and for which it waits. Called from any thread.
class CollectiveLog {
 public:
  /// A call, by its number among those of its communicator.
  struct Entry {
    int64_t communicator = 0;
    int64_t sequence = 0;
    CollectiveCall call = {};
  };

  int64_t add_communicator() {
    const std::lock_guard lock(mutex_);
    calls_.push_back(0);
    return static_cast<int64_t>(calls_.size()) - 1;
  }

  Entry called(int64_t communicator, const CollectiveCall& call) {
    const std::lock_guard lock(mutex_);
    before_last_ = last_;
    last_ = {communicator, ++calls_[static_cast<std::size_t>(communicator)], call};
    return last_;
  }

  /// It was refused, and this rank has not called it after all.
  void refused(const Entry& entry) {
    const std::lock_guard lock(mutex_);
    --calls_[static_cast<std::size_t>(entry.communicator)];
    last_ = before_last_;
  }

  /// While one lives this thread waits for the entry.
  class Waiting {
   public:
    Waiting(CollectiveLog& log, const Entry& entry) : log_(log) {
      const std::lock_guard lock(log_.mutex_);
      place_ = log_.waits_.insert(log_.waits_.end(), {entry, std::chrono::steady_clock::now()});
    }
    ~Waiting() {
      const std::lock_guard lock(log_.mutex_);
      log_.waits_.erase(place_);
    }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    CollectiveLog& log_;
    std::list<std::pair<Entry, std::chrono::steady_clock::time_point>>::iterator place_;
  };

  /// What a sign of life says of it.
  void describe(Heartbeat& heartbeat) const {
    const std::lock_guard lock(mutex_);
    heartbeat.calls = calls_;
    Entry entry = last_;
    heartbeat.waits = !waits_.empty();
    if (heartbeat.waits) {
      const auto& [longest, since] = waits_.front();
      entry = longest;
      heartbeat.waited_ms = std::chrono::duration_cast<std::chrono::milliseconds>(
                                std::chrono::steady_clock::now() - since)
                                .count();
    }
    heartbeat.communicator = entry.communicator;
    heartbeat.sequence = entry.sequence;
    heartbeat.collective = entry.sequence > 0 ? entry.call.name() : "";
  }

 private:
  mutable std::mutex mutex_;
  std::vector<int64_t> calls_;
  Entry last_;
  Entry before_last_;
  std::list<std::pair<Entry, std::chrono::steady_clock::time_point>> waits_;  ///< the oldest first
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
