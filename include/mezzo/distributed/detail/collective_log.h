#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The reduction's name in errors: "sum", "average", ...
inline const char* name_of(c10d::ReduceOp::RedOpType reduction) {
  switch (reduction) {
    case c10d::ReduceOp::SUM:
      return "sum";
    case c10d::ReduceOp::AVG:
      return "average";
    case c10d::ReduceOp::MIN:
      return "min";
    case c10d::ReduceOp::MAX:
      return "max";
    default:
      return "other";
  }
}

/// One rank's call of a collective, as ranks compare it and errors name it. `numel` counts the
/// elements that go in.
struct CollectiveCall {
  c10d::OpType collective;
  at::ScalarType dtype = at::kByte;
  int64_t numel = 0;
  c10d::ReduceOp::RedOpType reduction = c10d::ReduceOp::SUM;
  int root = 0;

  CollectiveCall(c10d::OpType of) : collective(of) {}  // implicit, for a barrier
  CollectiveCall(c10d::OpType of, const at::Tensor& input,
                 c10d::ReduceOp::RedOpType by = c10d::ReduceOp::SUM, int from = 0)
      : collective(of),
        dtype(input.scalar_type()),
        numel(input.numel()),
        reduction(by),
        root(from) {}

  bool operator==(const CollectiveCall&) const = default;

  std::string name() const {
    using c10d::OpType;
    const std::string of = c10::str(" of ", numel, " ", c10::toString(dtype));
    switch (collective) {
      case OpType::ALLREDUCE:
        return c10::str("all_reduce(", name_of(reduction), ")", of);
      case OpType::BROADCAST:
        return c10::str("broadcast from rank ", root, of);
      case OpType::ALLGATHER:
      case OpType::_ALLGATHER_BASE:
        return "all_gather" + of;
      case OpType::REDUCE_SCATTER:
      case OpType::_REDUCE_SCATTER_BASE:
        return c10::str("reduce_scatter(", name_of(reduction), ")", of);
      case OpType::ALLTOALL:
      case OpType::ALLTOALL_BASE:
        return "all_to_all" + of;
      case OpType::BARRIER:
        return "barrier";
      case OpType::UNKNOWN:
        return "the end of this group";
      default:
        return c10d::opTypeToString(collective) + of;
    }
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
  std::vector<int64_t> calls = {};  ///< by group: how many collectives this rank has called

  // The collective that it waits for longest, or has called last.
  bool waits = false;
  int64_t waited_ms = 0;
  int64_t group = 0;
  int64_t sequence = 0;  ///< from 1; 0: it has called none
  std::string collective = {};

  bool has_called(int64_t of, int64_t number) const {
    return of < static_cast<int64_t>(calls.size()) && calls[static_cast<std::size_t>(of)] >= number;
  }

  /// "all_reduce(sum) of 8 Float (collective 3)"; of any group but the first, with its number.
  std::string place() const {
    std::string where = collective + " (collective " + std::to_string(sequence);
    if (group > 0) where += " of group " + std::to_string(group);
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

/// What this rank calls and waits for in the groups that a watchdog watches. Called from any
/// thread.
class CollectiveLog {
 public:
  /// A call, by its number among the calls of its group.
  struct Entry {
    int64_t group = 0;
    int64_t sequence = 0;
    CollectiveCall call = c10d::OpType::BARRIER;

    bool operator==(const Entry&) const = default;
  };

  int64_t add_group() {
    const std::lock_guard lock(mutex_);
    calls_.push_back(0);
    return static_cast<int64_t>(calls_.size()) - 1;
  }

  Entry called(int64_t group, const CollectiveCall& call) {
    const std::lock_guard lock(mutex_);
    before_last_ = last_;
    last_ = {group, ++calls_[static_cast<std::size_t>(group)], call};
    return last_;
  }

  /// Takes back a call that was refused. Another thread may have called another group meanwhile.
  void refused(const Entry& entry) {
    const std::lock_guard lock(mutex_);
    --calls_[static_cast<std::size_t>(entry.group)];
    if (last_ == entry) last_ = before_last_;
    if (before_last_ == entry) before_last_ = {};
  }

  /// Marks the entry as waited for, for as long as the object lives.
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
    activity.group = entry.group;
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

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
