/// \file
/// The copies that a cache holds, least recently used last, within a bound of bytes. Not for
/// several threads: see WeightStore.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>
#include <mezzo/autocast/detail/weight_cache/device_order.h>
#include <mezzo/autocast/detail/weight_cache/weight_identity.h>
#include <mezzo/base/version.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
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

struct HeldCopy {
  CopyKey key;
  WeightIdentity weight;  ///< as it was when the copy was made
  at::Tensor copy;
  std::uint64_t made = 0;  ///< counts up through all copies that a store makes
  std::uint64_t used = 0;  ///< counts up through all uses of a HeldCopies
  std::int64_t bytes = 0;  ///< of the copy, when it was put into a HeldCopies
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
    const auto found = position_of(CopyKey(weight, dtype));
    if (found == by_weight_.end() || !found->second->is_current(weight, since)) {
      return nullptr;
    }
    List& list = list_of(*found->second);
    list.splice(list.begin(), list, found->second);
    list.front().used = ++uses_;
    return &list.front();
  }

  /// Takes an entry out, to be renewed where nobody can find it.
  std::optional<HeldCopy> take(const CopyKey& key) {
    const auto found = position_of(key);
    if (found == by_weight_.end()) {
      return std::nullopt;
    }
    List out;
    move(found->second, out);
    return std::move(out.front());
  }

  /// Makes room and puts an entry in. What no longer has a place comes back, to be destroyed when
  /// no lock is held: the least recently used, or the entry itself where it exceeds the bound
  /// alone.
  List insert(HeldCopy entry) {
    List out;
    entry.bytes = bytes_of(entry.copy);
    if (entry.bytes > max_bytes_ && !entry.fixed) {
      out.push_back(std::move(entry));
      return out;
    }
    List& list = list_of(entry);
    list.push_front(std::move(entry));
    list.front().used = ++uses_;
    by_weight_.emplace(list.front().key.weight, list.begin());
    bytes_ += list.front().bytes;
    fixed_bytes_ += list.front().fixed ? list.front().bytes : 0;
    while (bytes_ > max_bytes_ && !(lasting_.empty() && passing_.empty())) {
      move(least_recently_used(), out);
    }
    return out;
  }

  /// Takes out the entries for which `gone` holds.
  template <class Predicate>
  List remove_if(Predicate gone) {
    List out;
    for (List* list : {&passing_, &lasting_, &fixed_}) {
      for (auto entry = list->begin(); entry != list->end();) {
        const auto next = std::next(entry);
        if (gone(*entry)) {
          move(entry, out);
        }
        entry = next;
      }
    }
    return out;
  }

  /// Takes out the copies that do not outlive a backward pass, in time proportional to their
  /// number.
  List remove_passing() {
    List out;
    while (!passing_.empty()) {
      move(passing_.begin(), out);
    }
    return out;
  }

  /// Forgets the copies of one weight: out go those that nobody else knows.
  List forget(const c10::TensorImpl* weight) {
    List out;
    const auto [first, last] = by_weight_.equal_range(weight);
    for (auto found = first; found != last;) {
      const auto entry = (found++)->second;  // before its place goes
      entry->forgotten = true;
      if (!entry->fixed) {
        move(entry, out);
      }
    }
    return out;
  }

  List forget_all() {
    List out = remove_if([](const HeldCopy& entry) { return !entry.fixed; });
    for (auto& entry : fixed_) {
      entry.forgotten = true;
    }
    return out;
  }

  /// Of all fixed copies but that of `key`.
  std::int64_t fixed_bytes_beside(const CopyKey& key) const {
    const auto found = position_of(key);
    const bool is_fixed = found != by_weight_.end() && found->second->fixed;
    return fixed_bytes_ - (is_fixed ? found->second->bytes : 0);
  }

  std::int64_t max_bytes() const { return max_bytes_; }
  std::int64_t bytes() const { return bytes_; }
  std::size_t size() const { return by_weight_.size(); }

 private:
  // A weight has copies in one dtype or two.
  using Positions = std::unordered_multimap<const c10::TensorImpl*, List::iterator>;

  Positions::const_iterator position_of(const CopyKey& key) const {
    const auto [first, last] = by_weight_.equal_range(key.weight);
    const auto found = std::find_if(
        first, last, [&key](const auto& position) { return position.second->key == key; });
    return found == last ? by_weight_.end() : found;
  }

  List& list_of(const HeldCopy& entry) {
    return entry.fixed ? fixed_ : entry.passed != nullptr ? passing_ : lasting_;
  }

  /// The least recently used copy that may be evicted. There must be one.
  List::iterator least_recently_used() {
    const bool is_passing =
        lasting_.empty() || (!passing_.empty() && passing_.back().used < lasting_.back().used);
    return std::prev(is_passing ? passing_.end() : lasting_.end());
  }

  void move(List::iterator entry, List& out) {
    bytes_ -= entry->bytes;
    fixed_bytes_ -= entry->fixed ? entry->bytes : 0;
    by_weight_.erase(position_of(entry->key));
    out.splice(out.end(), list_of(*entry), entry);
  }

  std::int64_t max_bytes_;
  std::int64_t bytes_ = 0;
  std::int64_t fixed_bytes_ = 0;
  std::uint64_t uses_ = 0;
  List passing_;  // copies that do not outlive a backward pass; the most recently used first
  List lasting_;
  List fixed_;
  Positions by_weight_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
