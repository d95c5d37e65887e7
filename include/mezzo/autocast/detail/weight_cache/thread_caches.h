/// \file
/// Which weight cache this thread's regions read, and the little that mezzo/autocast/autocast.h and
/// the kernels in front of ops need to know of one.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/macros/Export.h>
#include <mezzo/autocast/detail/never_destroyed.h>
#include <mezzo/autocast/detail/op_policy/category.h>
#include <mezzo/base/version.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <utility>

namespace at {
class Tensor;
}

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// What stands at an op's argument, as far as the op alone can tell.
enum class Place : std::uint8_t {
  other,   ///< an activation: nothing to keep
  left,    ///< an activation, or a weight if it requires grad: the left factor of mm
  right,   ///< a weight, or an activation if it requires no grad: the right one
  weight,  ///< a weight
};

/// Where casts of weights come from.
class WeightCasts {
 public:
  /// `tensor` in `dtype`, a held copy or a new one, with autograd's edge to `tensor`. The caller
  /// has excluded autocast, and `tensor` has another floating dtype. `since`: what `enter` gave.
  virtual at::Tensor lower(const at::Tensor& tensor, at::ScalarType dtype, Place place,
                           std::uint64_t since) = 0;

  /// A thread begins to read from here in a region, and ends.
  virtual std::uint64_t enter() noexcept = 0;
  virtual void leave() noexcept = 0;

 protected:
  WeightCasts() = default;
  WeightCasts(const WeightCasts&) = delete;
  WeightCasts& operator=(const WeightCasts&) = delete;
  ~WeightCasts() = default;
};

/// What the handles of one WeightCache share.
class CacheOwner {
 public:
  CacheOwner() = default;
  CacheOwner(const CacheOwner&) = delete;
  CacheOwner& operator=(const CacheOwner&) = delete;
  virtual ~CacheOwner() = default;

  virtual std::shared_ptr<WeightCasts> casts_of_this_thread() = 0;

  /// The calling thread ends.
  virtual void forget_this_thread() noexcept = 0;
};

/// The cache in force for one device; none as a rule.
struct ThreadCache {
  std::shared_ptr<CacheOwner> owner;
  std::shared_ptr<WeightCasts> casts;
  std::uint64_t since = 0;
};

/// By policy_device_index.
using ThreadCaches = std::array<ThreadCache, kPolicyDevices.size()>;

/// This thread's; exported for the reason given at thread_policies.
C10_EXPORT inline ThreadCaches& thread_caches() {
  static constinit thread_local NeverDestroyed<ThreadCaches> caches;
  return caches.get();
}

/// Puts the cache of `owner`, or none, in the place of `current`.
inline void change_cache(ThreadCache& current, std::shared_ptr<CacheOwner> owner) noexcept {
  if (current.owner == owner) {
    return;
  }
  ThreadCache next;
  if (owner != nullptr) {
    next.casts = owner->casts_of_this_thread();
    next.since = next.casts->enter();
    next.owner = std::move(owner);
  }
  const ThreadCache left = std::exchange(current, std::move(next));
  if (left.casts != nullptr) {
    left.casts->leave();
  }
}

/// Copies that this thread was given in place of a cast, ever; CastTrace takes differences.
C10_EXPORT inline std::int64_t& cache_hits() {
  static thread_local std::int64_t hits = 0;
  return hits;
}

}  // namespace detail

/// A WeightCache as guards take it: it shares what the cache holds. A WeightCache converts to it,
/// so that mezzo/autocast/autocast.h need not include weight_cache.h.
class WeightCacheRef {
 public:
  /// No cache: what surrounds the guard holds.
  WeightCacheRef() = default;
  explicit WeightCacheRef(std::shared_ptr<detail::CacheOwner> owner) noexcept
      : owner_(std::move(owner)) {}

  const std::shared_ptr<detail::CacheOwner>& owner() const noexcept { return owner_; }

 private:
  std::shared_ptr<detail::CacheOwner> owner_;
};

namespace detail {

/// Puts a cache in force for one device until the scope ends, or, where casts are not to be kept,
/// none.
class CacheScope {
 public:
  CacheScope(c10::DeviceType device, const WeightCacheRef& cache, bool keep_casts) noexcept
      : device_(device),
        active_(is_policy_device(device) && (cache.owner() != nullptr || !keep_casts)) {
    if (active_) {
      outer_ = current().owner;
      change_cache(current(), keep_casts ? cache.owner() : nullptr);
    }
  }
  ~CacheScope() {
    if (active_) {
      change_cache(current(), std::move(outer_));
    }
  }
  CacheScope(const CacheScope&) = delete;
  CacheScope& operator=(const CacheScope&) = delete;

  /// Whether casts come from a WeightCache on any device, by this scope or one around it.
  static bool in_force() noexcept {
    const ThreadCaches& caches = thread_caches();
    return std::any_of(caches.begin(), caches.end(),
                       [](const ThreadCache& cache) { return cache.casts != nullptr; });
  }

 private:
  ThreadCache& current() const { return thread_caches()[policy_device_index(device_)]; }

  c10::DeviceType device_;
  bool active_;
  std::shared_ptr<CacheOwner> outer_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
