/// \file
/// Which tensors autocast may cast.
#pragma once

#include <mezzo/autocast/detail/in_force.h>
#include <mezzo/base/detail/libtorch_autocast.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <optional>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Whether autocast on `device` may cast this tensor.
inline bool is_eligible(const at::Tensor& tensor, c10::DeviceType device) {
  if (!tensor.defined() || !tensor.is_floating_point() || tensor.scalar_type() == at::kDouble) {
    return false;
  }
  if (device == c10::DeviceType::CUDA) return tensor.is_cuda() || tensor.is_xla();
  return tensor.device().type() == device;
}

/// The device whose autocast, enabled in this thread, may cast this tensor, if there is one.
inline std::optional<c10::DeviceType> casting_device(const at::Tensor& tensor) {
  for (const auto device : kPolicyDevices) {
    if (is_eligible(tensor, device) && at::autocast::is_autocast_enabled(device)) {
      return device;
    }
  }
  return std::nullopt;
}

/// The dtype that holds every value of both; half and bfloat16 meet in float32.
inline at::ScalarType wider(at::ScalarType a, at::ScalarType b) {
  return a == b ? a : at::ScalarType::Float;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
