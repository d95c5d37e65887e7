/// \file
/// GradStats: the statistics of gradients from which a step is decided.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Copies `value` to `device`. Synchronizes with the host only for a copy from a device to the CPU.
inline at::Tensor to_device(const at::Tensor& value, at::Device device) {
  if (value.device() == device) return value;
  return value.to(device, value.scalar_type(), /*non_blocking=*/!device.is_cpu());
}

}  // namespace detail

/// Statistics of gradients as tensors of one element on one device. A MixedPrecisionOptimizer of
/// your own must apply them, as torch's fused optimizers apply `grad_scale` and `found_inf`.
/// `GradStats{}` means unscaled gradients: the step multiplies and checks nothing.
struct GradStats {
  at::Tensor inv_scale{};  ///< float32: the step multiplies gradients by it first
  at::Tensor found_inf{};  ///< float32: if not 0, the step is skipped
  at::Tensor norm_sq{};    ///< float64, of gradients * inv_scale; undefined: no clipping
  at::Tensor max_abs{};    ///< float64, of gradients * inv_scale; NaN if one is NaN

  bool defined() const noexcept { return inv_scale.defined(); }

  /// Returns the statistics on `device`. Synchronizes with the host only for copies to the CPU.
  GradStats to(at::Device device) const {
    if (!defined() || inv_scale.device() == device) return *this;
    const auto move = [device](const at::Tensor& value) {
      return value.defined() ? detail::to_device(value, device) : value;
    };
    return {move(inv_scale), move(found_inf), move(norm_sq), move(max_abs)};
  }
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
