/// \file
/// What one read of gradients says about a step.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Copies `value` to `device`. The host waits only for a device that has to tell the CPU.
inline at::Tensor on_device(const at::Tensor& value, at::Device device) {
  if (value.device() == device) return value;
  return value.to(device, value.scalar_type(), /*non_blocking=*/!device.is_cpu());
}

}  // namespace detail

/// Four numbers that decide a step, as tensors of one element on one device. A fused optimizer of
/// your own has to understand these, as torch's understand `grad_scale` and `found_inf`.
///
/// An empty verdict, `Verdict{}`, means: take the gradients as they are, and step.
struct Verdict {
  at::Tensor inv_scale{};       ///< float: a step multiplies gradients by it before all else
  at::Tensor found_inf{};       ///< float: unless it is 0, a step leaves everything as it is
  at::Tensor sum_of_squares{};  ///< double, of gradients * inv_scale; undefined: nothing is clipped
  at::Tensor max_abs{};         ///< double, of gradients * inv_scale; NaN if one of them is NaN

  bool defined() const noexcept { return inv_scale.defined(); }

  /// Returns the same numbers on `device`. Waits only for a device that has to tell the CPU.
  Verdict on(at::Device device) const {
    if (!defined() || inv_scale.device() == device) return *this;
    const auto moved = [device](const at::Tensor& value) {
      return value.defined() ? detail::on_device(value, device) : value;
    };
    return {moved(inv_scale), moved(found_inf), moved(sum_of_squares), moved(max_abs)};
  }
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
