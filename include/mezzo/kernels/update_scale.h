#pragma once

#include <mezzo/base/grad_scaler_options.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/kernel_dispatch.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/reciprocal.h>
#include <c10/macros/Macros.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <limits>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// State of a loss scale on a device, as tensors of one element.
struct ScaleTensors {
  at::Tensor scale;               ///< float32
  at::Tensor inv_scale;           ///< float32: compute_inv_scale(scale)
  at::Tensor growth_tracker;      ///< int32
  at::Tensor hysteresis_tracker;  ///< int32
};

/// Returns 1 / scale, correctly rounded, as torch.amp and at::reciprocal do. Computed in double: no
/// compiler flag makes its division approximate, and its 53 bits of precision (at least 2 * 24 + 2)
/// make the double rounding innocuous.
C10_HOST_DEVICE inline float compute_inv_scale(float scale) {
  return static_cast<float>(1.0 / static_cast<double>(scale));
}

/// \throws c10::Error if ATen's kernel updates the scale on `device` and lacks an option
inline void check_scale_update_supported(const GradScalerOptions& options, at::Device device) {
  TORCH_CHECK(options.hysteresis == 1 || options.mode != LossScaleMode::dynamic ||
                  kernel_backend(device) != KernelBackend::aten,
              "hysteresis is ", options.hysteresis, ", but ATen's kernel for ", device.type(),
              " supports 1 only; link the CMake target mezzo::cuda, or set hysteresis to 1");
}

inline void update_scale_cpu_(const GradScalerOptions& options, const ScaleTensors& tensors,
                              const at::Tensor& found_inf) {
  auto* scale_value = tensors.scale.mutable_data_ptr<float>();
  auto* tracker_value = tensors.growth_tracker.mutable_data_ptr<int32_t>();
  auto* hysteresis_value = tensors.hysteresis_tracker.mutable_data_ptr<int32_t>();
  const LossScaleState next = options.next({*scale_value, *tracker_value, *hysteresis_value},
                                           *found_inf.const_data_ptr<float>() != 0.0F);
  *scale_value = next.scale;
  *tensors.inv_scale.mutable_data_ptr<float>() = compute_inv_scale(next.scale);
  *tracker_value = next.growth_tracker;
  *hysteresis_value = next.hysteresis_tracker;
  // An autograd graph may have saved the scale.
  tensors.scale.unsafeGetTensorImpl()->bump_version();
}

inline void update_scale_aten_(const GradScalerOptions& options, ScaleTensors tensors,
                               const at::Tensor& found_inf) {
  const at::Tensor highest = tensors.scale.clamp_min(kMaxGrownScale);
  at::_amp_update_scale_(tensors.scale, tensors.growth_tracker, found_inf, options.growth_factor,
                         options.backoff_factor, options.growth_interval);
  at::minimum_out(tensors.scale, tensors.scale, highest);
  const bool is_bounded =
      options.min_scale > 0 || options.max_scale < std::numeric_limits<double>::infinity();
  if (is_bounded) tensors.scale.clamp_(options.min_scale, options.max_scale);
  at::reciprocal_out(tensors.inv_scale, tensors.scale);
}

/// Updates the state in place by GradScalerOptions::next; one launch with mezzo's CUDA kernels. All
/// tensors have one element and are on one device. `found_inf` is float32, not 0 after an inf or
/// NaN.
inline void update_scale_(const GradScalerOptions& options, const ScaleTensors& tensors,
                          const at::Tensor& found_inf) {
  if (options.mode != LossScaleMode::dynamic) return;
  switch (kernel_backend(tensors.scale.device())) {
    case KernelBackend::cuda:
      return cuda_kernels()->update_scale_(options, tensors, found_inf);
    case KernelBackend::cpu:
      return update_scale_cpu_(options, tensors, found_inf);
    case KernelBackend::aten:
      return update_scale_aten_(options, tensors, found_inf);
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
