/// \file
/// Gradient clipping that knows the loss scale: torch's `clip_grad_norm_` and `clip_grad_value_`
/// for the gradients of an optimizer under a GradScaler.
#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/gradient_summary.h>
#include <mezzo/kernels/unscale.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/core/Tensor.h>
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
#include <torch/optim/optimizer.h>

#include <limits>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Scales the gradients of `optimizer`, taken as one vector, down to at most `max_norm`, in place,
/// and returns the norm that they had. Calls `scaler.unscale_(optimizer)` first, unless that has
/// been done in this iteration. Call `scaler.step(optimizer)` afterwards. The call
/// `scaler.step(optimizer, {.max_norm = 1.0})` does both in fewer passes.
///
/// Gradients may lie on several devices and have several dtypes. Undefined gradients are left out,
/// sparse ones coalesced (`.grad` is replaced), and those of weights with a float master clipped in
/// float (see `unscale_`). A disabled scaler clips the gradients as they are. The coefficient is
/// min(1, max_norm / (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_, but is not rounded to
/// half, and sums are in double (on CUDA of up to 32 squares added in float, a relative error below
/// 1e-6).
/// \param max_norm   at least 0; infinity only measures
/// \param norm_type  the p of the p-norm, positive; infinity is the largest magnitude
/// \param error_if_nonfinite  throws before clipping if the norm is inf or NaN, as it is whenever
///   the loss overflowed, and waits for the device. `false`: no host sync (except to coalesce
///   sparse gradients); an inf or NaN norm makes gradients of 0 and NaN, which `scaler.step` skips
/// \return a tensor without dimensions on the device of the first gradient: double if a gradient is
///   double, otherwise float; 0 on the CPU if there is no gradient
/// \throws c10::Error as `unscale_` does, after `step`, or if max_norm or norm_type is out of range
at::Tensor clip_grad_norm_(GradScaler& scaler, AnyOptimizer optimizer, double max_norm,
                           double norm_type = 2.0, bool error_if_nonfinite = false);

/// Clamps every element of the gradients of `optimizer` to [-clip_value, clip_value], in place.
/// Calls `scaler.unscale_(optimizer)` first, unless that has been done in this iteration. An inf is
/// clamped like any other value, but unscaling has noted it: `scaler.step` skips. No host sync
/// (except to coalesce sparse gradients). With a disabled scaler gradients are clipped as they are.
/// Source: torch.nn.utils.clip_grad_value_.
/// \throws c10::Error as `unscale_` does, after `step`, or unless clip_value is positive
void clip_grad_value_(GradScaler& scaler, AnyOptimizer optimizer, double clip_value);

namespace detail {

/// The gradients that the step will take, unscaled: one list for each device.
using GradientsByDevice = std::vector<std::vector<at::Tensor>>;

/// Returns the gradients of `optimizer`, unscaled where that has not been done.
inline GradientsByDevice gradients_to_clip(GradScaler& scaler, AnyOptimizer optimizer) {
  if (!scaler.is_unscaled(optimizer)) scaler.unscale_(optimizer);
  const c10::NoGradGuard no_grad;
  return values_by_device(plan_of(optimizer));
}

inline bool has_double(const GradientsByDevice& all) {
  for (const std::vector<at::Tensor>& gradients : all) {
    for (const at::Tensor& gradient : gradients) {
      if (gradient.scalar_type() == at::kDouble) return true;
    }
  }
  return false;
}

/// Returns the norm of gradients of one device, one element there: double, or float on MPS.
inline at::Tensor norm_on_device(const std::vector<at::Tensor>& gradients, double norm_type) {
  const at::Device device = gradients.front().device();
  const auto options = at::TensorOptions().device(device);
  if (norm_type == 2.0) {
    const at::Tensor one = at::ones({}, options.dtype(at::kFloat));
    return summarize_gradients(gradients, one).sum_of_squares.sqrt();
  }
  const at::ScalarType wide = device.is_mps() ? at::kFloat : at::kDouble;
  std::vector<at::Tensor> tensors = gradients;
  std::erase_if(tensors, [](const at::Tensor& tensor) { return tensor.numel() == 0; });
  if (tensors.empty()) return at::zeros({}, options.dtype(wide));
  return at::linalg_vector_norm(foreach_norms(tensors, norm_type, wide), norm_type);
}

/// Returns the norm of all gradients, on the device of the first. The host waits only where the
/// first is on the CPU and others are not.
inline at::Tensor total_norm(const GradientsByDevice& all, double norm_type) {
  const at::Device device = all.front().front().device();
  std::vector<at::Tensor> norms;
  norms.reserve(all.size());
  for (const std::vector<at::Tensor>& gradients : all) {
    norms.push_back(on_device(norm_on_device(gradients, norm_type), device));
  }
  return norms.size() == 1 ? norms.front() : at::linalg_vector_norm(at::stack(norms), norm_type);
}

/// Multiplies each gradient once, in place: gradients of double by `coefficient`, others by the
/// nearest float.
inline void multiply_by(const GradientsByDevice& all, const at::Tensor& coefficient) {
  const at::Tensor as_float = coefficient.to(at::kFloat);
  for (const std::vector<at::Tensor>& gradients : all) {
    check_unscalable(gradients, on_device(as_float, gradients.front().device()));
  }
  for (const std::vector<at::Tensor>& gradients : all) {
    const at::Device device = gradients.front().device();
    std::vector<at::Tensor> doubles, others;
    for (const at::Tensor& gradient : gradients) {
      (gradient.scalar_type() == at::kDouble ? doubles : others).push_back(gradient);
    }
    if (!doubles.empty()) at::_foreach_mul_(each_once(doubles), on_device(coefficient, device));
    const at::Tensor factor = on_device(as_float, device);
    at::Tensor unread = at::zeros_like(factor);
    if (!others.empty()) unscale_and_check_(others, unread, factor);
  }
}

inline void check_norm_arguments(double max_norm, double norm_type) {
  TORCH_CHECK(is_at_least(max_norm, 0), "clip_grad_norm_: max_norm is ", max_norm,
              "; it should be at least 0, and infinite to measure the norm without clipping");
  TORCH_CHECK(is_above(norm_type, 0), "clip_grad_norm_: norm_type is ", norm_type,
              "; it should be positive, and infinite for the largest magnitude");
}

inline void require_finite(const at::Tensor& norm, double norm_type) {
  TORCH_CHECK(
      !nonfinite_bits(norm.item<double>()), "The total norm of order ", norm_type,
      " for gradients from `parameters` is non-finite, so it cannot be clipped. In C++: leave "
      "error_if_nonfinite at false to go on; GradScaler::step then skips this step");
}

/// Clamps each element to [-limit, limit]; NaN stays NaN.
inline void clamp_to(const std::vector<at::Tensor>& gradients, double limit) {
  if (gradients.front().is_cpu()) {  // where there is no foreach kernel, one pass beats two
    for (const at::Tensor& gradient : gradients) gradient.clamp_(-limit, limit);
    return;
  }
  at::_foreach_clamp_min_(gradients, -limit);
  at::_foreach_clamp_max_(gradients, limit);
}

}  // namespace detail

inline at::Tensor clip_grad_norm_(GradScaler& scaler, AnyOptimizer optimizer, double max_norm,
                                  double norm_type, bool error_if_nonfinite) {
  detail::check_norm_arguments(max_norm, norm_type);
  const c10::NoGradGuard no_grad;
  const detail::GradientsByDevice gradients = detail::gradients_to_clip(scaler, optimizer);
  if (gradients.empty()) return at::zeros({}, at::kFloat);
  const at::Tensor norm = detail::total_norm(gradients, norm_type);
  if (error_if_nonfinite) detail::require_finite(norm, norm_type);
  if (max_norm != std::numeric_limits<double>::infinity()) {
    detail::multiply_by(gradients, norm.add(1e-6).reciprocal().mul(max_norm).clamp_max(1.0));
  }
  return detail::has_double(gradients) ? norm : norm.to(at::kFloat);
}

inline void clip_grad_value_(GradScaler& scaler, AnyOptimizer optimizer, double clip_value) {
  TORCH_CHECK(detail::is_above(clip_value, 0), "clip_grad_value_: clip_value is ", clip_value,
              "; it should be positive");
  const c10::NoGradGuard no_grad;
  for (const auto& gradients : detail::gradients_to_clip(scaler, optimizer)) {
    detail::clamp_to(gradients, clip_value);
  }
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
