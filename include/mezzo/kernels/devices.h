/// \file
/// Verdict: the result of one read of gradients, which decides about a step.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Copies `value` to `device`. The host waits only if `value` is on a device and `device` is the
/// CPU.
inline at::Tensor on_device(const at::Tensor& value, at::Device device) {
  if (value.device() == device) return value;
  return value.to(device, value.scalar_type(), /*non_blocking=*/!device.is_cpu());
}

}  // namespace detail

/// Four numbers that decide a step, as tensors of one element on one device. Your own fused
/// optimizer must apply them, as torch's apply `grad_scale` and `found_inf`.
///
/// An empty verdict, `Verdict{}`, means: take the gradients as they are, and step.
struct Verdict {
  at::Tensor inv_scale{};       ///< float: a step multiplies gradients by it before all else
  at::Tensor found_inf{};       ///< float: if it is not 0, a step changes nothing
  at::Tensor sum_of_squares{};  ///< double, of gradients * inv_scale; undefined: nothing is clipped
  at::Tensor max_abs{};         ///< double, of gradients * inv_scale; NaN if one of them is NaN

  bool defined() const noexcept { return inv_scale.defined(); }

  /// Returns the numbers on `device`. The host waits only for copies from a device to the CPU.
  Verdict on(at::Device device) const {
    if (!defined() || inv_scale.device() == device) return *this;
    const auto moved = [device](const at::Tensor& value) {
      return value.defined() ? detail::on_device(value, device) : value;
    };
    return {moved(inv_scale), moved(found_inf), moved(sum_of_squares), moved(max_abs)};
  }
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
