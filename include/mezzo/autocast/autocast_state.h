/// \file
/// The autocast state of a thread as a value, for thread pools, coroutines and backward passes.
#pragma once

#include <mezzo/autocast/detail/autocast_region.h>
#include <mezzo/autocast/detail/thread_op_overrides.h>
#include <mezzo/autocast/detail/wrapped_function.h>
#include <mezzo/base/detail/autocast_mode.h>
#include <mezzo/base/version.h>

#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <cstddef>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// The autocast state of a thread, for all device types: enabled, dtype, op overrides, and whether
/// casts are cached. Copyable. A new thread starts with autocast disabled; pass the state to it:
///
///     pool.submit([state = mezzo::AutocastState::current()] {
///       const mezzo::AutocastStateGuard guard(state);
///       ...
///     });
///
/// at::ThreadLocalState holds more (grad mode, profiler), but no cache flag and no op overrides,
/// and does not clear the cache.
class AutocastState {
 public:
  /// Returns the calling thread's state.
  [[nodiscard]] static AutocastState current() noexcept { return AutocastState(); }

  /// Makes this the calling thread's state, permanently. Prefer AutocastStateGuard.
  void set_current() const noexcept {
    c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
    keys.excluded_ = (keys.excluded_ - c10::autocast_dispatch_keyset) | disabled_;
    c10::impl::_force_tls_local_dispatch_key_set(keys);
    for (std::size_t i = 0; i < dtypes_.size(); ++i) {
      at::autocast::set_autocast_dtype(static_cast<c10::DeviceType>(i), dtypes_[i]);
    }
    at::autocast::set_autocast_cache_enabled(cache_enabled_);
    detail::thread_op_overrides() = op_overrides_;
  }

  /// Returns whether both states lower to the same dtype on each device type.
  bool has_same_dtypes(const AutocastState& other) const noexcept {
    return dtypes_ == other.dtypes_;
  }

 private:
  AutocastState() noexcept {
    for (std::size_t i = 0; i < dtypes_.size(); ++i) {
      dtypes_[i] = at::autocast::get_autocast_dtype(static_cast<c10::DeviceType>(i));
    }
  }

  // libtorch stores "autocast is disabled for this device type" as an excluded dispatch key.
  // at::autocast::is_autocast_enabled throws for types that this libtorch has no autocast for.
  c10::DispatchKeySet disabled_ =
      c10::impl::tls_local_dispatch_key_set().excluded_ & c10::autocast_dispatch_keyset;
  std::array<at::ScalarType, c10::COMPILE_TIME_MAX_DEVICE_TYPES> dtypes_{};
  bool cache_enabled_ = at::autocast::is_autocast_cache_enabled();
  detail::ThreadOpOverrides op_overrides_ = detail::thread_op_overrides();
};

/// Sets the calling thread's autocast state, and restores the previous one at the end of the scope.
/// Counts as a region: the end of a thread's outermost region clears libtorch's cache of casts.
class AutocastStateGuard {
 public:
  /// Enters `state`.
  [[nodiscard]] explicit AutocastStateGuard(const AutocastState& state) noexcept
      : nesting_guard_(!state.has_same_dtypes(prev_)) {
    state.set_current();
  }
  ~AutocastStateGuard() { prev_.set_current(); }
  AutocastStateGuard(const AutocastStateGuard&) = delete;
  AutocastStateGuard& operator=(const AutocastStateGuard&) = delete;

 private:
  AutocastState prev_ = AutocastState::current();
  detail::NestingGuard nesting_guard_;
};

/// Returns a callable that runs `function` under the autocast state of the thread that called this
/// function: `std::thread worker(mezzo::propagate_autocast_state(work), batch);`. Forwards
/// arguments and result as `autocast_wrap` does.
template <class F>
[[nodiscard]] auto propagate_autocast_state(F&& function) {
  return detail::wrap_in_guard<AutocastStateGuard>(AutocastState::current(),
                                                   std::forward<F>(function));
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
