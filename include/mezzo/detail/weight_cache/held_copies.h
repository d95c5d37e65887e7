/// \file
/// The copies that a cache holds, least recently used last, within a bound of bytes. Not for
/// several threads: see WeightStore.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>
#include <mezzo/detail/weight_cache/device_order.h>
#include <mezzo/detail/weight_cache/weight_identity.h>
#include <mezzo/version.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <list>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
}

/// A weight and a dtype. A weight's address stays its own while an entry knows the weight.
struct CopyKey {
  const c10::TensorImpl* weight;
  at::ScalarType dtype;

  CopyKey(const at::Tensor& tensor, at::ScalarType to)
      : weight(tensor.unsafeGetTensorImpl()), dtype(to) {}
  bool operator==(const CopyKey&) const = default;
};

struct CopyKeyHash {
  std::size_t operator()(const CopyKey& key) const {
    return std::hash<const void*>()(key.weight) ^ (static_cast<std::size_t>(key.dtype) << 1);
  }
};

struct HeldCopy {
  CopyKey key;
  WeightIdentity weight;  ///< as it was when the copy was made
  at::Tensor copy;
  std::uint64_t made = 0;  ///< counts up through all copies that a store makes
  bool forgotten = false;  ///< somebody said that it is not current
  bool fixed = false;      ///< at an address that others know: never moved, never evicted
  /// Of the copy, while it has the weight's values; none for a tensor from outside, which may share
  /// its version with others.
  std::optional<std::int64_t> copy_version = {};
  /// For a copy that does not outlive a backward pass: raised when one went through it.
  std::shared_ptr<std::atomic<bool>> passed = {};
  DeviceOrder order = {};

  /// Whether it has the weight's present values, for a reader who has been here `since`.
  bool is_current(const at::Tensor& now, std::uint64_t since) const {
    const bool outdated =
        passed != nullptr && (made <= since || passed->load(std::memory_order_relaxed));
    const bool overwritten = copy_version.has_value() && *copy_version != copy._version();
    return !forgotten && !outdated && !overwritten && weight.is_current(now);
  }
};

class HeldCopies {
 public:
  using List = std::list<HeldCopy>;

  explicit HeldCopies(std::int64_t max_bytes) : max_bytes_(max_bytes) {}

  /// The copy, if it is current; it becomes the most recently used.
  HeldCopy* find(const at::Tensor& weight, at::ScalarType dtype, std::uint64_t since) {
    const auto found = by_key_.find(CopyKey(weight, dtype));
    if (found == by_key_.end() || !found->second->is_current(weight, since)) {
      return nullptr;
    }
    copies_.splice(copies_.begin(), copies_, found->second);
    return &*found->second;
  }

  /// Takes an entry out, to be renewed where nobody can find it.
  std::optional<HeldCopy> take(const CopyKey& key) {
    const auto found = by_key_.find(key);
    if (found == by_key_.end()) {
      return std::nullopt;
    }
    HeldCopy entry = std::move(*found->second);
    bytes_ -= bytes_of(entry.copy);
    copies_.erase(found->second);
    by_key_.erase(found);
    return entry;
  }

  /// Makes room and puts an entry in. What no longer has a place comes back, to be destroyed when
  /// no lock is held: the least recently used, or the entry itself where it exceeds the bound
  /// alone.
  List insert(HeldCopy entry) {
    List out;
    const std::int64_t bytes = bytes_of(entry.copy);
    const CopyKey key = entry.key;
    copies_.push_front(std::move(entry));
    by_key_.emplace(key, copies_.begin());
    bytes_ += bytes;
    if (bytes > max_bytes_ && !copies_.front().fixed) {
      move(copies_.begin(), out);
    }
    for (auto last = copies_.end(); bytes_ > max_bytes_ && last != copies_.begin();) {
      --last;
      if (!last->fixed) {
        last = move(last, out);
      }
    }
    return out;
  }

  /// Takes out the entries for which `gone` holds.
  template <class Predicate>
  List remove_if(Predicate gone) {
    List out;
    for (auto entry = copies_.begin(); entry != copies_.end();) {
      entry = gone(*entry) ? move(entry, out) : std::next(entry);
    }
    return out;
  }

  /// Forgets the copies for which `meant` holds: out go those that nobody else knows.
  template <class Predicate>
  List forget_if(Predicate meant) {
    for (auto& entry : copies_) {
      entry.forgotten = entry.forgotten || meant(entry);
    }
    return remove_if([&](const HeldCopy& entry) { return !entry.fixed && meant(entry); });
  }

  /// Of all fixed copies but that of `key`.
  std::int64_t fixed_bytes_beside(const CopyKey& key) const {
    std::int64_t bytes = 0;
    for (const auto& entry : copies_) {
      bytes += entry.fixed && !(entry.key == key) ? bytes_of(entry.copy) : 0;
    }
    return bytes;
  }

  std::int64_t max_bytes() const { return max_bytes_; }
  std::int64_t bytes() const { return bytes_; }
  std::size_t size() const { return by_key_.size(); }

 private:
  List::iterator move(List::iterator entry, List& out) {
    bytes_ -= bytes_of(entry->copy);
    by_key_.erase(entry->key);
    const auto next = std::next(entry);
    out.splice(out.end(), copies_, entry);
    return next;
  }

  std::int64_t max_bytes_;
  std::int64_t bytes_ = 0;
  List copies_;
  std::unordered_map<CopyKey, List::iterator, CopyKeyHash> by_key_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
