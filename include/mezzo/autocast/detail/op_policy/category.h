/// \file
/// The categories of autocast's op lists, and the devices that have such lists.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>
#include <c10/util/Exception.h>
#include <mezzo/base/version.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string_view>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// What autocast does with an op. Double, complex and integer tensors, and tensors of another
/// device type, are left alone by every category.
enum class OpCategory : std::uint8_t {
  lower_precision,     ///< floating inputs are cast to the region's dtype
  fp32,                ///< floating inputs are cast to float32
  fp32_set_opt_dtype,  ///< inputs stay; the `dtype` argument becomes float32 unless the caller set
                       ///< it
  fp32_append_dtype,   ///< inputs stay; the overload that takes a `dtype` is called with float32
  promote,             ///< floating inputs are cast to the widest of their dtypes
  banned,              ///< an error: the op overflows in half precision
  fallthrough,         ///< not on a list: runs in whatever dtype its inputs have
  unknown,             ///< a kernel that mezzo could not probe
};

/// "lower_precision", "fp32", ...: the enumerator's own name.
constexpr std::string_view to_string(OpCategory category);

namespace detail {

inline constexpr std::array<std::string_view, 8> kCategoryNames = {
    "lower_precision", "fp32",   "fp32_set_opt_dtype", "fp32_append_dtype",
    "promote",         "banned", "fallthrough",        "unknown"};

/// The device types whose lists can be read and edited, in the order of per-device arrays.
inline constexpr std::array<c10::DeviceType, 2> kPolicyDevices = {c10::DeviceType::CPU,
                                                                  c10::DeviceType::CUDA};

inline constexpr bool is_policy_device(c10::DeviceType device) {
  return device == c10::DeviceType::CPU || device == c10::DeviceType::CUDA;
}

inline std::size_t policy_device_index(c10::DeviceType device) {
  TORCH_CHECK(is_policy_device(device), "device: mezzo knows no op lists for ", device,
              "; use cpu or cuda");
  return device == c10::DeviceType::CPU ? 0 : 1;
}

inline c10::DispatchKey autocast_key(c10::DeviceType device) {
  return policy_device_index(device) == 0 ? c10::DispatchKey::AutocastCPU
                                          : c10::DispatchKey::AutocastCUDA;
}

}  // namespace detail

constexpr std::string_view to_string(OpCategory category) {
  return detail::kCategoryNames[static_cast<std::size_t>(category)];
}

inline std::ostream& operator<<(std::ostream& stream, OpCategory category) {
  return stream << to_string(category);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
