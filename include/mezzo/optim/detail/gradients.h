#pragma once

#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/gradient_passes.h>
#include <mezzo/optim/detail/optimizer_words.h>
#include <mezzo/optim/step_plan.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/maximum.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

// The gradients of any optimizer, and how to read them.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Calls `visit(group number, parameter)` for all parameters of `optimizer`, in order.
template <class Visit>
void for_each_parameter(const torch::optim::Optimizer& optimizer, const Visit& visit) {
  std::size_t number = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) visit(number, parameter);
    ++number;
  }
}

inline void zero_gradients(const torch::optim::Optimizer& optimizer) {
  for_each_parameter(optimizer, [](std::size_t, const at::Tensor& parameter) {
    if (parameter.grad().defined()) clear_gradient(parameter.grad());
  });
}

/// \throws c10::Error, naming the parameter, unless its gradient can be unscaled
inline void check_gradient(const at::Tensor& parameter, const OptimizerWords& words) {
  const at::Tensor& gradient = parameter.grad();
  const at::ScalarType dtype = gradient.scalar_type();
  const auto check = [&](bool is_right, const char* remedy) {
    TORCH_CHECK(is_right, "GradScaler: the gradient of ", words.parameter(parameter), " is ",
                tensor_words(gradient), "; ", remedy);
  };
  check(dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf,
        "it should be of float32, float64, bfloat16 or float16");
  check(gradient.device() == parameter.device(),
        "it should be on the parameter's device: move it there");
  check(gradient.is_sparse() || gradient.layout() == at::kStrided,
        "make it dense, or sparse in COO layout");
}

/// Returns the dense tensor that holds `parameter`'s gradient values. A sparse gradient is
/// coalesced first: two finite entries of one place can add up to an inf.
inline at::Tensor gradient_values(const at::Tensor& parameter) {
  at::Tensor gradient = parameter.grad();
  if (!gradient.is_sparse()) return gradient;
  if (!gradient.is_coalesced()) {
    gradient = gradient.coalesce();
    parameter.mutable_grad() = gradient;
  }
  return gradient._values();
}

/// Puts rows of one device together, in the order in which the devices come up.
inline void group_by_device(StepPlan& plan) {
  auto begin = plan.rows.begin();
  while (begin != plan.rows.end()) {
    const at::Device device = begin->parameter->device();
    begin = std::stable_partition(begin, plan.rows.end(), [device](const StepPlan::Row& row) {
      return row.parameter->device() == device;
    });
  }
}

/// Returns the plan of an optimizer that is not mezzo's, or of a MasterWeights: parameters with a
/// gradient, each once.
/// \throws c10::Error as check_gradient does
inline StepPlan plain_plan(const torch::optim::Optimizer& optimizer, bool keeps_masters = false) {
  StepPlan plan;
  std::unordered_set<const c10::TensorImpl*> known;
  for_each_parameter(optimizer, [&](std::size_t group, const at::Tensor& parameter) {
    if (!parameter.grad().defined()) return;
    if (!known.insert(parameter.unsafeGetTensorImpl()).second) return;
    check_gradient(parameter, {"", optimizer.param_groups()});
    const bool has_master = keeps_masters && is_low_precision(parameter);
    StepPlan::Row row{{}, &parameter, parameter.grad()};
    row.group = static_cast<std::uint32_t>(group);
    row.number = static_cast<std::uint32_t>(plan.rows.size());
    if (has_master) row.storage = optim::WeightStorage::master;
    plan.rows.push_back(std::move(row));
    plan.has_bare_half =
        plan.has_bare_half || (!has_master && parameter.grad().scalar_type() == at::kHalf);
  });
  group_by_device(plan);
  return plan;
}

/// Returns the dense values of a row's gradient.
inline at::Tensor values_of(const StepPlan& plan, const StepPlan::Row& row) {
  return plan.is_checked ? row.gradient : gradient_values(*row.parameter);
}

/// Returns the dense values of a plan's gradients, device by device.
inline std::vector<std::vector<at::Tensor>> values_by_device(const StepPlan& plan) {
  std::vector<std::vector<at::Tensor>> devices;
  for (const StepPlan::Row& row : plan.rows) {
    const bool is_new = devices.empty() || devices.back().front().device() != row.gradient.device();
    if (is_new) devices.emplace_back();
    devices.back().push_back(values_of(plan, row));
  }
  return devices;
}

/// Adds another device's verdict to `total`, on the device of `total`.
inline void join(Verdict& total, const Verdict& more) {
  const at::Device device = total.inv_scale.device();
  total.found_inf = total.found_inf.add(on_device(more.found_inf, device));
  total.sum_of_squares = total.sum_of_squares.add(on_device(more.sum_of_squares, device));
  total.max_abs = at::maximum(total.max_abs, on_device(more.max_abs, device));
}

/// Returns what the gradients are to be multiplied with; none if the step is skipped. Waits for the
/// verdict's device.
inline std::optional<GradMultipliers> grad_multipliers(const Verdict& verdict, double max_norm) {
  if (!verdict.defined()) return GradMultipliers{};
  if (verdict.found_inf.item<float>() != 0.0F) return std::nullopt;
  const bool clips = verdict.sum_of_squares.defined();
  return grad_multipliers(
      verdict.inv_scale.item<double>(),
      clips ? clip_coefficient(verdict.sum_of_squares.item<double>(), max_norm) : 1.0);
}

/// Reads the gradients of all rows; see FusedOptimizer::read.
inline Verdict read_gradients(const StepPlan& plan, const at::Tensor& inv_scale) {
  if (plan.rows.empty()) return summarize_gradients({}, inv_scale);
  Verdict all;
  for (const std::vector<at::Tensor>& gradients : values_by_device(plan)) {
    const at::Device device = gradients.front().device();
    const Verdict one = summarize_gradients(gradients, on_device(inv_scale, device));
    if (all.defined()) {
      join(all, one);
    } else {
      all = one;
    }
  }
  return all;
}

}  // namespace detail

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
