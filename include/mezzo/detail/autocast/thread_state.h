/// \file
/// All of a thread's autocast state as a value, and its installation in another thread.
#pragma once

#include <mezzo/detail/autocast/libtorch_state.h>
#include <mezzo/detail/autocast/region.h>

#include <array>
#include <cstddef>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

struct ThreadState {
  std::array<bool, kAutocastDeviceTypes.size()> enabled;
  std::array<at::ScalarType, kAutocastDeviceTypes.size()> dtypes;
  bool cache_enabled;
};

inline ThreadState this_thread_state() noexcept {
  ThreadState state{
      .enabled = {}, .dtypes = {}, .cache_enabled = at::autocast::is_autocast_cache_enabled()};
  for (std::size_t i = 0; i < kAutocastDeviceTypes.size(); ++i) {
    state.enabled[i] = at::autocast::is_autocast_enabled(kAutocastDeviceTypes[i]);
    state.dtypes[i] = at::autocast::get_autocast_dtype(kAutocastDeviceTypes[i]);
  }
  return state;
}

inline void install_in_this_thread(const ThreadState& state) noexcept {
  for (std::size_t i = 0; i < kAutocastDeviceTypes.size(); ++i) {
    at::autocast::set_autocast_enabled(kAutocastDeviceTypes[i], state.enabled[i]);
    at::autocast::set_autocast_dtype(kAutocastDeviceTypes[i], state.dtypes[i]);
  }
  at::autocast::set_autocast_cache_enabled(state.cache_enabled);
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
