/// \file
/// Which tensors autocast may cast, and the cast that it uses.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <mezzo/base/version.h>

namespace at::autocast {

// As in ATen/autocast_mode.h. Goes through libtorch's cache of weight casts.
TORCH_API Tensor cached_cast(c10::ScalarType to_type, const Tensor& arg,
                             c10::DeviceType device_type);

}  // namespace at::autocast

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

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
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
