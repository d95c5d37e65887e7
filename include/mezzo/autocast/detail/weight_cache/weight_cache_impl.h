/// \file
/// The members of WeightCache: WeightStore, which holds the copies, and the ops that ask it.
#pragma once

#include <mezzo/autocast/detail/in_force.h>
#include <mezzo/autocast/detail/op_policy/op_names.h>
#include <mezzo/autocast/detail/op_policy/op_overrides.h>
#include <mezzo/autocast/detail/weight_cache/held_copy.h>
#include <mezzo/autocast/weight_cache.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Copies of weights, one of each weight and dtype. Not for several threads. Copies that leave the
/// table go to the caller's `out`, who destroys them when no lock is held: a copy's memory may be
/// freed by a user's function.
class CopyTable {
 public:
  using Map = std::unordered_multimap<const c10::TensorImpl*, HeldCopy>;

  HeldCopy* find(const at::Tensor& weight, at::ScalarType dtype) {
    auto [entry, last] = copies_.equal_range(weight.unsafeGetTensorImpl());
    while (entry != last && entry->second.copy.scalar_type() != dtype) ++entry;
    return entry == last ? nullptr : &entry->second;
  }

  /// Returns the copy if it has the present values of `weight`.
  HeldCopy* find_current(const at::Tensor& weight, at::ScalarType dtype) {
    HeldCopy* entry = find(weight, dtype);
    return entry != nullptr && entry->is_current(weight) ? entry : nullptr;
  }

  /// Puts `entry` into the table and returns what was there.
  std::optional<HeldCopy> put(const at::Tensor& weight, HeldCopy entry) {
    if (HeldCopy* old = find(weight, entry.copy.scalar_type()); old != nullptr) {
      return std::exchange(*old, std::move(entry));
    }
    copies_.emplace(weight.unsafeGetTensorImpl(), std::move(entry));
    return std::nullopt;
  }

  /// Forgets the copies of one weight, or of all for null; published ones keep their place.
  void forget(const c10::TensorImpl* weight, Map& out) {
    auto [entry, last] =
        weight == nullptr ? std::pair(copies_.begin(), copies_.end()) : copies_.equal_range(weight);
    while (entry != last) {
      const auto now = entry++;
      if (now->second.published) {
        now->second.forgotten = true;
      } else {
        out.insert(copies_.extract(now));
      }
    }
  }

  template <class Predicate>
  void remove_if(Predicate gone, Map& out) {
    for (auto entry = copies_.begin(); entry != copies_.end();) {
      const auto now = entry++;
      if (gone(*now)) out.insert(copies_.extract(now));
    }
  }

  /// Removes the copies of dead weights, once in half as many calls as there are copies: a constant
  /// cost a call.
  void remove_dead_if_due(Map& out) {
    if (++calls_since_removal_ > copies_.size() / 2) remove_dead(out);
  }
  void remove_dead(Map& out) {
    calls_since_removal_ = 0;
    remove_if([](const auto& entry) { return entry.second.weight.is_dead(); }, out);
  }

  /// Adds the number and bytes of the copies.
  void add_to(WeightCacheStatistics& statistics) const {
    for (const auto& [weight, entry] : copies_) {
      statistics.bytes_held += bytes_of(entry.copy);
      ++statistics.copies_held;
    }
  }

 private:
  Map copies_;  // a weight's address stays its own while an entry knows the weight
  std::size_t calls_since_removal_ = 0;
};

/// Holds the copies that all threads share, published and pinned, behind a lock, and has the rules
/// for the copies of a region, which its thread alone reads (ThreadCache::region_copies). A copy in
/// the shared table that is not published is of a pinned weight.
class WeightStore final : public CacheOwner {
 public:
  WeightStore() : CacheOwner(&WeightStore::lower_for) {}

  /// Returns the copy of `weight`, current, in memory that is the same at every call.
  at::Tensor buffer_for(const at::Tensor& weight, at::ScalarType dtype) {
    return renew(weight, dtype, /*publish=*/true);
  }

  /// Makes `copy` the published copy of `weight`. `events` are those of all that is published
  /// together.
  void publish(const at::Tensor& weight, const at::Tensor& copy, WriteEvents& events) {
    CopyTable::Map out;  // dies after the locks, as does
    std::optional<HeldCopy> old;
    HeldCopy entry{.weight = WeightIdentity(weight), .copy = copy, .published = true};
    entry.order.written(copy, events);
    const std::lock_guard refresh(refresh_);
    const std::lock_guard lock(mutex_);
    shared_.remove_dead_if_due(out);
    copy.unsafeGetTensorImpl()->bump_version();  // a kernel that wrote it did not
    const HeldCopy* found = shared_.find(weight, copy.scalar_type());
    if (found != nullptr && found->copy.is_same(copy) && found->copy_version.has_value()) {
      entry.copy_version = copy._version();
    }
    ++counts_.published;
    old = shared_.put(weight, std::move(entry));
  }

  void pin(const std::vector<at::Tensor>& weights) {
    const std::lock_guard lock(mutex_);
    std::erase_if(pinned_, [](const auto& pinned) { return pinned.second.expired(); });
    for (const auto& weight : weights) {
      pinned_.insert_or_assign(weight.unsafeGetTensorImpl(), WeakTensor(weight.getIntrusivePtr()));
    }
  }

  /// Ends the pins of `weights`, or all for null, and drops their copies but the published ones.
  void unpin(const std::vector<at::Tensor>* weights) {
    CopyTable::Map out;
    const std::lock_guard lock(mutex_);
    if (weights == nullptr) {
      pinned_.clear();
    } else {
      for (const auto& weight : *weights) pinned_.erase(weight.unsafeGetTensorImpl());
    }
    ++forgets_;  // a cast that is under way is not to be held
    shared_.remove_if(
        [this](const auto& entry) {
          return !entry.second.published && pinned_.count(entry.first) == 0;
        },
        out);
  }

  /// Forgets the copies of one weight, or of all for null; published ones keep their memory.
  void forget(const c10::TensorImpl* weight) {
    CopyTable::Map out;
    const std::lock_guard lock(mutex_);
    ++forgets_;
    shared_.forget(weight, out);
  }

  bool holds(const at::Tensor& weight, at::ScalarType dtype) {
    const std::lock_guard lock(mutex_);
    return find_current(weight, dtype, region_on(weight.device().type())) != nullptr;
  }

  bool is_asked_for(const at::Tensor& weight, at::ScalarType dtype) {
    const std::lock_guard lock(mutex_);
    return asked_for_.count({weight.unsafeGetTensorImpl(), dtype}) != 0;
  }

  WeightCacheStatistics statistics() {
    CopyTable::Map out;
    const std::lock_guard lock(mutex_);
    WeightCacheStatistics now = counts_;
    shared_.remove_dead(out);
    shared_.add_to(now);
    for (const auto device : kPolicyDevices) {
      if (Region* region = region_on(device); region != nullptr) {
        region->copies.remove_dead(out);
        region->copies.add_to(now);
      }
    }
    return now;
  }

  void reset_statistics() {
    const std::lock_guard lock(mutex_);
    counts_ = {};
  }

 private:
  /// The copies of trainable weights in a region of one thread.
  struct Region {
    CopyTable copies;
    std::uint64_t forgets;  ///< the store's when the copies were made
  };

  /// A copy that an op is to read, and the flag that its node sets when a gradient goes through.
  struct Use {
    at::Tensor copy;
    std::shared_ptr<std::atomic<bool>> passed;
  };

  static at::Tensor lower_for(const at::Tensor& tensor, at::ScalarType dtype, ThreadCache& cache) {
    return static_cast<WeightStore&>(*cache.owner).copy_for(tensor, dtype, cache.region_copies);
  }

  at::Tensor copy_for(const at::Tensor& tensor, at::ScalarType dtype,
                      std::shared_ptr<void>& region_copies) {
    const auto shown = shown_by(tensor);
    const at::Tensor& weight = *shown;
    if (!can_be_held(weight)) return tensor.to(dtype);
    Region* region = nullptr;
    bool pinned = false;
    Use use;
    {
      CopyTable::Map out;  // dies after the lock
      const std::lock_guard lock(mutex_);
      shared_.remove_dead_if_due(out);
      if (weight.requires_grad() || tensor.requires_grad()) region = &region_in(region_copies, out);
      const HeldCopy* entry = find_current(weight, dtype, region);
      if (entry != nullptr) {
        use = hit(*entry, weight, dtype);
      } else {
        pinned = pinned_.count(weight.unsafeGetTensorImpl()) != 0;
        if (pinned || region != nullptr) note_asked_for(weight, dtype);
      }
    }
    if (!use.copy.defined() && pinned) {
      use.copy = renew(weight, dtype, /*publish=*/false);
    } else if (!use.copy.defined() && region != nullptr) {
      use = cast_for(*region, weight, dtype);
    } else if (!use.copy.defined()) {
      return tensor.to(dtype);
    }
    return in_place_of(tensor, weight, std::move(use.copy), std::move(use.passed));
  }

  /// Returns this thread's region, without copies that were forgotten since they were made.
  Region& region_in(std::shared_ptr<void>& region_copies, CopyTable::Map& out) const {
    if (region_copies == nullptr) region_copies.reset(new Region{.forgets = forgets_});
    auto& region = *static_cast<Region*>(region_copies.get());
    region.copies.remove_dead_if_due(out);
    if (std::exchange(region.forgets, forgets_) != forgets_) region.copies.forget(nullptr, out);
    return region;
  }

  HeldCopy* find_current(const at::Tensor& weight, at::ScalarType dtype, Region* region) {
    HeldCopy* entry = shared_.find_current(weight, dtype);
    if (entry == nullptr && region != nullptr && region->forgets == forgets_) {
      entry = region->copies.find_current(weight, dtype);
    }
    return entry;
  }

  Use hit(const HeldCopy& entry, const at::Tensor& weight, at::ScalarType dtype) {
    entry.order.about_to_read(entry.copy);
    ++counts_.hits;
    counts_.bytes_saved += cast_bytes(weight, dtype);
    ++cache_hits();
    return {entry.copy, entry.passed};
  }

  /// Returns the current copy of a weight that is pinned or to be published, and casts it if there
  /// is none. One thread at a time, so that threads which miss together make one cast. The memory
  /// of a published copy is kept.
  at::Tensor renew(const at::Tensor& weight, at::ScalarType dtype, bool publish) {
    CopyTable::Map out;  // dies after the locks, as does
    std::optional<HeldCopy> old;
    const std::lock_guard refresh(refresh_);
    std::optional<HeldCopy> place;
    std::uint64_t forgets = 0;
    {
      const std::lock_guard lock(mutex_);
      shared_.remove_dead_if_due(out);
      forgets = forgets_;
      if (HeldCopy* entry = shared_.find(weight, dtype); entry != nullptr) {
        if (entry->is_current(weight)) {
          entry->published |= publish;
          return publish ? entry->copy : hit(*entry, weight, dtype).copy;
        }
        entry->forgotten = true;  // while its memory is written; for good if the cast throws
        if (entry->published) place = *entry;
      }
    }
    HeldCopy entry = cast_to(weight, dtype, place.has_value() ? &*place : nullptr);
    at::Tensor copy = entry.copy;
    entry.published = publish || place.has_value();
    const std::lock_guard lock(mutex_);
    count_cast(weight, dtype);
    entry.forgotten = forgets != forgets_;
    if (entry.published || !entry.forgotten) old = shared_.put(weight, std::move(entry));
    return copy;
  }

  Use cast_for(Region& region, const at::Tensor& weight, at::ScalarType dtype) {
    HeldCopy entry = cast_to(weight, dtype, nullptr);
    entry.passed = std::make_shared<std::atomic<bool>>(false);
    Use use{entry.copy, entry.passed};
    const auto old = region.copies.put(weight, std::move(entry));
    const std::lock_guard lock(mutex_);
    count_cast(weight, dtype);
    return use;
  }

  void note_asked_for(const at::Tensor& weight, at::ScalarType dtype) {
    static constexpr std::size_t kMost = 65536;
    if (asked_for_.size() >= kMost) asked_for_.clear();  // the living ask again
    asked_for_.emplace(weight.unsafeGetTensorImpl(), dtype);
  }

  void count_cast(const at::Tensor& weight, at::ScalarType dtype) {
    ++counts_.casts;
    counts_.bytes_cast += cast_bytes(weight, dtype);
  }

  /// Returns this thread's region of a device type, or null if it has none or cast nothing yet.
  Region* region_on(c10::DeviceType device) const {
    if (!is_policy_device(device)) return nullptr;
    const ThreadCache& cache = thread_caches()[policy_device_index(device)];
    return cache.owner.get() == this ? static_cast<Region*>(cache.region_copies.get()) : nullptr;
  }

  std::mutex refresh_;  // first this, then mutex_
  std::mutex mutex_;
  CopyTable shared_;
  std::unordered_map<const c10::TensorImpl*, WeakTensor> pinned_;
  std::set<std::pair<const c10::TensorImpl*, at::ScalarType>> asked_for_;  // may name dead weights
  std::uint64_t forgets_ = 0;  // calls that forget also what is being cast or a region holds
  WeightCacheStatistics counts_;
};

/// The ops that ask caches, by their full names. A device that does not lower one of them, as the
/// CPU does not lower the cells, leaves it alone: the ops that it is made of meet the cache.
inline constexpr std::array<const char*, 24> kCachedOps = {
    "aten::linear",
    "aten::mm",
    "aten::matmul",
    "aten::bmm",
    "aten::addmm",
    "aten::addbmm",
    "aten::baddbmm",
    "aten::conv1d",
    "aten::conv1d.padding",
    "aten::conv2d",
    "aten::conv2d.padding",
    "aten::conv3d",
    "aten::conv3d.padding",
    "aten::conv_tbc",
    "aten::conv_transpose1d",
    "aten::conv_transpose2d.input",
    "aten::conv_transpose3d.input",
    "aten::_convolution",
    "aten::prelu",
    "aten::lstm_cell",
    "aten::gru_cell",
    "aten::rnn_tanh_cell",
    "aten::rnn_relu_cell",
    "aten::mkldnn_rnn_layer",
};

inline void install_cache_kernels() {
  if (cache_ops_are_installed()) return;
  for (const char* name : kCachedOps) {
    const auto op = find_op(name);
    TORCH_CHECK(op.has_value(), "install_op_overrides: this libtorch (", TORCH_VERSION,
                ") has no operator ", name, "; use libtorch 2.11, or leave the WeightCache out");
    check_no_other_mezzo_overrides(*op);
  }
  for (const char* name : kCachedOps) override_registry().install_for_caches(*find_op(name));
  cache_ops_are_installed() = true;
}

inline void check_can_be_held(const at::Tensor& weight) {
  TORCH_CHECK(weight.defined(),
              "weight is undefined; construct the module before its parameters are passed");
  TORCH_CHECK(weight.is_floating_point(), "weight: ", tensor_words(weight),
              " is never cast by autocast; pass a parameter of a floating dtype");
  TORCH_CHECK(!weight.is_inference(), "weight: ", tensor_words(weight),
              " was made in inference mode, and has no version that tells "
              "when it changes; make or load the model outside of c10::InferenceMode");
  TORCH_CHECK(can_be_held(weight), "weight: ", tensor_words(weight),
              " is no dense leaf without forward gradient; pass the "
              "parameter itself, not what is computed from it");
  TORCH_CHECK(shown_by(weight)->is_same(weight), "weight: ", tensor_words(weight),
              " is a view of the whole of another tensor; pass that "
              "tensor, under which regions look the copy up");
}

inline void check_low_precision(const at::Tensor& weight, at::ScalarType dtype, const char* what) {
  TORCH_CHECK(c10::isFloatingType(dtype) && dtype != weight.scalar_type(), what, " is ",
              dtype_name(dtype), ", which is no low precision of the weight (",
              tensor_words(weight), "); use torch::kHalf or torch::kBFloat16");
}

inline void check_copy(const at::Tensor& weight, const at::Tensor& copy) {
  TORCH_CHECK(copy.defined(), "copy is undefined; pass what buffer_for(weight, dtype) returned");
  check_low_precision(weight, copy.scalar_type(), "copy");
  TORCH_CHECK(copy.sizes() == weight.sizes(), "copy is ", tensor_words(copy), ", and the weight ",
              tensor_words(weight), "; pass what buffer_for(weight, dtype) returned");
  TORCH_CHECK(is_laid_out_as(copy, weight), "copy has the strides ", copy.strides(),
              ", and the weight ", weight.strides(),
              "; give both the same memory format, as buffer_for does");
  TORCH_CHECK(copy.device() == weight.device(), "copy is on ", copy.device(),
              ", and the weight on ", weight.device(),
              "; pass what buffer_for(weight, dtype) returned");
  TORCH_CHECK(!copy.is_inference() && can_be_held(copy) && !copy.requires_grad(),
              "copy requires grad, is not dense, or was made in inference mode; pass what "
              "buffer_for(weight, dtype) returned");
}

}  // namespace detail

MEZZO_INLINE WeightCache::WeightCache() : store_(std::make_shared<detail::WeightStore>()) {}

MEZZO_INLINE void WeightCache::pin(const std::vector<at::Tensor>& weights) const {
  std::vector<at::Tensor> shown;
  for (const auto& weight : weights) {
    TORCH_CHECK(weight.defined(),
                "weight is undefined; construct the module before its parameters are passed");
    if (!weight.is_floating_point()) continue;
    shown.push_back(*detail::shown_by(weight));
    detail::check_can_be_held(shown.back());
  }
  store_->pin(shown);
}

MEZZO_INLINE void WeightCache::unpin(const std::vector<at::Tensor>& weights) const {
  std::vector<at::Tensor> shown;
  for (const auto& weight : weights) {
    if (weight.defined()) shown.push_back(*detail::shown_by(weight));
  }
  store_->unpin(&shown);
}

MEZZO_INLINE void WeightCache::unpin() const { store_->unpin(nullptr); }

MEZZO_INLINE at::Tensor WeightCache::buffer_for(const at::Tensor& weight,
                                                at::ScalarType dtype) const {
  detail::check_can_be_held(weight);
  detail::check_low_precision(weight, dtype, "dtype");
  return store_->buffer_for(weight, dtype);
}

MEZZO_INLINE void WeightCache::publish(
    const std::vector<std::pair<at::Tensor, at::Tensor>>& published) const {
  detail::WriteEvents events;
  for (const auto& [weight, copy] : published) {
    detail::check_can_be_held(weight);
    detail::check_copy(weight, copy);
    store_->publish(weight, copy, events);
  }
}

MEZZO_INLINE bool WeightCache::holds(const at::Tensor& weight, at::ScalarType dtype) const {
  if (!weight.defined()) return false;
  const auto shown = detail::shown_by(weight);
  return detail::can_be_held(*shown) && store_->holds(*shown, dtype);
}

MEZZO_INLINE bool WeightCache::is_asked_for(const at::Tensor& weight, at::ScalarType dtype) const {
  return weight.defined() && store_->is_asked_for(weight, dtype);
}

MEZZO_INLINE void WeightCache::forget(const at::Tensor& weight) const {
  TORCH_CHECK(weight.defined(),
              "weight is undefined; pass a parameter, or call clear() for all of them");
  store_->forget(detail::shown_by(weight)->unsafeGetTensorImpl());
}

MEZZO_INLINE void WeightCache::clear() const { store_->forget(nullptr); }

MEZZO_INLINE WeightCacheStatistics WeightCache::statistics() const { return store_->statistics(); }

MEZZO_INLINE void WeightCache::reset_statistics() const { store_->reset_statistics(); }

MEZZO_INLINE WeightCache::operator WeightCacheRef() const { return WeightCacheRef(store_); }

MEZZO_INLINE WeightCache install_op_overrides(WeightCache cache) {
  detail::install_cache_kernels();
  return cache;
}

MEZZO_INLINE std::ostream& operator<<(std::ostream& stream,
                                      const WeightCacheStatistics& statistics) {
  return stream << "weight cache: " << statistics.hits << " hits, " << statistics.casts
                << " casts, " << statistics.published << " published; " << statistics.bytes_saved
                << " bytes saved, " << statistics.bytes_cast << " cast, " << statistics.bytes_held
                << " held in " << statistics.copies_held << " copies";
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
