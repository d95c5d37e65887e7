#pragma once

#include <mezzo/kernels/unscale.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/scaling/detail/fused_step.h>
#include <mezzo/scaling/detail/grad_scaler_impl.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <concepts>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

// GradScaler::step, in its three forms: any optimizer with torch.amp's passes; any optimizer with
// options; and mezzo's own optimizers.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

template <class Argument>
inline constexpr bool kMayBeClosure = std::is_convertible_v<const std::remove_cvref_t<Argument>&,
                                                            torch::optim::Optimizer::LossClosure>;

/// Of an argument of `optimizer.step`; no closure, said aloud, is not one.
template <class Argument>
bool is_closure(const Argument& argument) {
  if constexpr (kMayBeClosure<Argument>) {
    return torch::optim::Optimizer::LossClosure(argument) != nullptr;
  } else {
    return false;
  }
}

/// Checks again, and adds what it finds to what an earlier check, if there was one, found.
inline void recheck(const std::vector<DeviceGradients>& by_device,
                    std::vector<at::Tensor>& found_inf) {
  if (found_inf.empty()) return;
  for (const DeviceGradients& gradients : by_device) {
    auto found = found_inf.begin();
    while (found != found_inf.end() && found->device() != gradients.device) ++found;
    if (found == found_inf.end()) {
      const auto options = found_inf.front().options().device(gradients.device);
      found = found_inf.insert(found, at::zeros({}, options));
    }
    check_(gradients.tensors, *found);
  }
}

}  // namespace detail

template <std::derived_from<torch::optim::Optimizer> OptimizerType, class... Args>
requires(!(std::same_as<std::remove_cvref_t<Args>, StepOptions> ||
           ...)) StepResult GradScaler::step(OptimizerType& optimizer, Args&&... args) {
  const auto call_step = [&]() -> at::Tensor {
    return optimizer.step(std::forward<Args>(args)...);
  };
  auto* const fused = detail::refreshed(optimizer);
  constexpr bool kMayBeFused = (detail::kMayBeClosure<Args> && ...);
  if (!enabled_) {
    const bool is_bare = kMayBeFused && !(detail::is_closure(args) || ...);
    if (is_bare && records_.find(optimizer) != nullptr) return step(optimizer, StepOptions{});
    if (fused == nullptr) detail::average_rank_sums(optimizer);
    return StepResult(StepOutcome{.ran = true, .value = call_step()});
  }
  TORCH_CHECK(!(detail::is_closure(args) || ...),
              "Closure use is not currently supported if GradScaler is enabled.");
  if (kMayBeFused && fused != nullptr) return step_fused(*fused, {});
  return step_if_finite(optimizer, call_step);
}

inline StepResult GradScaler::step(torch::optim::Optimizer& optimizer, const StepOptions& options) {
  detail::check_step_options(options);
  c10::NoGradGuard no_grad;
  auto* const fused = detail::refreshed(optimizer);
  if (!enabled_) {
    const detail::OptimizerRecord nothing;
    const detail::OptimizerRecord* const record = records_.find(optimizer);
    const detail::MasterGradients& masters = (record != nullptr ? *record : nothing).masters;
    StepResult result =
        detail::step_without_scale(optimizer, fused, masters, options, readback_pool_);
    records_.forget(optimizer);
    return result;
  }
  return fused != nullptr ? step_fused(*fused, options) : step_unfused(optimizer, options);
}

inline detail::OptimizerRecord& GradScaler::record_to_step(
    const torch::optim::Optimizer& optimizer) {
  require_scale("step");
  detail::OptimizerRecord& record = records_.of(optimizer);
  TORCH_CHECK(record.stage != detail::Stage::stepped,
              "step() has already been called since the last update().");
  return record;
}

// A check that found what others had found before it says nothing about this scale.
inline void GradScaler::recheck_into(detail::OptimizerRecord& record,
                                     const torch::optim::Optimizer& optimizer) {
  const auto parameters = detail::with_gradient(optimizer, /*allow_fp16=*/true);
  std::vector<at::Tensor> found = record.found_inf;
  if (found.empty()) {
    for (const at::Tensor& check : record.found_elsewhere) found.push_back(at::zeros_like(check));
  }
  if (found.empty()) return;
  detail::recheck(detail::gradients_by_device(parameters), found);
  for (at::Tensor& check : found) check = detail::beyond(record.found_elsewhere, check);
  record.found_inf = std::move(found);
}

/// For the line about it, unless the scale of another loss was the cause.
inline void GradScaler::note_skip(const detail::OptimizerRecord& record, float scale) {
  const auto is_set = [](const at::Tensor& found) { return found.item<float>() != 0.0F; };
  const bool is_own = record.found_elsewhere.empty() ||
                      std::any_of(record.found_inf.begin(), record.found_inf.end(), is_set);
  if (is_own) skipped_scale_ = scale;
}

/// The same where the device knows.
inline void GradScaler::post_line(const std::vector<at::Tensor>& found_inf) {
  const at::Tensor& scale = scale_.original();
  const std::shared_ptr<detail::AsyncReadback> readback =
      readback_pool_.readback_for(scale.device());
  readback->send(scale, at::zeros({}, scale.options().dtype(at::kDouble)),
                 detail::sum_on(scale.device(), found_inf));
  readbacks_.push_back(readback);
}

inline bool GradScaler::is_unscaled(const torch::optim::Optimizer& optimizer) const {
  const detail::OptimizerRecord* const record = records_.find(optimizer);
  return record != nullptr && record->stage == detail::Stage::unscaled;
}

inline std::vector<at::Tensor> GradScaler::release(const torch::optim::Optimizer& optimizer) {
  detail::OptimizerRecord* const record = records_.find(optimizer);
  if (!enabled_ || record == nullptr) return {};
  const c10::NoGradGuard no_grad;
  const std::vector<at::Tensor> found = record->found_inf;
  const bool is_told_by_step = record->stage != detail::Stage::unscaled;
  record->masters.leave();
  records_.release(optimizer);
  if (found.empty() || is_told_by_step) return found;
  const at::Tensor& scale = scale_.original();
  if (!scale.is_cpu()) {
    post_line(found);
  } else if (detail::sum_on(scale.device(), found).item<float>() != 0.0F) {
    skipped_scale_ = scale.item<float>();
  }
  return found;
}

inline void GradScaler::adopt(torch::optim::Optimizer& optimizer,
                              std::vector<at::Tensor> found_inf) {
  auto* const fused = detail::refreshed(optimizer);
  if (!enabled_) return;
  require_scale("adopt");
  records_.forget(optimizer);
  detail::OptimizerRecord& record = records_.of(optimizer);
  if (fused != nullptr) record.masters = detail::MasterGradients::standing(*fused);
  record.stage = detail::Stage::unscaled;
  record.found_elsewhere = std::move(found_inf);
}

inline void GradScaler::finish_step(detail::OptimizerRecord& record) {
  record.stage = detail::Stage::stepped;
  record.masters.drop();
}

// One read of the gradients; what it found joins what `unscale_` noted.
inline std::vector<detail::DeviceSummary> GradScaler::summarize_into(
    detail::OptimizerRecord& record, torch::optim::Optimizer& optimizer) {
  const bool was_unscaled = record.stage == detail::Stage::unscaled;
  detail::DeviceCopies one;
  if (was_unscaled) one = detail::DeviceCopies(at::ones_like(scale_.original()));
  std::vector<detail::DeviceSummary> summaries =
      detail::summarize(optimizer, record.masters, allow_fp16_gradients_ || was_unscaled,
                        was_unscaled ? one : scale_.inverse());
  if (!was_unscaled) record.found_inf.clear();
  for (const detail::DeviceSummary& summary : summaries) {
    const at::Tensor found =
        was_unscaled && !recheck_ ? at::zeros_like(summary.found_inf) : summary.found_inf;
    detail::add_check(record.found_inf, detail::beyond(record.found_elsewhere, found));
  }
  TORCH_CHECK(!record.found_inf.empty(), "No inf checks were recorded for this optimizer.");
  detail::combine(summaries, record.checks());
  return summaries;
}

// For the watch on clipping, where a step would not read the gradients by itself.
inline std::vector<detail::DeviceSummary> GradScaler::summarize_unscaled(
    const detail::OptimizerRecord& record, torch::optim::Optimizer& optimizer) {
  const c10::NoGradGuard no_grad;
  detail::DeviceCopies one(at::ones_like(scale_.original()));
  std::vector<detail::DeviceSummary> summaries =
      detail::summarize(optimizer, record.masters, /*allow_fp16=*/true, one);
  if (!summaries.empty()) detail::combine(summaries, {summaries.front().found_inf});
  return summaries;
}

inline StepResult GradScaler::step_fused(optim::FusedOptimizer& optimizer,
                                         const StepOptions& options) {
  const c10::NoGradGuard no_grad;
  detail::OptimizerRecord& record = record_to_step(optimizer);
  const bool was_unscaled = record.stage == detail::Stage::unscaled;
  const std::vector<detail::DeviceSummary> summaries = summarize_into(record, optimizer);
  const at::Tensor& scale = scale_.original();
  if (scale.is_cpu()) {
    const detail::HostSummary known(scale, record.checks(), summaries);
    if (!was_unscaled) {
      known.show_to(clip_watch_, optimizer, detail::rank_factor_of(summaries));
    }
    optimizer.fused_step({detail::verdicts_of(summaries), options, !record.masters.empty()});
    finish_step(record);
    if (known.found_inf) note_skip(record, known.scale);
    return StepResult(known.outcome(/*ran=*/!known.found_inf));
  }
  const std::shared_ptr<detail::AsyncReadback> readback =
      readback_pool_.readback_for(scale.device());
  optimizer.fused_step({detail::verdicts_of(summaries), options, !record.masters.empty()});
  finish_step(record);
  if (!was_unscaled && !summaries.empty() && clip_watch_.wants(&optimizer)) {
    readback->send_max_abs(detail::max_abs_on(scale.device(), summaries));
    clip_watch_.expect(&optimizer, readback, detail::rank_factor_of(summaries));
  }
  readback->send(scale, summaries.front().sum_of_squares.to(scale.device()),
                 detail::sum_on(scale.device(), record.checks()));
  if (record.found_elsewhere.empty()) {
    readbacks_.push_back(readback);
  } else {
    post_line(record.found_inf);
  }
  return StepResult(std::make_shared<detail::DeviceStepSlot>(readback));
}

inline StepResult GradScaler::step_unfused(torch::optim::Optimizer& optimizer,
                                           const StepOptions& options) {
  if (!detail::clips(options)) {
    StepResult result = step_if_finite(optimizer, [&] { return optimizer.step(); });
    if (options.zero_grad) detail::zero_gradients(optimizer);
    return result;
  }
  detail::OptimizerRecord& record = record_to_step(optimizer);
  const bool was_unscaled = record.stage == detail::Stage::unscaled;
  const std::vector<detail::DeviceSummary> summaries = summarize_into(record, optimizer);
  const detail::HostSummary known(scale_.original(), record.checks(), summaries);
  const double rank_factor = detail::rank_factor_of(summaries);
  if (!was_unscaled) known.show_to(clip_watch_, optimizer, rank_factor);
  StepOutcome outcome = known.outcome(/*ran=*/!known.found_inf);
  if (outcome.ran) {
    const double inverse = was_unscaled ? 1.0 : detail::inverse_scale(known.scale);
    detail::multiply_gradients(
        optimizer, summaries,
        inverse * rank_factor * detail::clip_coefficient(known.sum_of_squares, options.max_norm));
    record.stage = detail::Stage::unscaled;  // for who calls again after a step that threw
    outcome.value = optimizer.step();
  } else {
    note_skip(record, known.scale);
  }
  finish_step(record);
  if (options.zero_grad) detail::zero_gradients(optimizer);
  return StepResult(std::move(outcome));
}

inline StepResult GradScaler::step_if_finite(torch::optim::Optimizer& optimizer,
                                             const StepFunction& step) {
  detail::OptimizerRecord& record = record_to_step(optimizer);
  std::vector<detail::DeviceSummary> watched;
  double rank_factor = 1.0;
  if (record.stage == detail::Stage::ready) {
    rank_factor = unscale_into(record, optimizer);
    if (clip_watch_.wants(&optimizer)) watched = summarize_unscaled(record, optimizer);
  } else {
    c10::NoGradGuard no_grad;
    detail::average_rank_sums(optimizer);  // of a pass since
    if (recheck_) recheck_into(record, optimizer);
  }
  TORCH_CHECK(record.masters.empty(),
              "step(optimizer, arguments...): the optimizer's gradients were unscaled onto its "
              "masters, of which a step of its own does not know; use step(optimizer), or "
              "step(optimizer, {.max_norm = ...})");
  const std::vector<at::Tensor> checks = record.checks();
  TORCH_CHECK(!checks.empty(), "No inf checks were recorded for this optimizer.");
  const detail::HostSummary known(scale_.original(), checks, watched);
  known.show_to(clip_watch_, optimizer, rank_factor);
  StepOutcome outcome = known.outcome(/*ran=*/!known.found_inf);
  outcome.grad_norm = std::nullopt;  // which is not known in later steps
  if (outcome.ran) {
    outcome.value = step();
  } else {
    note_skip(record, outcome.scale);
  }
  finish_step(record);
  return StepResult(std::move(outcome));
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
