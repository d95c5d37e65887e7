/// \file
/// A cache's copies behind a lock, and how they come about.
#pragma once

#include <mezzo/autocast/detail/autograd_node.h>
#include <mezzo/autocast/detail/in_force.h>
#include <mezzo/autocast/detail/weight_cache/held_copies.h>
#include <mezzo/autocast/detail/weight_cache/held_copy.h>
#include <mezzo/autocast/detail/weight_cache/weight_cache_statistics.h>
#include <mezzo/autocast/detail/weight_cache/weight_identity.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

class WeightStore final : public WeightCasts {
 public:
  WeightStore(std::int64_t max_bytes, bool keep_trainable)
      : keep_trainable_(keep_trainable), held_(max_bytes) {}

  at::Tensor lower(const at::Tensor& tensor, at::ScalarType dtype, ArgumentRole role,
                   std::uint64_t since) override {
    const auto shown = shown_by(tensor);
    const at::Tensor& weight = *shown;
    if (!can_be_held(weight)) {
      return tensor.to(dtype);
    }
    const bool trainable = weight.requires_grad() || tensor.requires_grad();
    const Wanted wanted{weight, dtype, since, trainable, trainable && c10::GradMode::is_enabled()};
    Use use = find(wanted);
    if (!use.copy.defined()) {
      if (!is_worth_holding(wanted, role) || (!trainable && !is_settled(weight))) {
        return tensor.to(dtype);
      }
      use = find_or_cast(wanted, /*fixed=*/false);
    }
    return in_place_of(tensor, weight, std::move(use.copy), std::move(use.passed));
  }

  std::uint64_t enter() noexcept override {
    const std::lock_guard lock(mutex_);
    ++readers_;
    return made_;
  }

  /// When the last region ends, copies that must not outlive it are dropped.
  void leave() noexcept override {
    HeldCopies::List out;  // dies after the lock
    const std::lock_guard lock(mutex_);
    if (--readers_ == 0) held_.remove_passing(out);
    held_.count_use();
    held_.remove_dead_if_due(out);
  }

  /// The copy of `weight`, current, in memory that is the same at every call.
  at::Tensor fixed_copy(const at::Tensor& weight, at::ScalarType dtype) {
    const Wanted wanted{weight, dtype, /*since=*/0, weight.requires_grad()};
    {
      const std::lock_guard lock(mutex_);
      const HeldCopy* entry = find_current(wanted);
      if (entry != nullptr && entry->fixed) return entry->copy;
    }
    return find_or_cast(wanted, /*fixed=*/true).copy;
  }

  /// From now on `copy` is what is held for `weight`. `events`: of all that is published together.
  void publish(const at::Tensor& weight, const at::Tensor& copy, WriteEvents& events) {
    HeldCopies::List out;         // dies after the locks, and so does
    std::optional<HeldCopy> old;  // what is replaced
    const std::lock_guard refresh(refresh_);
    const std::lock_guard lock(mutex_);
    const CopyKey key(weight, copy.scalar_type());
    check_room(key, bytes_of(copy), out);
    old = held_.take(key);
    const bool same = old.has_value() && old->copy.is_same(copy);
    HeldCopy entry{.key = key,
                   .weight = WeightIdentity(weight),
                   .copy = copy,
                   .made = ++made_,
                   .fixed = true,
                   .order = same ? std::move(old->order) : DeviceOrder()};
    entry.order.written(copy, events);
    copy.unsafeGetTensorImpl()->bump_version();  // a kernel that wrote it did not
    if (same && old->copy_version.has_value()) {
      entry.copy_version = copy._version();
    }
    ++counts_.published;
    insert(std::move(entry), /*is_new=*/!old.has_value(), out);
  }

  bool holds(const at::Tensor& weight, at::ScalarType dtype, std::uint64_t since) {
    const std::lock_guard lock(mutex_);
    return find_current({weight, dtype, since, weight.requires_grad()}) != nullptr;
  }

  bool is_asked_for(const at::Tensor& weight, at::ScalarType dtype) {
    const std::lock_guard lock(mutex_);
    return seen_.is_asked_for(weight, dtype);
  }

  /// Forgets the copies of one weight, or all; fixed ones keep their memory.
  void forget(const c10::TensorImpl* weight) {
    HeldCopies::List out;
    const std::lock_guard lock(mutex_);
    ++forgets_;
    weight == nullptr ? held_.forget_all(out) : held_.forget(weight, out);
  }

  WeightCacheStatistics statistics() {
    HeldCopies::List out;
    const std::lock_guard lock(mutex_);
    held_.remove_dead(out);
    WeightCacheStatistics now = counts_;
    now.bytes_held = held_.bytes();
    now.copies_held = static_cast<std::int64_t>(held_.size());
    return now;
  }

  void reset_statistics() {
    const std::lock_guard lock(mutex_);
    counts_ = {};
  }

 private:
  /// What a use asks for.
  struct Wanted {
    const at::Tensor& weight;
    at::ScalarType dtype;
    std::uint64_t since;
    bool trainable;           // the weight, or the view of it that is used
    bool with_graph = false;  // that leads to the weight
  };

  /// A copy, and what its node raises and leads to.
  struct Use {
    at::Tensor copy;
    std::shared_ptr<std::atomic<bool>> passed;
    NodePtr<torch::autograd::Node> grad_accumulator;
  };

  Use find(const Wanted& wanted) {
    const std::lock_guard lock(mutex_);
    held_.count_use();
    HeldCopy* entry = find_current(wanted);
    if (entry == nullptr) return {};
    entry->order.about_to_read(entry->copy);
    count_hit(cast_bytes(wanted.weight, wanted.dtype));
    return use_of(*entry, wanted);
  }

  HeldCopy* find_current(const Wanted& wanted) {
    HeldCopy* entry = held_.find(wanted.weight, wanted.dtype, wanted.since);
    return entry != nullptr && shows_all_writes(*entry, wanted) ? entry : nullptr;
  }

  /// Whether every write to the weight since shows in its identity.
  bool shows_all_writes(const HeldCopy& entry, const Wanted& wanted) const {
    if (entry.fixed || (keep_trainable_ && wanted.trainable)) {
      return true;
    }
    const bool was_frozen = entry.passed == nullptr;
    if (wanted.trainable ? was_frozen : !is_settled(wanted.weight)) {
      return false;
    }
    return keep_trainable_ || entry.weight.has_no_new_gradient(wanted.weight);
  }

  /// Whether a frozen weight stays as it is until it gets a new version.
  bool is_settled(const at::Tensor& weight) const {
    return (keep_trainable_ || !may_be_stepped(weight)) && !shares_memory_unseen(weight);
  }

  /// The graph of a use is no sign of a write, as long as no gradient has passed the copy.
  static Use use_of(HeldCopy& entry, const Wanted& wanted) {
    Use use{entry.copy, entry.passed, nullptr};
    if (wanted.with_graph && entry.passed != nullptr && wanted.weight.requires_grad()) {
      use.grad_accumulator = torch::autograd::impl::grad_accumulator(wanted.weight);
      entry.weight.expect_graph(use.grad_accumulator);
    }
    return use;
  }

  /// One thread at a time, so that threads which miss together make one cast.
  Use find_or_cast(const Wanted& wanted, bool fixed) {
    HeldCopies::List out;         // dies after the locks, and so does
    std::optional<HeldCopy> old;  // what is replaced
    const auto& [weight, dtype, since, trainable, with_graph] = wanted;
    const std::lock_guard refresh(refresh_);
    if (Use use = fixed ? Use() : find(wanted); use.copy.defined()) return use;
    std::uint64_t forgets = 0;
    {
      const std::lock_guard lock(mutex_);
      forgets = forgets_;
      const CopyKey key(weight, dtype);
      if (fixed) {
        check_room(key, weight.numel() * static_cast<std::int64_t>(c10::elementSize(dtype)), out);
      }
      old = held_.take(key);
    }
    const bool is_new = !old.has_value();
    const bool stays_fixed = !is_new && old->fixed && fits(old->copy, weight);
    const bool is_good = !is_new && old->passed == nullptr && shows_all_writes(*old, wanted) &&
                         old->is_current(weight, since);
    HeldCopy entry = is_good ? std::move(*old) : renewed_or_put_back(weight, dtype, old, out);
    const std::lock_guard lock(mutex_);
    entry.fixed = fixed || stays_fixed;
    entry.forgotten = entry.forgotten || forgets != forgets_;
    const bool passing = trainable && !keep_trainable_ && !entry.fixed;
    entry.passed = passing ? std::make_shared<std::atomic<bool>>() : nullptr;
    Use use = use_of(entry, wanted);
    insert(std::move(entry), is_new, out);
    return use;
  }

  /// When the cast throws, as for want of memory, a promised place stays, but not its values.
  HeldCopy renewed_or_put_back(const at::Tensor& weight, at::ScalarType dtype,
                               std::optional<HeldCopy>& old, HeldCopies::List& out) {
    try {
      HeldCopy entry = cast_again(weight, dtype, old);
      const std::lock_guard lock(mutex_);
      entry.made = ++made_;
      ++counts_.casts;
      counts_.bytes_cast += cast_bytes(weight, dtype);
      return entry;
    } catch (...) {
      if (old.has_value() && old->fixed) {
        const std::lock_guard lock(mutex_);
        old->forgotten = true;
        insert(std::move(*old), /*is_new=*/false, out);
      }
      throw;
    }
  }

  void insert(HeldCopy entry, bool is_new, HeldCopies::List& out) {
    counts_.evicted += held_.insert(std::move(entry), is_new, out);
  }

  /// Before anything changes, so that what is published stays so when this throws.
  void check_room(const CopyKey& key, std::int64_t bytes, HeldCopies::List& out) {
    std::int64_t fixed = held_.fixed_bytes_beside(key);
    if (fixed > held_.max_bytes() - bytes) {
      held_.remove_dead(out);
      fixed = held_.fixed_bytes_beside(key);
    }
    TORCH_CHECK(fixed <= held_.max_bytes() - bytes,
                "max_bytes: published copies are never evicted; ", fixed, " bytes of them and ",
                bytes, " more do not fit into ", held_.max_bytes(),
                "; raise WeightCacheOptions::max_bytes or publish fewer weights");
  }

  /// A guess that costs a cast when wrong, and nothing else. The first use of a weight finds no
  /// copy, and comes by here.
  bool is_worth_holding(const Wanted& wanted, ArgumentRole role) {
    const std::lock_guard lock(mutex_);
    const bool is_weight = wanted.trainable ||
                           (role == ArgumentRole::weight && !wanted.weight.is_view()) ||
                           (role != ArgumentRole::left_factor && seen_.comes_back(wanted.weight));
    if (is_weight) {
      seen_.ask_for(wanted.weight, wanted.dtype);
    }
    return is_weight;
  }

  void count_hit(std::int64_t bytes) {
    ++counts_.hits;
    counts_.bytes_saved += bytes;
    ++cache_hits();
  }

  std::mutex refresh_;  // first this, then mutex_
  std::mutex mutex_;
  const bool keep_trainable_;
  HeldCopies held_;
  std::uint64_t made_ = 0;     // copies so far
  std::uint64_t forgets_ = 0;  // so that a copy that is being renewed is forgotten too
  int readers_ = 0;            // threads in regions
  WeightCacheStatistics counts_;
  SeenTensors seen_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
