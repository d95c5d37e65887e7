/// \file
/// libtorch's per-thread autocast state, declared here as ATen/autocast_mode.h declares it:
/// including that header brings in every operator and costs ten seconds a unit. A test compiles
/// both side by side, so a change of signature in a later libtorch is a compile error and not a
/// surprise.
#pragma once

#include <mezzo/base/version.h>

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

}  // namespace at::autocast

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Switches autocast off for every device type in this thread while it exists, by excluding the
/// dispatch keys.
struct AutocastOff {
  c10::impl::ExcludeDispatchKeyGuard excluded{c10::autocast_dispatch_keyset};
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
