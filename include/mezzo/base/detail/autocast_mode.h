/// \file
/// libtorch's autocast state, declared here as ATen/autocast_mode.h declares it: including that
/// header brings in every operator and costs ten seconds a unit. A test compiles both side by side,
/// so a change of signature in a later libtorch is a compile error and not a surprise.
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
// Goes through the cache of weight casts.
TORCH_API Tensor cached_cast(c10::ScalarType to_type, const Tensor& arg,
                             c10::DeviceType device_type);

}  // namespace at::autocast

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Switches autocast off for every device type in this thread while it exists, by excluding the
/// dispatch keys.
struct AutocastDisabledGuard {
  c10::impl::ExcludeDispatchKeyGuard excluded{c10::autocast_dispatch_keyset};
};

/// Drops libtorch's 16-bit casts of weights, which autocast otherwise uses until this process's
/// outermost region ends. mezzo calls it after it has written weights (steps, averages, loads,
/// broadcasts): the next use casts them again, in all threads.
inline void clear_autocast_cache() { at::autocast::clear_cache(); }

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
