/// \file
/// All of a thread's autocast state as a value, and its installation in another thread.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <mezzo/autocast/detail/libtorch_state.h>
#include <mezzo/autocast/detail/op_policy/policy_edits.h>
#include <mezzo/autocast/detail/region.h>
#include <mezzo/autocast/detail/weight_cache/thread_caches.h>

#include <array>
#include <cstddef>
#include <memory>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// libtorch keeps "autocast is off for this device type" as an excluded dispatch key, and asking it
/// type by type throws for those that its version has no autocast for; the keys and dtypes are
/// there for all.
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

inline void install_in_this_thread(const ThreadState& state) noexcept {
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  keys.excluded_ = (keys.excluded_ - c10::autocast_dispatch_keyset) | state.disabled;
  c10::impl::_force_tls_local_dispatch_key_set(keys);
  for (std::size_t i = 0; i < state.dtypes.size(); ++i) {
    at::autocast::set_autocast_dtype(static_cast<c10::DeviceType>(i), state.dtypes[i]);
  }
  at::autocast::set_autocast_cache_enabled(state.cache_enabled);
  thread_policies() = state.policies;
  for (std::size_t i = 0; i < state.weight_caches.size(); ++i) {
    change_cache(thread_caches()[i], state.weight_caches[i]);
  }
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

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
