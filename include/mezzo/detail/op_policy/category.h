/// \file
/// The categories of autocast's op lists and the arithmetic behind them: which dtype the tensors of
/// a call go to.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <mezzo/detail/autocast/libtorch_state.h>
#include <mezzo/version.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

namespace at::autocast {

// As in ATen/autocast_mode.h. Goes through libtorch's cache of weight casts.
TORCH_API Tensor cached_cast(c10::ScalarType to_type, const Tensor& arg,
                             c10::DeviceType device_type);

}  // namespace at::autocast

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
  infer,               ///< not on a list: runs in whatever dtype its inputs have
  unknown,             ///< a kernel that mezzo could not probe
};

/// "lower_precision", "fp32", ...: the enumerator's own name.
constexpr std::string_view to_string(OpCategory category);

namespace detail {

inline constexpr std::array<std::string_view, 8> kCategoryNames = {
    "lower_precision", "fp32",   "fp32_set_opt_dtype", "fp32_append_dtype", "promote", "banned",
    "infer",           "unknown"};

/// The device types whose lists can be read and edited, in the order of per-device arrays.
inline constexpr std::array<c10::DeviceType, 2> kPolicyDevices = {c10::DeviceType::CPU,
                                                                  c10::DeviceType::CUDA};

inline std::size_t policy_device_index(c10::DeviceType device) {
  TORCH_CHECK(device == c10::DeviceType::CPU || device == c10::DeviceType::CUDA,
              "device: mezzo knows no op lists for ", device, "; use cpu or cuda");
  return device == c10::DeviceType::CPU ? 0 : 1;
}

inline c10::DispatchKey autocast_key(c10::DeviceType device) {
  return policy_device_index(device) == 0 ? c10::DispatchKey::AutocastCPU
                                          : c10::DispatchKey::AutocastCUDA;
}

/// Whether autocast on `device` may cast this tensor.
inline bool is_eligible(const at::Tensor& tensor, c10::DeviceType device) {
  if (!tensor.defined() || !tensor.is_floating_point() || tensor.scalar_type() == at::kDouble) {
    return false;
  }
  return device == c10::DeviceType::CPU ? tensor.is_cpu() || tensor.is_mkldnn()
                                        : tensor.is_cuda() || tensor.is_xla();
}

/// The dtype that holds every value of both; half and bfloat16 meet in float32.
inline at::ScalarType wider(at::ScalarType a, at::ScalarType b) {
  return a == b ? a : at::ScalarType::Float;
}

}  // namespace detail

constexpr std::string_view to_string(OpCategory category) {
  return detail::kCategoryNames[static_cast<std::size_t>(category)];
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
