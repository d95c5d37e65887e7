/// \file
/// The copies that a cache holds, least recently used last, within a bound of bytes. Not for
/// several threads: see WeightStore. And what ops were given so far, which tells what is worth
/// holding.
#pragma once

#include <mezzo/autocast/detail/weight_cache/held_copy.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <list>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

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

  /// Makes room and puts an entry in. Copies of dead weights go first, where enough uses have
  /// passed to make the search worth it; then the least recently used, or the entry itself where it
  /// exceeds the bound alone. Returns how many living ones had to go. What goes is put into `out`,
  /// to be destroyed when no lock is held.
  std::int64_t insert(HeldCopy entry, bool is_new, List& out) {
    entry.bytes = bytes_of(entry.copy);
    if (is_new) {
      ++uses_since_search_;
      new_bytes_ += entry.bytes;
    }
    const bool is_full = bytes_ > max_bytes_ - entry.bytes;
    if (is_full && uses_since_search_ > size() / 8) remove_dead(out);
    remove_dead_if_due(out);
    if (entry.bytes > max_bytes_ && !entry.fixed) {
      out.push_back(std::move(entry));
      return 1;
    }
    List& list = list_of(entry);
    list.push_front(std::move(entry));
    list.front().used = ++uses_;
    by_weight_.emplace(list.front().key.weight, list.begin());
    bytes_ += list.front().bytes;
    fixed_bytes_ += list.front().fixed ? list.front().bytes : 0;
    std::int64_t evicted = 0;
    for (; bytes_ > max_bytes_ && !(lasting_.empty() && passing_.empty()); ++evicted) {
      move(least_recently_used(), out);
    }
    return evicted;
  }

  /// Counts a use. A look at all copies is worth its time after half as many uses, or when a
  /// quarter of the memory is new: so it costs each use a constant, and the dead do not hold much
  /// for long.
  void count_use() { ++uses_since_search_; }
  void remove_dead_if_due(List& out) {
    if (uses_since_search_ > size() / 2 || new_bytes_ > bytes_ / 4) remove_dead(out);
  }
  void remove_dead(List& out) {
    uses_since_search_ = 0;
    new_bytes_ = 0;
    remove_if([](const HeldCopy& entry) { return entry.weight.is_dead(); }, out);
  }

  /// Takes out the entries for which `gone` holds.
  template <class Predicate>
  void remove_if(Predicate gone, List& out) {
    for (List* list : {&passing_, &lasting_, &fixed_}) {
      for (auto entry = list->begin(); entry != list->end();) {
        const auto next = std::next(entry);
        if (gone(*entry)) {
          move(entry, out);
        }
        entry = next;
      }
    }
  }

  /// Takes out the copies that do not outlive a backward pass, in time proportional to their
  /// number.
  void remove_passing(List& out) {
    while (!passing_.empty()) move(passing_.begin(), out);
  }

  /// Forgets the copies of one weight: out go those that nobody else knows.
  void forget(const c10::TensorImpl* weight, List& out) {
    const auto [first, last] = by_weight_.equal_range(weight);
    for (auto found = first; found != last;) {
      const auto entry = (found++)->second;  // before its place goes
      entry->forgotten = true;
      if (!entry->fixed) {
        move(entry, out);
      }
    }
  }

  void forget_all(List& out) {
    remove_if([](const HeldCopy& entry) { return !entry.fixed; }, out);
    for (auto& entry : fixed_) {
      entry.forgotten = true;
    }
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
  std::size_t uses_since_search_ = 0;  // for copies of dead weights
  std::int64_t new_bytes_ = 0;         // since then
  List passing_;  // copies that do not outlive a backward pass; the most recently used first
  List lasting_;
  List fixed_;
  Positions by_weight_;
};

/// What ops were given so far. Guesses, which cost a cast or a copy when wrong: the address of what
/// died may be another tensor's by now.
class SeenTensors {
 public:
  /// Whether an op was given this tensor, as it is now, already once: a weight comes back, an
  /// activation is gone.
  bool comes_back(const at::Tensor& tensor) {
    static constexpr std::size_t kMostCandidates = 4096;
    const std::pair now(tensor.const_data_ptr(), tensor._version());
    const auto [found, first] = candidates_.try_emplace(tensor.unsafeGetTensorImpl(), now);
    if (!first && found->second == now) {
      candidates_.erase(found);
      return true;
    }
    found->second = now;
    if (candidates_.size() > kMostCandidates) {
      candidates_.clear();
    }
    return false;
  }

  /// Notes that an op asked for a copy of a weight.
  void ask_for(const at::Tensor& weight, at::ScalarType dtype) {
    static constexpr std::size_t kMost = 65536;
    if (asked_for_.size() >= kMost) asked_for_.clear();  // of dead weights; the others come again
    asked_for_.emplace(weight.unsafeGetTensorImpl(), dtype);
  }

  bool is_asked_for(const at::Tensor& weight, at::ScalarType dtype) const {
    return asked_for_.count({weight.unsafeGetTensorImpl(), dtype}) != 0;
  }

 private:
  std::unordered_map<const void*, std::pair<const void*, std::int64_t>> candidates_;
  std::set<std::pair<const c10::TensorImpl*, at::ScalarType>> asked_for_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
