#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/kernels/gradient_summary.h>
#include <mezzo/kernels/unscale.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/scaling/clip_grad.h>
#include <mezzo/scaling/detail/device_copies.h>

#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <limits>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// What clipping reads and multiplies: the gradients that the step will take, unscaled.
inline std::vector<DeviceGradients> gradients_to_clip(GradScaler& scaler,
                                                      torch::optim::Optimizer& optimizer) {
  const std::vector<at::Tensor> parameters = scaler.unscaled_parameters(optimizer);
  const c10::NoGradGuard no_grad;
  return gradients_by_device(parameters);
}

inline bool has_double(const std::vector<DeviceGradients>& all) {
  for (const auto& [device, gradients] : all) {
    for (const at::Tensor& gradient : gradients) {
      if (gradient.scalar_type() == at::kDouble) return true;
    }
  }
  return false;
}

/// The norm of all gradients of one device; double, where the device has it.
inline at::Tensor norm_on_device(const DeviceGradients& gradients, double norm_type) {
  const auto on_device = at::TensorOptions().device(gradients.device);
  if (norm_type == 2.0) {
    const at::Tensor one = at::ones({}, on_device.dtype(at::kFloat));
    return summarize_gradients(gradients.tensors, one).sum_of_squares.sqrt();
  }
  const at::ScalarType wide = gradients.device.is_mps() ? at::kFloat : at::kDouble;
  std::vector<at::Tensor> tensors = gradients.tensors;
  std::erase_if(tensors, [](const at::Tensor& tensor) { return tensor.numel() == 0; });
  if (tensors.empty()) return at::zeros({}, on_device.dtype(wide));
  return at::linalg_vector_norm(foreach_norms(std::move(tensors), norm_type, wide), norm_type);
}

/// The norm of all, on the first device. Does not wait, unless for a device to tell the CPU.
inline at::Tensor total_norm(const std::vector<DeviceGradients>& all, double norm_type) {
  const at::Device device = all.front().device;
  std::vector<at::Tensor> norms;
  for (const DeviceGradients& gradients : all) {
    const at::Tensor norm = norm_on_device(gradients, norm_type);
    norms.push_back(norm.to(device, norm.scalar_type(), /*non_blocking=*/!device.is_cpu()));
  }
  return norms.size() == 1 ? norms.front() : at::linalg_vector_norm(at::stack(norms), norm_type);
}

/// Multiplies each gradient once, in place: doubles by the coefficient as it is, others by the
/// nearest float.
inline void multiply_by(const std::vector<DeviceGradients>& all, const at::Tensor& coefficient) {
  DeviceCopies coefficients(coefficient), floats(coefficient.to(at::kFloat));
  for (const auto& [device, gradients] : all) check_unscalable(gradients, floats.on(device));
  for (const auto& [device, gradients] : all) {
    std::vector<at::Tensor> doubles, others;
    for (const at::Tensor& gradient : gradients) {
      (gradient.scalar_type() == at::kDouble ? doubles : others).push_back(gradient);
    }
    if (!doubles.empty()) at::_foreach_mul_(each_once(doubles), coefficients.on(device));
    at::Tensor unread = at::zeros_like(floats.on(device));
    if (!others.empty()) unscale_and_check_(others, unread, floats.on(device));
  }
}

inline void check_norm_arguments(double max_norm, double norm_type) {
  TORCH_CHECK(max_norm >= 0, "max_norm is ", max_norm,
              "; it should be at least 0, and infinite to measure the norm without clipping");
  TORCH_CHECK(norm_type > 0, "norm_type is ", norm_type,
              "; it should be positive, and infinite for the largest magnitude");
}

inline void require_finite(const at::Tensor& norm, double norm_type) {
  TORCH_CHECK(!nonfinite_bits(norm.item<double>()), "The total norm of order ", norm_type,
              " for gradients from `parameters` is non-finite, so it cannot be clipped. Leave "
              "error_if_nonfinite at false to go on; GradScaler::step then skips this step");
}

/// Each element into [-limit, limit]; NaN stays NaN.
inline void clamp_to(const DeviceGradients& gradients, double limit) {
  if (gradients.device.is_cpu()) {  // where there is no foreach kernel, one pass beats two
    for (at::Tensor gradient : gradients.tensors) gradient.clamp_(-limit, limit);
    return;
  }
  at::_foreach_clamp_min_(gradients.tensors, -limit);
  at::_foreach_clamp_max_(gradients.tensors, limit);
}

}  // namespace detail

inline at::Tensor clip_grad_norm_(GradScaler& scaler, torch::optim::Optimizer& optimizer,
                                  double max_norm, double norm_type, bool error_if_nonfinite) {
  detail::check_norm_arguments(max_norm, norm_type);
  const c10::NoGradGuard no_grad;
  const std::vector<detail::DeviceGradients> gradients =
      detail::gradients_to_clip(scaler, optimizer);
  if (gradients.empty()) return at::zeros({}, at::kFloat);
  const at::Tensor norm = detail::total_norm(gradients, norm_type);
  if (error_if_nonfinite) detail::require_finite(norm, norm_type);
  if (max_norm != std::numeric_limits<double>::infinity()) {
    detail::multiply_by(gradients, norm.add(1e-6).reciprocal().mul(max_norm).clamp_max(1.0));
  }
  return detail::has_double(gradients) ? norm : norm.to(at::kFloat);
}

inline void clip_grad_value_(GradScaler& scaler, torch::optim::Optimizer& optimizer,
                             double clip_value) {
  TORCH_CHECK(clip_value > 0, "clip_value is ", clip_value, "; it should be positive");
  const c10::NoGradGuard no_grad;
  for (const detail::DeviceGradients& gradients : detail::gradients_to_clip(scaler, optimizer)) {
    detail::clamp_to(gradients, clip_value);
  }
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
