#pragma once

#include <mezzo/base/detail/describe.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/compute_grad_stats.h>
#include <mezzo/kernels/unscale.h>
#include <mezzo/optim/detail/optimizer_description.h>
#include <mezzo/optim/step_plan.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <unordered_set>
#include <utility>
#include <vector>

// Gradients of any optimizer: step plan, statistics, clipping.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Calls `visit(parameter)` for all parameters of `optimizer`, in order.
template <class Visit>
void for_each_parameter(const torch::optim::Optimizer& optimizer, const Visit& visit) {
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) visit(parameter);
  }
}

inline void zero_gradients(const torch::optim::Optimizer& optimizer) {
  for_each_parameter(optimizer, [](const at::Tensor& parameter) {
    if (parameter.grad().defined()) zero_grad_(parameter.grad());
  });
}

/// \throws c10::Error, naming the parameter, unless its gradient can be unscaled
inline void check_unscale_supported(const at::Tensor& parameter,
                                    const OptimizerDescription& description) {
  const at::Tensor& gradient = parameter.grad();
  const at::ScalarType dtype = gradient.scalar_type();
  const auto check = [&](bool is_valid, const char* remedy) {
    TORCH_CHECK(is_valid, "GradScaler: the gradient of ", description.describe_param(parameter),
                " is ", describe(gradient), "; ", remedy);
  };
  check(dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf,
        "it should be of float32, float64, bfloat16 or float16");
  check(gradient.device() == parameter.device(),
        "it should be on the parameter's device: move it there");
  check(gradient.is_sparse() || gradient.layout() == at::kStrided,
        "make it dense, or sparse in COO layout");
}

/// Returns the values of `parameter`'s gradient as a dense tensor. Coalesces a sparse gradient,
/// since finite duplicate entries can add up to inf.
inline at::Tensor gradient_values(const at::Tensor& parameter) {
  at::Tensor gradient = parameter.grad();
  if (!gradient.is_sparse()) return gradient;
  if (!gradient.is_coalesced()) {
    gradient = gradient.coalesce();
    parameter.mutable_grad() = gradient;
  }
  return gradient._values();
}

/// Groups parameters by device, in the order of each device's first parameter.
inline void group_by_device(StepPlan& plan) {
  auto begin = plan.params.begin();
  while (begin != plan.params.end()) {
    const at::Device device = begin->parameter->device();
    begin = std::stable_partition(begin, plan.params.end(), [device](const StepPlan::Param& param) {
      return param.parameter->device() == device;
    });
  }
}

/// Returns the plan of a torch::optim optimizer, also one that MasterWeights wraps: each parameter
/// with a gradient once.
/// \throws c10::Error as check_unscale_supported does
inline StepPlan make_torch_plan(const torch::optim::Optimizer& optimizer,
                                bool has_masters = false) {
  StepPlan plan;
  std::unordered_set<const c10::TensorImpl*> seen;
  for_each_parameter(optimizer, [&](const at::Tensor& parameter) {
    if (!parameter.mutable_grad().defined()) return;  // faster than grad()
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) return;
    check_unscale_supported(parameter, {"", optimizer.param_groups()});
    const bool has_master = has_masters && is_low_precision(parameter);
    StepPlan::Param param{{}, &parameter, parameter.grad()};
    if (has_master) param.storage = optim::WeightStorage::fp32_master;
    plan.params.push_back(std::move(param));
    plan.has_fp16_without_master = plan.has_fp16_without_master ||
                                   (!has_master && parameter.grad().scalar_type() == at::kHalf);
  });
  group_by_device(plan);
  return plan;
}

/// Returns the values of a plan's gradients as dense tensors.
inline std::vector<at::Tensor> dense_gradients(const StepPlan& plan) {
  std::vector<at::Tensor> gradients;
  gradients.reserve(plan.params.size());
  for (const StepPlan::Param& param : plan.params) {
    gradients.push_back(plan.has_dense_gradients ? param.gradient
                                                 : gradient_values(*param.parameter));
  }
  return gradients;
}

/// Calls `visit(span)` for each run of consecutive tensors on one device.
template <class Visit>
void for_each_device(std::span<const at::Tensor> tensors, const Visit& visit) {
  while (!tensors.empty()) {
    const auto is_on_other_device = [device = tensors.front().device()](const at::Tensor& tensor) {
      return tensor.device() != device;
    };
    const auto end = std::ranges::find_if(tensors, is_on_other_device);
    const auto count = static_cast<std::size_t>(end - tensors.begin());
    visit(tensors.first(count));
    tensors = tensors.subspan(count);
  }
}

/// Merges another device's statistics into `sum`, on the device of `sum`.
inline void merge(GradStats& sum, const GradStats& other) {
  const at::Device device = sum.inv_scale.device();
  sum.found_inf = sum.found_inf.add(to_device(other.found_inf, device));
  sum.norm_sq = sum.norm_sq.add(to_device(other.norm_sq, device));
  sum.max_abs = at::maximum(sum.max_abs, to_device(other.max_abs, device));
}

/// Returns the multipliers of the gradients (unscale and clip); nullopt if the step is skipped.
/// Synchronizes with the device of `stats`.
inline std::optional<GradMultipliers> grad_multipliers(const GradStats& stats, double max_norm) {
  if (!stats.defined()) return GradMultipliers{};
  if (stats.found_inf.item<float>() != 0.0F) return std::nullopt;
  const bool has_norm = stats.norm_sq.defined();
  return grad_multipliers(
      stats.inv_scale.item<double>(),
      has_norm ? clip_coefficient(stats.norm_sq.item<double>(), max_norm) : 1.0);
}

/// Returns statistics of dense gradients over all devices; see MixedPrecisionOptimizer::grad_stats.
/// Gradients of one device should be consecutive.
inline GradStats compute_grad_stats_across_devices(std::span<const at::Tensor> gradients,
                                                   const at::Tensor& inv_scale) {
  if (gradients.empty()) return compute_grad_stats({}, inv_scale);
  GradStats all;
  for_each_device(gradients, [&](std::span<const at::Tensor> device_gradients) {
    const GradStats local =
        compute_grad_stats(at::TensorList(device_gradients.data(), device_gradients.size()),
                           to_device(inv_scale, device_gradients.front().device()));
    if (all.defined()) {
      merge(all, local);
    } else {
      all = local;
    }
  });
  return all;
}

/// Returns whether any gradient has an inf or NaN. Synchronizes with the host.
/// \param gradients  dense or sparse, on any devices; undefined ones are ignored
inline bool any_nonfinite(std::span<const at::Tensor> gradients) {
  std::vector<at::Tensor> values;
  for (const at::Tensor& gradient : gradients) {
    if (!gradient.defined()) continue;
    values.push_back(gradient.is_sparse() ? gradient.coalesce()._values() : gradient);
  }
  return compute_grad_stats_across_devices(values, at::ones({})).found_inf.item<float>() != 0.0F;
}

/// Clips unscaled gradients with 2-norm `norm` in place to `max_norm`, as `clip_grad_norm_`:
/// float64 gradients by a float64 coefficient, others by a float32 one.
inline void clip_in_place(std::span<const at::Tensor> gradients, double norm, double max_norm) {
  const double coefficient = max_norm / (norm + 1e-6);
  if (coefficient >= 1) return;  // false for NaN, which spreads as in torch's clipping
  for_each_device(gradients, [&](std::span<const at::Tensor> device_gradients) {
    std::vector<at::Tensor> others;
    for (const at::Tensor& gradient :
         unique_tensors({device_gradients.begin(), device_gradients.end()})) {
      if (gradient.scalar_type() != at::kDouble) {
        others.push_back(gradient);
      } else {
        gradient.mul_(coefficient);
      }
    }
    at::Tensor found_inf = at::zeros({}, device_gradients.front().options().dtype(at::kFloat));
    if (!others.empty())
      unscale_and_check_(others, found_inf, at::full_like(found_inf, coefficient));
  });
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
