#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/step_use.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/fused_optimizer.h>
#include <mezzo/optim/step_result.h>
#include <mezzo/scaling/detail/async_readback.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

// What a report says about all devices together, and what of it the host has to know.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline void check_step_options(const StepOptions& options) {
  TORCH_CHECK(is_above(options.max_norm, 0), "step: max_norm is ", options.max_norm,
              "; it should be positive, and infinite for no clipping");
}

inline bool clips(const StepOptions& options) { return !is_positive_infinity(options.max_norm); }

/// Adds a check to those of an iteration, one a device.
inline void add_check(std::vector<at::Tensor>& checks, const at::Tensor& found_inf) {
  for (at::Tensor& check : checks) {
    if (check.device() != found_inf.device()) continue;
    check = check.add(found_inf);
    return;
  }
  checks.push_back(found_inf);
}

/// The sum of one-element tensors of several devices, on one. Waits as `on_device` does.
inline at::Tensor sum_on(at::Device device, const std::vector<at::Tensor>& values) {
  at::Tensor sum = on_device(values.front(), device);
  for (std::size_t i = 1; i < values.size(); ++i) sum = sum.add(on_device(values[i], device));
  return sum;
}

/// The largest magnitude of all devices, on one. Waits as `on_device` does.
inline at::Tensor max_abs_on(at::Device device, const GradientReport& report) {
  at::Tensor largest;
  for (const DeviceGradientReport& one : report.devices) {
    const at::Tensor moved = on_device(one.max_abs, device);
    largest = largest.defined() ? at::maximum(largest, moved) : moved;
  }
  return largest;
}

/// `found_inf` where none of `elsewhere` is set, and 0 otherwise.
inline at::Tensor beyond(const std::vector<at::Tensor>& elsewhere, const at::Tensor& found_inf) {
  if (elsewhere.empty()) return found_inf;
  return found_inf.mul(sum_on(found_inf.device(), elsewhere).eq(0.0));
}

/// Makes every device speak for all: an inf on one holds for all (`checks` is one a device, and may
/// know of more devices), and the norm is that of all.
inline void combine(GradientReport& report, const std::vector<at::Tensor>& checks) {
  std::vector<at::Tensor> sums;
  for (const DeviceGradientReport& one : report.devices) sums.push_back(one.sum_of_squares);
  for (DeviceGradientReport& one : report.devices) {
    const at::Device device = one.inv_scale.device();
    one.found_inf = sum_on(device, checks);
    one.sum_of_squares = sum_on(device, sums);
  }
}

/// What a step is to know on the host. The one place where it waits; all comes over together.
struct HostFacts {
  float scale = 1.0F;
  bool found_inf = false;
  double sum_of_squares = std::numeric_limits<double>::quiet_NaN();
  double max_abs = std::numeric_limits<double>::quiet_NaN();
  bool has_norm = false;

  HostFacts(const at::Tensor& scale_in, const std::vector<at::Tensor>& checks,
            const GradientReport& report)
      : has_norm(!report.devices.empty()) {
    const at::Device device = scale_in.device();
    const auto wide = device.is_mps() ? at::kFloat : at::kDouble;
    std::vector<at::Tensor> values{scale_in.to(wide), sum_on(device, checks).to(wide)};
    if (has_norm) {
      values.push_back(report.devices.front().sum_of_squares.to(device, wide));
      values.push_back(max_abs_on(device, report).to(wide));
    }
    const at::Tensor on_host = at::stack(values).to(at::kCPU, at::kDouble);
    const double* const value = on_host.const_data_ptr<double>();
    scale = static_cast<float>(value[0]);
    found_inf = value[1] != 0.0;
    if (has_norm) sum_of_squares = value[2];
    if (has_norm) max_abs = value[3];
  }

  double norm() const { return std::sqrt(sum_of_squares); }

  StepOutcome outcome() const {
    StepOutcome outcome{.ran = !found_inf, .found_inf = found_inf, .scale = scale};
    if (has_norm) outcome.grad_norm = norm();
    if (has_norm) outcome.grad_max_abs = max_abs;
    if (outcome.ran) outcome.value = at::Tensor();  // what a step without closure returns
    return outcome;
  }
};

/// What clipping without a scale has to know: the norm, and that nothing is to be skipped.
inline GradientReport report_to_clip(const StepTaker& taker, bool of_masters) {
  GradientReport report = taker.report(at::ones({}, at::kFloat), of_masters);
  std::vector<at::Tensor> checks;
  for (DeviceGradientReport& one : report.devices) checks.push_back(one.found_inf.zero_());
  if (!checks.empty()) combine(report, checks);
  return report;
}

/// The step of a disabled scaler: clips, sets to zero and steps, whatever the gradients are.
inline StepResult step_without_scale(const StepTaker& taker, bool of_masters,
                                     const StepOptions& options, ReadbackPool& pool) {
  GradientReport report{.of_masters = of_masters};
  if (clips(options)) report = report_to_clip(taker, of_masters);
  StepOutcome outcome{.ran = true, .value = at::Tensor()};
  const bool has_norm = !report.devices.empty();
  if (taker.fused() != nullptr) {
    taker.fused()->apply(report, options);
    const at::Tensor sum = has_norm ? report.devices.front().sum_of_squares : at::Tensor();
    if (has_norm && !sum.is_cpu()) {  // the norm is known some time later
      const std::shared_ptr<AsyncReadback> readback = pool.readback_for(sum.device());
      const DeviceGradientReport& one = report.devices.front();
      readback->send(
          {at::ones_like(one.inv_scale), one.found_inf, sum, max_abs_on(sum.device(), report)});
      return StepResult(std::make_shared<DeviceStepSlot>(readback));
    }
    if (has_norm) {
      outcome.grad_norm = std::sqrt(*sum.const_data_ptr<double>());
      outcome.grad_max_abs = max_abs_on(sum.device(), report).item<double>();
    }
    return StepResult(std::move(outcome));
  }
  double factor = 1.0;
  if (has_norm) {
    const double sum_of_squares = report.devices.front().sum_of_squares.item<double>();
    factor = clip_coefficient(sum_of_squares, options.max_norm);
    outcome.grad_norm = std::sqrt(sum_of_squares);
    outcome.grad_max_abs =
        max_abs_on(report.devices.front().sum_of_squares.device(), report).item<double>();
  }
  {
    const LentGradients lent(taker.optimizer(), factor);
    outcome.value = taker.step();
  }
  if (options.zero_grad) zero_gradients(taker.optimizer());
  return StepResult(std::move(outcome));
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
