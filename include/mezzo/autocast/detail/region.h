/// \file
/// Region and ThreadStateScope, which all guards share: they enter a region, or another thread's
/// state, and leave everything as it was.
#pragma once

#include <mezzo/autocast/autocast_setting.h>
#include <mezzo/autocast/detail/in_force.h>
#include <mezzo/autocast/detail/libtorch_state.h>
#include <mezzo/autocast/detail/output_dtype.h>
#include <mezzo/autocast/detail/recommended.h>
#include <mezzo/base/version.h>

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <concepts>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A validated setting, cheap enough to be copied at every call of a wrapped function.
struct RegionState {
  c10::DeviceType device;
  at::ScalarType dtype;
  bool enabled;
  AutocastCache cache;
  PolicyRef policy;
  std::optional<at::ScalarType> output = std::nullopt;  ///< of results, where there are some
};

/// Validates `setting` for a guard whose type says `device` and `dtype`. A disabled region is held
/// to it too: an enabled one inside it, or a later change of the flag, would use its dtype.
/// \throws c10::Error unless libtorch can autocast on `device` to `dtype`
inline RegionState checked_region(const AutocastSetting& setting, c10::DeviceType device,
                                  at::ScalarType dtype) {
  TORCH_CHECK(setting.device.value_or(device) == device, "device: the AutocastSetting says ",
              *setting.device, ", the guard's type ", device,
              "; leave it out of the setting, or use mezzo::AutocastGuard");
  TORCH_CHECK(setting.dtype.value_or(dtype) == dtype, "dtype: the AutocastSetting says ",
              *setting.dtype, ", the guard's type ", dtype,
              "; leave it out of the setting, or use mezzo::AutocastGuard");
  check_has_autocast(device);
  TORCH_CHECK(autocast_accepts(device, dtype), "dtype: autocast on ", device, " cannot lower to ",
              dtype, "; use Half or BFloat16, or a disabled region for full precision");
  TORCH_CHECK(!setting.output || at::isFloatingType(*setting.output),
              "output: results cannot be of ", *setting.output, "; use torch::kFloat");
  PolicyScope::check_installed(device, setting.policy);
  CacheScope::check_installed(setting.cache);
  if (setting.enabled) warn_of_hardware(device, dtype);
  return {device, dtype, setting.enabled, setting.cache, setting.policy, setting.output};
}

/// Validates `setting` for a guard that takes device and dtype from it.
inline RegionState checked_region(const AutocastSetting& setting) {
  TORCH_CHECK(setting.device.has_value(),
              "device: the AutocastSetting names none; give it torch::kCPU or torch::kCUDA");
  return checked_region(setting, *setting.device,
                        setting.dtype.value_or(at::autocast::get_autocast_dtype(*setting.device)));
}

/// libtorch's cache of weight casts. libtorch makes this static object at its first use; a guard
/// with static lifetime, or in a thread that outlives main, may outlive it.
class LibtorchCasts {
 public:
  /// Call this before a region begins, so that the cache is there until a static guard has ended.
  static void make() noexcept { static const LibtorchCasts casts; }

  static void clear() noexcept {
    if (!are_gone_) at::autocast::clear_cache();
  }

 private:
  LibtorchCasts() noexcept { at::autocast::clear_cache(); }
  ~LibtorchCasts() { are_gone_ = true; }

  static inline std::atomic<bool> are_gone_ = false;
};

/// Counts this thread's regions, as libtorch does, and clears libtorch's weight cache at the
/// outermost exit. It also does so where an inner region begins or ends with another dtype than the
/// one around it: the cache is keyed by the weight alone and would hand out the wrong dtype. Warns
/// of a region that ends in the wrong thread or order, which nothing else would tell.
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

/// A region of one device type in this thread. Where a WeightCache is in force, libtorch's cache is
/// off for all devices, which share one switch: it would hand out stale weights to the few ops that
/// do not ask mezzo's.
class Region {
 public:
  explicit Region(const RegionState& region) noexcept
      : device_(region.device),
        enabled_(region.enabled),
        found_(found()),
        nesting_(region.dtype != found_.dtype),
        policy_(region.device, region.policy),
        cache_(region.device, region.cache) {
    const bool caches = region.cache.enabled().value_or(found_.libtorch_caches);
    install({region.enabled, region.dtype, caches && !CacheScope::in_force()});
  }
  ~Region() { install(found_); }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  bool is_enabled() const noexcept { return enabled_; }

 private:
  struct Flags {
    bool enabled;
    at::ScalarType dtype;
    bool libtorch_caches;
  };

  Flags found() const noexcept {
    return {at::autocast::is_autocast_enabled(device_), at::autocast::get_autocast_dtype(device_),
            at::autocast::is_autocast_cache_enabled()};
  }

  void install(const Flags& flags) const noexcept {
    at::autocast::set_autocast_enabled(device_, flags.enabled);
    at::autocast::set_autocast_dtype(device_, flags.dtype);
    at::autocast::set_autocast_cache_enabled(flags.libtorch_caches);
  }

  c10::DeviceType device_;
  bool enabled_;
  Flags found_;
  Nesting nesting_;
  PolicyScope policy_;
  CacheScope cache_;
};

/// The region of a guard, which returns nothing and may end before its scope does.
class GuardedRegion {
 public:
  explicit GuardedRegion(const RegionState& region) {
    TORCH_CHECK(!region.output,
                "output: a guard returns nothing whose dtype it could change; give the setting to "
                "mezzo::autocast(setting, [&] { return ...; }) or to mezzo::AutocastModule");
    region_.emplace(region);
  }
  bool is_enabled() const noexcept { return region_ && region_->is_enabled(); }
  void end() noexcept { region_.reset(); }

 private:
  std::optional<Region> region_;
};

/// A thread's whole autocast state as a value. libtorch keeps "autocast is off for this device
/// type" as an excluded dispatch key. Asking it type by type would throw for types that its version
/// has no autocast for; the keys and dtypes are there for all.
struct ThreadState {
  c10::DispatchKeySet disabled;
  std::array<at::ScalarType, c10::COMPILE_TIME_MAX_DEVICE_TYPES> dtypes;
  bool cache_enabled;
  ThreadPolicies policies;
  std::array<std::shared_ptr<CacheOwner>, kPolicyDevices.size()> weight_caches;
};

inline ThreadState this_thread_state() noexcept {
  const c10::DispatchKeySet excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  ThreadState state{.disabled = excluded & c10::autocast_dispatch_keyset,
                    .dtypes = {},
                    .cache_enabled = at::autocast::is_autocast_cache_enabled(),
                    .policies = thread_policies(),
                    .weight_caches = {}};
  for (std::size_t i = 0; i < state.weight_caches.size(); ++i) {
    state.weight_caches[i] = thread_caches()[i].owner;
  }
  for (std::size_t i = 0; i < state.dtypes.size(); ++i) {
    state.dtypes[i] = at::autocast::get_autocast_dtype(static_cast<c10::DeviceType>(i));
  }
  return state;
}

/// Installs all of `state` but its weight caches, which a CacheScope puts in force.
inline void install_in_this_thread(const ThreadState& state) noexcept {
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  keys.excluded_ = (keys.excluded_ - c10::autocast_dispatch_keyset) | state.disabled;
  c10::impl::_force_tls_local_dispatch_key_set(keys);
  for (std::size_t i = 0; i < state.dtypes.size(); ++i) {
    at::autocast::set_autocast_dtype(static_cast<c10::DeviceType>(i), state.dtypes[i]);
  }
  at::autocast::set_autocast_cache_enabled(state.cache_enabled);
  thread_policies() = state.policies;
}

/// Runs this thread under `state` until the end of the scope.
class ThreadStateScope {
 public:
  explicit ThreadStateScope(const ThreadState& state) noexcept
      : found_(this_thread_state()),
        nesting_(state.dtypes != found_.dtypes),
        caches_{CacheScope(0, state.weight_caches[0]), CacheScope(1, state.weight_caches[1])} {
    install_in_this_thread(state);
  }
  ~ThreadStateScope() { install_in_this_thread(found_); }
  ThreadStateScope(const ThreadStateScope&) = delete;
  ThreadStateScope& operator=(const ThreadStateScope&) = delete;

 private:
  ThreadState found_;
  Nesting nesting_;
  std::array<CacheScope, kPolicyDevices.size()> caches_;
};

/// Calls `F` exactly as a plain `F` would be called: same overloads, arguments, value category,
/// result and noexcept. Builds a `Scope`, whose constructor must not throw, from `State` before the
/// call and destroys it after. A state with an `output` has it applied to results.
template <class F, class Scope, class State>
class ScopedFunction {
 public:
  template <class G>
  ScopedFunction(G&& function, State state)
      : function_(std::forward<G>(function)), state_(std::move(state)) {}

  template <class... Args>
  requires std::invocable<F&, Args...> std::invoke_result_t<F&, Args...>
  operator()(Args&&... args) & noexcept(std::is_nothrow_invocable_v<F&, Args...>) {
    return run(
        [&]() -> decltype(auto) { return std::invoke(function_, std::forward<Args>(args)...); });
  }

  template <class... Args>
  requires std::invocable<const F&, Args...> std::invoke_result_t<const F&, Args...>
  operator()(Args&&... args) const& noexcept(std::is_nothrow_invocable_v<const F&, Args...>) {
    return run(
        [&]() -> decltype(auto) { return std::invoke(function_, std::forward<Args>(args)...); });
  }

  template <class... Args>
  requires std::invocable<F, Args...> std::invoke_result_t<F, Args...>
  operator()(Args&&... args) && noexcept(std::is_nothrow_invocable_v<F, Args...>) {
    return run([&]() -> decltype(auto) {
      return std::invoke(std::move(function_), std::forward<Args>(args)...);
    });
  }

 private:
  template <class Call>
  decltype(auto) run(Call&& call) const {
    const Scope scope(state_);
    if constexpr (requires { state_.output; }) {
      return with_output(state_.output, call);
    } else {
      return call();
    }
  }

  F function_;
  State state_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
