#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/gradient_summary.h>
#include <mezzo/kernels/step_use.h>
#include <mezzo/kernels/unscale.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/detail/rank_sum.h>
#include <mezzo/optim/fused_optimizer.h>
#include <mezzo/optim/step_result.h>
#include <mezzo/scaling/detail/async_readback.h>
#include <mezzo/scaling/detail/clip_watch.h>
#include <mezzo/scaling/detail/device_copies.h>
#include <mezzo/scaling/detail/master_gradients.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline void check_step_options(const StepOptions& options) {
  TORCH_CHECK(options.max_norm > 0, "max_norm is ", options.max_norm,
              "; it should be positive, and infinite for no clipping");
}

inline bool clips(const StepOptions& options) {
  return options.max_norm != std::numeric_limits<double>::infinity();
}

/// What is known of the gradients on one device, in tensors of one element there.
struct DeviceSummary {
  std::vector<at::Tensor> gradients;
  at::Tensor inv_scale;  ///< times rank_factor
  at::Tensor found_inf;
  at::Tensor sum_of_squares;
  at::Tensor max_abs;
  double rank_factor = 1.0;  ///< of gradients that are sums over ranks; on all devices the same
};

/// What was multiplied into the gradients on all devices beside the loss scale's inverse.
inline double rank_factor_of(const std::vector<DeviceSummary>& summaries) {
  return summaries.empty() ? 1.0 : summaries.front().rank_factor;
}

/// Gradients that are sums over ranks are divided by the factor that takes the scale off.
inline at::Tensor times_rank_factor(const at::Tensor& inv_scale, double rank_factor) {
  return rank_factor == 1.0 ? inv_scale : inv_scale.mul(rank_factor);
}

/// One read of the gradients that `optimizer`'s step takes, device by device. Those of `masters`
/// lie in no bucket.
inline std::vector<DeviceSummary> summarize(torch::optim::Optimizer& optimizer,
                                            const MasterGradients& masters, bool allow_fp16,
                                            DeviceCopies& inv_scale) {
  auto* const fused = masters.empty() ? dynamic_cast<optim::FusedOptimizer*>(&optimizer) : nullptr;
  const std::vector<at::Tensor> holders =
      masters.empty() ? with_gradient(optimizer, allow_fp16) : masters.holders(optimizer);
  const double rank_factor = rank_sum_factor(holders);
  std::vector<DeviceSummary> summaries;
  for (auto& [device, gradients] : gradients_by_device(holders)) {
    const at::Tensor inverse = times_rank_factor(inv_scale.on(device), rank_factor);
    const GradientSummary summary = fused != nullptr ? fused->summarize(gradients, inverse)
                                                     : summarize_gradients(gradients, inverse);
    summaries.push_back({std::move(gradients), inverse, summary.found_inf, summary.sum_of_squares,
                         summary.max_abs, rank_factor});
  }
  return summaries;
}

/// Adds a check to those of an iteration, one a device.
inline void add_check(std::vector<at::Tensor>& checks, const at::Tensor& found_inf) {
  for (at::Tensor& check : checks) {
    if (check.device() != found_inf.device()) continue;
    check = check.add(found_inf);
    return;
  }
  checks.push_back(found_inf);
}

/// The sum of one-element tensors of several devices, on one. Does not wait, unless for a device
/// to tell the CPU.
inline at::Tensor sum_on(at::Device device, const std::vector<at::Tensor>& values) {
  const auto moved = [&](const at::Tensor& value) {
    return value.to(device, value.scalar_type(), /*non_blocking=*/!device.is_cpu());
  };
  at::Tensor sum = moved(values.front());
  for (std::size_t i = 1; i < values.size(); ++i) sum = sum.add(moved(values[i]));
  return sum;
}

/// The largest magnitude of all devices, on one. Waits as `sum_on` does.
inline at::Tensor max_abs_on(at::Device device, const std::vector<DeviceSummary>& summaries) {
  at::Tensor largest;
  for (const DeviceSummary& summary : summaries) {
    const at::Tensor moved = summary.max_abs.to(device, summary.max_abs.scalar_type(),
                                                /*non_blocking=*/!device.is_cpu());
    largest = largest.defined() ? at::maximum(largest, moved) : moved;
  }
  return largest;
}

/// `found_inf` where none of `elsewhere` is set, and 0 otherwise.
inline at::Tensor beyond(const std::vector<at::Tensor>& elsewhere, const at::Tensor& found_inf) {
  if (elsewhere.empty()) return found_inf;
  return found_inf.mul(sum_on(found_inf.device(), elsewhere).eq(0.0));
}

/// Makes every summary speak for all devices: an inf on one holds for all (`checks` is one a
/// device, and may know of more devices), and the norm is that of all.
inline void combine(std::vector<DeviceSummary>& summaries, const std::vector<at::Tensor>& checks) {
  std::vector<at::Tensor> sums;
  for (const DeviceSummary& summary : summaries) sums.push_back(summary.sum_of_squares);
  for (DeviceSummary& summary : summaries) {
    const at::Device device = summary.inv_scale.device();
    summary.found_inf = sum_on(device, checks);
    summary.sum_of_squares = sum_on(device, sums);
  }
}

inline std::vector<optim::DeviceVerdict> verdicts_of(const std::vector<DeviceSummary>& summaries) {
  std::vector<optim::DeviceVerdict> verdicts;
  for (const DeviceSummary& summary : summaries) {
    verdicts.push_back({summary.inv_scale, summary.found_inf, summary.sum_of_squares});
  }
  return verdicts;
}

/// What a step is to know on the host. The one place where it waits; all comes over together.
struct HostSummary {
  float scale = 1.0F;
  bool found_inf = false;
  double sum_of_squares = std::numeric_limits<double>::quiet_NaN();
  double max_abs = std::numeric_limits<double>::quiet_NaN();
  bool has_sum = false;

  HostSummary(const at::Tensor& scale_in, const std::vector<at::Tensor>& checks,
              const std::vector<DeviceSummary>& summaries)
      : has_sum(!summaries.empty()) {
    const at::Device device = scale_in.device();
    const auto wide = device.is_mps() ? at::kFloat : at::kDouble;
    std::vector<at::Tensor> values{scale_in.to(wide), sum_on(device, checks).to(wide)};
    if (has_sum) values.push_back(summaries.front().sum_of_squares.to(device, wide));
    if (has_sum) values.push_back(max_abs_on(device, summaries).to(wide));
    const at::Tensor on_host = at::stack(values).to(at::kCPU, at::kDouble);
    const double* value = on_host.const_data_ptr<double>();
    scale = static_cast<float>(value[0]);
    found_inf = value[1] != 0.0;
    if (has_sum) sum_of_squares = value[2];
    if (has_sum) max_abs = value[3];
  }

  /// Gradients as they came, with the scale on them, and those of all ranks added up.
  void show_to(ClipWatch& watch, const torch::optim::Optimizer& optimizer,
               double rank_factor) const {
    if (has_sum) watch.see(&optimizer, scale / rank_factor, std::sqrt(sum_of_squares), max_abs);
  }

  StepOutcome outcome(bool ran) const {
    StepOutcome outcome{.ran = ran, .found_inf = found_inf, .scale = scale};
    if (has_sum) outcome.grad_norm = std::sqrt(sum_of_squares);
    if (ran) outcome.value = at::Tensor();  // what a step without closure returns
    return outcome;
  }
};

/// Multiplies all gradients in place, by their `rank_factor` among others.
inline void multiply_gradients(const torch::optim::Optimizer& optimizer,
                               const std::vector<DeviceSummary>& summaries, double factor) {
  const auto factor_for = [factor](const DeviceSummary& summary) {
    return at::full_like(summary.inv_scale, factor);
  };
  if (factor != 1.0) {
    for (const auto& summary : summaries) check_unscalable(summary.gradients, factor_for(summary));
    for (const auto& summary : summaries) {
      at::Tensor unread = at::zeros_like(summary.found_inf);
      unscale_and_check_(summary.gradients, unread, factor_for(summary));
    }
  }
  for (const auto& group : optimizer.param_groups()) forget_rank_sums(group.params());
}

/// What clipping without a scale has to know: the norm, and that nothing is to be skipped.
inline std::vector<DeviceSummary> summarize_to_clip(torch::optim::Optimizer& optimizer,
                                                    const MasterGradients& masters) {
  DeviceCopies one(at::ones({}, at::kFloat));
  std::vector<DeviceSummary> summaries = summarize(optimizer, masters, /*allow_fp16=*/true, one);
  for (DeviceSummary& summary : summaries) summary.found_inf.zero_();
  std::vector<at::Tensor> checks;
  for (const DeviceSummary& summary : summaries) checks.push_back(summary.found_inf);
  if (!summaries.empty()) combine(summaries, checks);
  return summaries;
}

/// The norm that `step` used, which on a device is known some time later.
inline StepResult step_fused_without_scale(optim::FusedOptimizer& optimizer,
                                           const std::vector<DeviceSummary>& summaries,
                                           const MasterGradients& masters,
                                           const StepOptions& options, ReadbackPool& pool) {
  optimizer.fused_step({verdicts_of(summaries), options, !masters.empty()});
  if (summaries.empty()) return StepResult(StepOutcome{.ran = true, .value = at::Tensor()});
  const DeviceSummary& summary = summaries.front();
  if (summary.sum_of_squares.is_cpu()) {
    const double sum_of_squares = *summary.sum_of_squares.const_data_ptr<double>();
    return StepResult(
        StepOutcome{.ran = true, .grad_norm = std::sqrt(sum_of_squares), .value = at::Tensor()});
  }
  const std::shared_ptr<AsyncReadback> readback =
      pool.readback_for(summary.sum_of_squares.device());
  readback->send(at::ones_like(summary.inv_scale), summary.sum_of_squares, summary.found_inf);
  return StepResult(std::make_shared<DeviceStepSlot>(readback));
}

/// The step of a disabled scaler: clips, clears and steps, whatever the gradients are.
inline StepResult step_without_scale(torch::optim::Optimizer& optimizer,
                                     optim::FusedOptimizer* fused, const MasterGradients& masters,
                                     const StepOptions& options, ReadbackPool& pool) {
  std::vector<DeviceSummary> summaries;
  if (clips(options)) summaries = summarize_to_clip(optimizer, masters);
  if (fused != nullptr) return step_fused_without_scale(*fused, summaries, masters, options, pool);
  StepOutcome outcome{.ran = true};
  if (!summaries.empty()) {
    const double sum_of_squares = summaries.front().sum_of_squares.item<double>();
    multiply_gradients(
        optimizer, summaries,
        rank_factor_of(summaries) * clip_coefficient(sum_of_squares, options.max_norm));
    outcome.grad_norm = std::sqrt(sum_of_squares);
  }
  average_rank_sums(optimizer);
  outcome.value = optimizer.step();
  if (options.zero_grad) zero_gradients(optimizer);
  return StepResult(std::move(outcome));
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
