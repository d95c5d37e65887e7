/// \file
/// GradStats: the result of one read of gradients, which decides about a step.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Copies `value` to `device`. The host waits only if `value` is on a device and `device` is the
/// CPU.
inline at::Tensor to_device(const at::Tensor& value, at::Device device) {
  if (value.device() == device) return value;
  return value.to(device, value.scalar_type(), /*non_blocking=*/!device.is_cpu());
}

}  // namespace detail

/// Four numbers that decide a step, as tensors of one element on one device. Your own fused
/// optimizer must apply them, as torch's apply `grad_scale` and `found_inf`.
///
/// An empty stats, `GradStats{}`, means: take the gradients as they are, and step.
struct GradStats {
  at::Tensor inv_scale{};  ///< float: a step multiplies gradients by it before all else
  at::Tensor found_inf{};  ///< float: if it is not 0, a step changes nothing
  at::Tensor norm_sq{};    ///< double, of gradients * inv_scale; undefined: nothing is clipped
  at::Tensor max_abs{};    ///< double, of gradients * inv_scale; NaN if one of them is NaN

  bool defined() const noexcept { return inv_scale.defined(); }

  /// Returns the numbers on `device`. The host waits only for copies from a device to the CPU.
  GradStats to(at::Device device) const {
    if (!defined() || inv_scale.device() == device) return *this;
    const auto moved = [device](const at::Tensor& value) {
      return value.defined() ? detail::to_device(value, device) : value;
    };
    return {moved(inv_scale), moved(found_inf), moved(norm_sq), moved(max_abs)};
  }
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
