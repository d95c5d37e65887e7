/// \file
/// Declarations of ATen/autocast_mode.h, which includes every operator and adds ten seconds to a
/// translation unit. A test compiles both, so that a changed signature is a compile error.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/macros/Export.h>

#include <cstdint>
#include <vector>

namespace at::autocast {

TORCH_API bool is_autocast_enabled(c10::DeviceType device_type);
TORCH_API void set_autocast_enabled(c10::DeviceType device_type, bool enabled);
TORCH_API c10::ScalarType get_autocast_dtype(c10::DeviceType device_type);
TORCH_API void set_autocast_dtype(c10::DeviceType device_type, c10::ScalarType dtype);
TORCH_API bool is_autocast_cache_enabled();
TORCH_API void set_autocast_cache_enabled(bool enabled);
TORCH_API int increment_nesting();
TORCH_API int decrement_nesting();
TORCH_API void clear_cache();
// Uses the cache of weight casts.
TORCH_API Tensor cached_cast(c10::ScalarType to_type, const Tensor& arg,
                             c10::DeviceType device_type);

}  // namespace at::autocast

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

struct AutocastDevice {
  c10::DeviceType type;
  c10::DispatchKey key;
};

/// Returns the device types that libtorch has autocast for, by its map from backends to keys.
inline const std::vector<AutocastDevice>& autocast_devices() {
  static const auto& devices = *[] {
    auto* const all = new std::vector<AutocastDevice>;
    constexpr auto kEnd = static_cast<std::uint8_t>(c10::BackendComponent::EndOfBackendKeys);
    for (std::uint8_t i = 1; i <= kEnd; ++i) {
      const auto backend = static_cast<c10::BackendComponent>(i);
      const c10::DispatchKeySet keys = c10::getAutocastRelatedKeySetFromBackend(backend);
      if (keys.empty()) continue;
      all->push_back({c10::dispatchKeyToDeviceType(c10::toRuntimePerBackendFunctionalityKey(
                          c10::DispatchKey::Dense, backend)),
                      keys.highestPriorityTypeId()});
    }
    return all;
  }();
  return devices;
}

/// Returns the dispatch key of autocast on `device`; Undefined if libtorch has none.
inline c10::DispatchKey autocast_key(c10::DeviceType device) {
  for (const auto& [type, key] : autocast_devices()) {
    if (type == device) return key;
  }
  return c10::DispatchKey::Undefined;
}

inline bool has_autocast(c10::DeviceType device) {
  return autocast_key(device) != c10::DispatchKey::Undefined;
}

/// Returns whether autocast is enabled in this thread for any device type, which libtorch stores as
/// a dispatch key that is not excluded.
inline bool is_any_autocast_enabled() {
  const c10::DispatchKeySet excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  return !(c10::autocast_dispatch_keyset - excluded).empty();
}

/// Disables autocast for all device types in this thread by excluding the dispatch keys.
struct AutocastDisabledGuard {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

/// Clears autocast's cache of weight casts, in all threads. Called after weights are modified (by
/// steps, averages, loads, broadcasts), since the cache otherwise lasts until the outermost region
/// of the process ends.
inline void clear_autocast_cache() { at::autocast::clear_cache(); }

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
