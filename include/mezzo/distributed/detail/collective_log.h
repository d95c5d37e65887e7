#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/work.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/StringUtil.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

enum class Collective : uint8_t { all_reduce, broadcast, all_gather, reduce_scatter, barrier };

inline const char* name_of(Reduction reduction) {
  if (reduction == Reduction::average) return "average";
  return reduction == Reduction::sum ? "sum" : "max";
}

/// One rank's call as ranks compare it and errors name it. `numel` counts what goes in.
struct CollectiveCall {
  Collective collective;
  at::ScalarType dtype = at::kByte;
  int64_t numel = 0;
  Reduction reduction = Reduction::sum;
  int root = 0;

  CollectiveCall(Collective of) : collective(of) {}  // implicit, for a barrier
  CollectiveCall(Collective of, const at::Tensor& input, Reduction by = Reduction::sum,
                 int from = 0)
      : collective(of),
        dtype(input.scalar_type()),
        numel(input.numel()),
        reduction(by),
        root(from) {}

  bool operator==(const CollectiveCall&) const = default;

  std::string name() const {
    const std::string of = c10::str(" of ", numel, " ", c10::toString(dtype));
    switch (collective) {
      case Collective::all_reduce:
        return c10::str("all_reduce(", name_of(reduction), ")", of);
      case Collective::broadcast:
        return c10::str("broadcast from rank ", root, of);
      case Collective::all_gather:
        return "all_gather" + of;
      case Collective::reduce_scatter:
        return c10::str("reduce_scatter(", name_of(reduction), ")", of);
      case Collective::barrier:
        break;
    }
    return "barrier";
  }
  std::string name_on(int rank, int size) const {
    return c10::str(name(), " on rank ", rank, " of ", size);
  }
};

inline std::string in_seconds(std::chrono::milliseconds time) {
  const auto tenths = (time.count() + 50) / 100;
  return std::to_string(tenths / 10) + '.' + std::to_string(tenths % 10) + " s";
}

/// Which collectives a rank has called, and for which it waits.
struct RankActivity {
  std::vector<int64_t> calls = {};  ///< a communicator: how many collectives this rank has called

  // The collective that it waits for longest, or has called last.
  bool waits = false;
  int64_t waited_ms = 0;
  int64_t communicator = 0;
  int64_t sequence = 0;  ///< from 1; 0: it has called none
  std::string collective = {};

  bool has_called(int64_t of, int64_t number) const {
    return of < static_cast<int64_t>(calls.size()) && calls[static_cast<std::size_t>(of)] >= number;
  }

  /// "all_reduce(sum) of 8 Float (collective 3)", and of further communicators which.
  std::string place() const {
    std::string where = collective + " (collective " + std::to_string(sequence);
    if (communicator > 0) where += " of communicator " + std::to_string(communicator);
    return where + ')';
  }

  /// "is waiting for ...", "last called ...".
  std::string doing() const {
    if (waits) {
      return "is waiting for " + place() + " since " +
             in_seconds(std::chrono::milliseconds(waited_ms));
    }
    if (sequence > 0) return "last called " + place();
    return "has called no collective";
  }

  /// The same of a sign of life after which there were none.
  std::string did() const {
    if (waits) return "when last seen it waited for " + place();
    if (sequence > 0) return "when last seen it had last called " + place();
    return "when last seen it had called no collective";
  }
};

/// What this rank calls and waits for through the communicators that a watchdog watches. Called
/// from any thread.
class CollectiveLog {
 public:
  /// A call, by its number among those of its communicator.
  struct Entry {
    int64_t communicator = 0;
    int64_t sequence = 0;
    CollectiveCall call = Collective::barrier;

    bool operator==(const Entry&) const = default;
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

  /// It was refused, and this rank has not called it after all. Another thread may have called
  /// another communicator's meanwhile.
  void refused(const Entry& entry) {
    const std::lock_guard lock(mutex_);
    --calls_[static_cast<std::size_t>(entry.communicator)];
    if (last_ == entry) last_ = before_last_;
    if (before_last_ == entry) before_last_ = {};
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

  RankActivity activity() const {
    const std::lock_guard lock(mutex_);
    RankActivity activity{.calls = calls_, .waits = !waits_.empty()};
    Entry entry = last_;
    if (activity.waits) {
      const auto& [longest, since] = waits_.front();
      entry = longest;
      activity.waited_ms = std::chrono::duration_cast<std::chrono::milliseconds>(
                               std::chrono::steady_clock::now() - since)
                               .count();
    }
    activity.communicator = entry.communicator;
    activity.sequence = entry.sequence;
    activity.collective = entry.sequence > 0 ? entry.call.name() : "";
    return activity;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<int64_t> calls_;
  Entry last_;
  Entry before_last_;
  std::list<std::pair<Entry, std::chrono::steady_clock::time_point>> waits_;  ///< the oldest first
};

/// A collective under way whose waiting is logged.
class LoggedPending final : public Work::Pending {
 public:
  LoggedPending(Work under, std::shared_ptr<CollectiveLog> log, const CollectiveLog::Entry& entry,
                int rank, int size)
      : under_(std::move(under)), log_(std::move(log)), entry_(entry), rank_(rank), size_(size) {}
  ~LoggedPending() override { under_.abandon(); }  // who holds this one has warned
  LoggedPending(const LoggedPending&) = delete;
  LoggedPending& operator=(const LoggedPending&) = delete;

  bool ready() override { return under_.ready(); }
  void wait() override {
    const CollectiveLog::Waiting waiting(*log_, entry_);
    under_.wait();
  }
  std::string name() const override { return entry_.call.name_on(rank_, size_); }

 private:
  Work under_;
  std::shared_ptr<CollectiveLog> log_;
  CollectiveLog::Entry entry_;
  int rank_;
  int size_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
