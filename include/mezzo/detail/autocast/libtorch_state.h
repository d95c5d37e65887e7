/// \file
/// libtorch's per-thread autocast state, declared here as ATen/autocast_mode.h declares it:
/// including that header brings in every operator and costs ten seconds a unit. A test compiles
/// both side by side, so a change of signature in a later libtorch is a compile error and not a
/// surprise.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/macros/Export.h>
#include <mezzo/version.h>

#include <array>

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

/// The device types for which libtorch keeps autocast state; it throws when asked about any other.
inline constexpr std::array<c10::DeviceType, 10> kAutocastDeviceTypes = {
    c10::DeviceType::CPU,  c10::DeviceType::CUDA, c10::DeviceType::MTIA,
    c10::DeviceType::MAIA, c10::DeviceType::XPU,  c10::DeviceType::IPU,
    c10::DeviceType::HPU,  c10::DeviceType::XLA,  c10::DeviceType::PrivateUse1,
    c10::DeviceType::MPS};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
