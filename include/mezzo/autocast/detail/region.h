/// \file
/// Region and ThreadStateScope, which all guards share: they enter a region, or another thread's
/// state, and leave everything as it was.
#pragma once

#include <mezzo/autocast/autocast_setting.h>
#include <mezzo/autocast/detail/in_force.h>
#include <mezzo/autocast/detail/libtorch_state.h>
#include <mezzo/autocast/detail/output_dtype.h>
#include <mezzo/autocast/detail/recommended.h>
#include <mezzo/autocast/detail/wrapped_function.h>
#include <mezzo/base/version.h>

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <functional>
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
  std::optional<bool> cache;
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
  PolicyScope::check_installed(setting.policy);
  if (setting.enabled) warn_of_hardware(device, dtype);
  return {device, dtype, setting.enabled, setting.cache, setting.policy, setting.output};
}

/// Validates `setting` for a guard that takes device and dtype from it.
inline RegionState checked_region(const AutocastSetting& setting) {
  TORCH_CHECK(setting.device.has_value(),
              "device: the AutocastSetting names none; give it torch::kCPU, kCUDA or kMPS");
  return checked_region(setting, *setting.device,
                        setting.dtype.value_or(at::autocast::get_autocast_dtype(*setting.device)));
}

/// Counts this thread's regions, as libtorch does, and clears libtorch's cache of casts at the
/// outermost exit. Also clears it where an inner region begins or ends with another dtype than the
/// one around it: the cache is keyed by the weight alone and would hand out the wrong dtype.
class Nesting {
 public:
  explicit Nesting(bool dtype_changes) noexcept
      : drops_casts_(at::autocast::increment_nesting() > 1 && dtype_changes) {
    if (drops_casts_) at::autocast::clear_cache();
  }
  ~Nesting() {
    if (at::autocast::decrement_nesting() <= 0 || drops_casts_) at::autocast::clear_cache();
  }
  Nesting(const Nesting&) = delete;
  Nesting& operator=(const Nesting&) = delete;

 private:
  bool drops_casts_;
};

/// A region of one device type in this thread.
class Region {
 public:
  explicit Region(const RegionState& region) noexcept
      : device_(region.device),
        enabled_(region.enabled),
        found_(found()),
        nesting_(region.dtype != found_.dtype),
        policy_(region.device, region.policy) {
    install({region.enabled, region.dtype, region.cache.value_or(found_.caches)});
  }
  ~Region() { install(found_); }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  bool is_enabled() const noexcept { return enabled_; }

 private:
  struct Flags {
    bool enabled;
    at::ScalarType dtype;
    bool caches;
  };

  Flags found() const noexcept {
    return {at::autocast::is_autocast_enabled(device_), at::autocast::get_autocast_dtype(device_),
            at::autocast::is_autocast_cache_enabled()};
  }

  void install(const Flags& flags) const noexcept {
    at::autocast::set_autocast_enabled(device_, flags.enabled);
    at::autocast::set_autocast_dtype(device_, flags.dtype);
    at::autocast::set_autocast_cache_enabled(flags.caches);
  }

  c10::DeviceType device_;
  bool enabled_;
  Flags found_;
  Nesting nesting_;
  PolicyScope policy_;
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
};

inline ThreadState this_thread_state() noexcept {
  const c10::DispatchKeySet excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  ThreadState state{.disabled = excluded & c10::autocast_dispatch_keyset,
                    .dtypes = {},
                    .cache_enabled = at::autocast::is_autocast_cache_enabled(),
                    .policies = thread_policies()};
  for (std::size_t i = 0; i < state.dtypes.size(); ++i) {
    state.dtypes[i] = at::autocast::get_autocast_dtype(static_cast<c10::DeviceType>(i));
  }
  return state;
}

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
      : found_(this_thread_state()), nesting_(state.dtypes != found_.dtypes) {
    install_in_this_thread(state);
  }
  ~ThreadStateScope() { install_in_this_thread(found_); }
  ThreadStateScope(const ThreadStateScope&) = delete;
  ThreadStateScope& operator=(const ThreadStateScope&) = delete;

 private:
  ThreadState found_;
  Nesting nesting_;
};

/// Calls a function in a `Scope` that is made of `state`, and casts its results as the state's
/// `output` says, if it has one.
template <class Scope, class State>
struct InScope {
  State state;

  template <class F, class... Args>
  requires std::invocable<F&, Args...>
  decltype(auto) operator()(F& function, Args&&... args) const {
    const Scope scope(state);
    const auto call = [&]() -> decltype(auto) {
      return std::invoke(function, std::forward<Args>(args)...);
    };
    if constexpr (requires { state.output; }) {
      return with_output(state.output, call);
    } else {
      return call();
    }
  }
};

/// Returns `function` as a callable that runs in scopes of `state`.
template <class Scope, class F, class State>
auto in_scopes_of(State state, F&& function) {
  using Around = InScope<Scope, State>;
  return WrappedFunction<std::decay_t<F>, Around>(std::forward<F>(function), {std::move(state)});
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
