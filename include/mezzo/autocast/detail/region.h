/// \file
/// The part that all guards share: enter a region, and leave it with everything as it was.
#pragma once

#include <c10/util/Exception.h>
#include <mezzo/autocast/detail/libtorch_state.h>
#include <mezzo/autocast/detail/op_policy/policy_edits.h>
#include <mezzo/autocast/detail/weight_cache/thread_caches.h>
#include <mezzo/base/precision.h>

#include <atomic>
#include <optional>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Throws unless libtorch can autocast on `device` to `dtype`; also for a disabled region, whose
/// dtype an enabled one inside it or a later change of the flag would bring to light.
inline void check_autocast(c10::DeviceType device, at::ScalarType dtype) {
  TORCH_CHECK(default_autocast_dtype(device) != at::ScalarType::Undefined,
              "device: no autocast on ", device, "; use cpu or cuda");
  TORCH_CHECK(autocast_accepts(device, dtype), "dtype: autocast on ", device, " cannot lower to ",
              dtype, "; use Half or BFloat16, or a disabled region for full precision");
}

/// What one device's region consists of, cheap enough to be copied at every call of a wrapped
/// function.
struct RegionState {
  c10::DeviceType device;
  at::ScalarType dtype;
  bool enabled;
  std::optional<bool> cache_enabled;  ///< libtorch's cache; none: as where the region is entered
  PolicyRef policy = {};
  WeightCacheRef weight_cache = {};
};

inline RegionState checked_region(const AutocastSetting& setting, PolicyRef policy = {},
                                  WeightCacheRef weight_cache = {}) {
  check_autocast(setting.device, setting.dtype);
  return {setting.device,        setting.dtype,     setting.enabled,
          setting.cache_enabled, std::move(policy), std::move(weight_cache)};
}

/// libtorch's cache of weight casts: a static object that it makes at the first use, and that a
/// guard with static lifetime, or in a thread that outlives main, may outlive.
class LibtorchCasts {
 public:
  /// To be called before a region begins: so the cache is there until a static guard has ended.
  static void make() noexcept { static const LibtorchCasts casts; }

  static void clear() noexcept {
    if (!are_gone_) at::autocast::clear_cache();
  }

 private:
  LibtorchCasts() noexcept { at::autocast::clear_cache(); }
  ~LibtorchCasts() { are_gone_ = true; }

  static inline std::atomic<bool> are_gone_ = false;
};

/// Counts this thread's regions, as libtorch does, and drops the cached weight casts at the
/// outermost exit. They are also dropped where an inner region begins or ends with another dtype
/// than the one around it: the cache is keyed by the weight alone and would hand out the wrong
/// dtype. A region that ends elsewhere than it should is warned of: nothing else would tell.
class Nesting {
 public:
  explicit Nesting(bool dtype_changes) noexcept
      : depth_(at::autocast::increment_nesting()), drops_casts_(depth_ > 1 && dtype_changes) {
    LibtorchCasts::make();
    if (drops_casts_) LibtorchCasts::clear();
  }
  ~Nesting() {
    const int left = at::autocast::decrement_nesting();
    if (left <= 0 || drops_casts_) LibtorchCasts::clear();
    if (left != depth_ - 1) warn_of_order();
  }
  Nesting(const Nesting&) = delete;
  Nesting& operator=(const Nesting&) = delete;

 private:
  static void warn_of_order() noexcept {
    try {
      TORCH_WARN(
          "An autocast region ended in another thread than it began in, or before a region inside "
          "it did: these threads' autocast state is now that of neither. End guards in reverse "
          "order, in their own thread; in a coroutine enter a mezzo::AutocastState::Scope after "
          "each suspension.");
    } catch (...) {  // of a warning handler; a destructor has nobody to tell
    }
  }

  int depth_;  ///< of this region, from 1
  bool drops_casts_;
};

/// A region of one device type in this thread. Where a WeightCache is in force libtorch's own,
/// which has one switch for all devices, is off: it would hand out stale weights to the few ops
/// that do not ask mezzo's.
class Region {
 public:
  explicit Region(const RegionState& region) noexcept
      : found_{region.device, at::autocast::get_autocast_dtype(region.device),
               at::autocast::is_autocast_enabled(region.device),
               at::autocast::is_autocast_cache_enabled()},
        nesting_(region.dtype != found_.dtype),
        policy_(region.device, region.policy),
        cache_(region.device, region.weight_cache, region.cache_enabled.value_or(true)) {
    const bool caches = region.cache_enabled.value_or(found_.cache_enabled.value());
    install(region, caches && !CacheScope::in_force());
  }
  ~Region() { install(found_, found_.cache_enabled.value()); }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

 private:
  static void install(const RegionState& region, bool libtorch_caches) noexcept {
    at::autocast::set_autocast_enabled(region.device, region.enabled);
    at::autocast::set_autocast_dtype(region.device, region.dtype);
    at::autocast::set_autocast_cache_enabled(libtorch_caches);
  }

  RegionState found_;
  Nesting nesting_;
  PolicyScope policy_;
  CacheScope cache_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
