#pragma once

#include <mezzo/kernels/gradient_summary.h>
#include <mezzo/kernels/unscale.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/scaling/detail/grad_scaler_impl.h>
#include <mezzo/scaling/detail/step_facts.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <concepts>
#include <limits>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

// GradScaler::step: the stage is checked, the optimizer reports its gradients, the step is decided,
// and the optimizer applies the report.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Of an optimizer that is not mezzo's: with gradients times `factor` for its time. Skipped after
/// all, and told to `record`, where multiplying makes an inf.
inline void step_with_products(const StepTaker& taker, double factor, OptimizerRecord& record,
                               StepOutcome& outcome) {
  const LentGradients lent(taker.optimizer(), factor);
  const bool is_unscaled = record.stage == Stage::unscaled;  // what there is was looked at
  const bool has_norm = outcome.grad_norm.has_value();
  if (is_unscaled || !lent.found_inf()) {
    outcome.value = taker.step();
    return;
  }
  outcome = {.ran = false, .found_inf = true, .scale = outcome.scale};
  if (has_norm) {
    outcome.grad_norm = outcome.grad_max_abs = std::numeric_limits<double>::infinity();
  }
  add_check(record.found_inf, at::ones_like(record.checks().front()));
}

}  // namespace detail

MEZZO_INLINE StepResult GradScaler::step(AnyOptimizer optimizer, const StepOptions& options) {
  detail::check_step_options(options);
  const c10::NoGradGuard no_grad;
  const detail::StepTaker taker(optimizer);
  if (enabled_) {
    return taker.fused() != nullptr ? step_on_device(taker, options)
                                    : step_on_host(taker, options, /*torch_step=*/nullptr);
  }
  StepResult result =
      detail::step_without_scale(taker, records_.of_masters(taker), options, readback_pool_);
  records_.forget(taker.optimizer());
  return result;
}

MEZZO_INLINE detail::OptimizerRecord& GradScaler::record_to_step(
    const torch::optim::Optimizer& optimizer) {
  require_scale("step");
  detail::OptimizerRecord& record = records_.of(optimizer);
  TORCH_CHECK(
      record.stage != detail::Stage::stepped,
      "step() has already been called since the last update(). In C++: call scaler.update() "
      "at the end of each iteration, after the steps of all its optimizers");
  return record;
}

/// For the line about it, unless the scale of another loss was the cause.
MEZZO_INLINE void GradScaler::note_skip(const detail::OptimizerRecord& record, float scale) {
  const auto is_set = [](const at::Tensor& found) { return found.item<float>() != 0.0F; };
  const bool is_own = record.found_elsewhere.empty() ||
                      std::any_of(record.found_inf.begin(), record.found_inf.end(), is_set);
  if (is_own) skipped_scale_ = scale;
}

/// The same where the device knows.
MEZZO_INLINE void GradScaler::post_line(const std::vector<at::Tensor>& found_inf) {
  const at::Tensor& scale = scale_.original();
  const std::shared_ptr<detail::AsyncReadback> readback =
      readback_pool_.readback_for(scale.device());
  const at::Tensor no_norm = at::zeros({}, scale.options().dtype(at::kDouble));
  readback->send({scale, detail::sum_on(scale.device(), found_inf), no_norm, no_norm});
  readbacks_.push_back(readback);
}

MEZZO_INLINE bool GradScaler::is_unscaled(AnyOptimizer optimizer) const {
  const detail::OptimizerRecord* const record = records_.find(optimizer.optimizer());
  return record != nullptr && record->stage == detail::Stage::unscaled;
}

MEZZO_INLINE std::vector<at::Tensor> GradScaler::release(AnyOptimizer optimizer) {
  detail::OptimizerRecord* const record = records_.find(optimizer.optimizer());
  if (!enabled_ || record == nullptr) return {};
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> found = record->found_inf;
  const bool is_told_by_step = record->stage != detail::Stage::unscaled;
  record->masters.leave();
  records_.release(optimizer.optimizer());
  if (found.empty() || is_told_by_step) return found;
  const at::Tensor& scale = scale_.original();
  if (!scale.is_cpu()) {
    post_line(found);
  } else if (detail::sum_on(scale.device(), found).item<float>() != 0.0F) {
    skipped_scale_ = scale.item<float>();
  }
  return found;
}

MEZZO_INLINE void GradScaler::adopt(AnyOptimizer optimizer, std::vector<at::Tensor> found_inf) {
  const detail::StepTaker taker(optimizer);
  if (!enabled_) return;
  require_scale("adopt");
  records_.forget(taker.optimizer());
  detail::OptimizerRecord& record = records_.of(taker.optimizer());
  record.masters = detail::MasterGradients::standing(taker);
  record.stage = detail::Stage::unscaled;
  record.found_elsewhere = std::move(found_inf);
}

/// One read of the gradients. What it finds joins what `unscale_` noted, if it `counts`; a check
/// that found what others had found before it says nothing about this scale.
MEZZO_INLINE GradientReport GradScaler::report_into(detail::OptimizerRecord& record,
                                                    const detail::StepTaker& taker, bool counts) {
  const bool was_unscaled = record.stage == detail::Stage::unscaled;
  const at::Tensor inv_scale = was_unscaled ? at::ones_like(scale_.original()) : scale_.inverse();
  GradientReport report = taker.report(inv_scale, !record.masters.empty());
  if (!was_unscaled && !allow_fp16_gradients_ && report.has_bare_half)
    detail::refuse_half_gradients(taker);
  if (!was_unscaled) record.found_inf.clear();
  if (report.devices.empty() &&
      !record.checks().empty()) {  // they have gone since they were checked
    DeviceGradientReport& none = report.devices.emplace_back();
    none.inv_scale = inv_scale;
    detail::note(detail::summarize_gradients({}, inv_scale), none);
  }
  for (const DeviceGradientReport& one : report.devices) {
    const at::Tensor found = counts ? one.found_inf : at::zeros_like(one.found_inf);
    detail::add_check(record.found_inf, detail::beyond(record.found_elsewhere, found));
  }
  detail::check_has_gradients(!record.found_inf.empty(), taker.optimizer());
  detail::combine(report, record.checks());
  return report;
}

/// An optimizer that decides by itself, on the device where it is one.
MEZZO_INLINE StepResult GradScaler::step_on_device(const detail::StepTaker& taker,
                                                   const StepOptions& options) {
  const c10::NoGradGuard no_grad;
  detail::OptimizerRecord& record = record_to_step(taker.optimizer());
  const bool was_unscaled = record.stage == detail::Stage::unscaled;
  const GradientReport report = report_into(record, taker, !was_unscaled || recheck_);
  const at::Tensor& scale = scale_.original();
  if (scale.is_cpu()) {
    const detail::HostFacts known(scale, record.checks(), report);
    taker.fused()->apply(report, options);
    record.finish();
    if (known.found_inf) note_skip(record, known.scale);
    StepOutcome outcome = known.outcome();
    outcome.was_unscaled = was_unscaled;
    return StepResult(std::move(outcome));
  }
  const std::shared_ptr<detail::AsyncReadback> readback =
      readback_pool_.readback_for(scale.device());
  taker.fused()->apply(report, options);
  record.finish();
  const at::Tensor sum = report.devices.front().sum_of_squares.to(scale.device());
  readback->send({scale, detail::sum_on(scale.device(), record.checks()), sum,
                  detail::max_abs_on(scale.device(), report)},
                 was_unscaled);
  if (record.found_elsewhere.empty()) {
    readbacks_.push_back(readback);
  } else {
    post_line(record.found_inf);
  }
  return StepResult(std::make_shared<detail::DeviceStepSlot>(readback));
}

/// Any other optimizer, or arguments of its own: the host decides. `torch_step` is torch.amp's
/// step, which unscales where the gradients lie; null for one that leaves them as they are or, on
/// request, zero.
MEZZO_INLINE StepResult GradScaler::step_on_host(const detail::StepTaker& taker,
                                                 const StepOptions& options,
                                                 const StepFunction& torch_step) {
  detail::OptimizerRecord& record = record_to_step(taker.optimizer());
  (void)records_.of_masters(taker);
  const bool was_unscaled = record.stage == detail::Stage::unscaled;
  const bool unscales_here =
      !was_unscaled && (torch_step != nullptr || (options.zero_grad && !detail::clips(options)));
  if (unscales_here) unscale_into(taker);
  TORCH_CHECK(torch_step == nullptr || record.masters.empty(),
              "step(optimizer, arguments...): the gradients were unscaled onto the optimizer's "
              "masters, which a call of its own step would not read; call step(optimizer), or "
              "step(optimizer, {.max_norm = ...})");
  GradientReport report;
  const bool counts = was_unscaled ? recheck_ : !unscales_here;
  if (counts || detail::clips(options)) {
    const c10::NoGradGuard no_grad;
    report = report_into(record, taker, counts);
  }
  detail::check_has_gradients(!record.checks().empty(), taker.optimizer());
  const detail::HostFacts known(scale_.original(), record.checks(), report);
  StepOutcome outcome = known.outcome();
  outcome.was_unscaled = was_unscaled;
  if (!detail::clips(options)) {  // not known in all steps
    outcome.grad_norm = outcome.grad_max_abs = std::nullopt;
  }
  if (outcome.ran && torch_step != nullptr) {
    outcome.value = torch_step();
  } else if (outcome.ran) {
    const bool is_unscaled = was_unscaled || unscales_here;
    const double inverse = is_unscaled ? 1.0 : detail::inverse_scale(known.scale);
    const double coefficient = detail::clip_coefficient(known.sum_of_squares, options.max_norm);
    detail::step_with_products(taker, inverse * coefficient, record, outcome);
  }
  if (!outcome.ran) note_skip(record, known.scale);
  record.finish();
  if (options.zero_grad) detail::zero_gradients(taker.optimizer());
  return StepResult(std::move(outcome));
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
