/// \file
/// Declarations of ATen/autocast_mode.h, which includes every operator and adds ten seconds to a
/// translation unit. A test compiles both, so that a changed signature is a compile error.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/macros/Export.h>

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
