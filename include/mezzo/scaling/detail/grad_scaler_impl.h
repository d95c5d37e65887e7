#pragma once

#include <mezzo/base/detail/capture.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/detail/inference_tensors.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/kernels/step_use.h>
#include <mezzo/kernels/unscale.h>
#include <mezzo/kernels/update_scale.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/detail/optimizer_words.h>
#include <mezzo/optim/detail/step_witness.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iostream>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Throws for the first gradient that would be unscaled in float16, naming its parameter.
[[noreturn]] inline void refuse_half_gradients(AnyOptimizer optimizer, const StepPlan& plan) {
  std::string which = "a parameter";
  for (const StepPlan::Row& row : plan.rows) {
    const bool is_bare =
        row.gradient.scalar_type() == at::kHalf && !keeps_master(as_fused(optimizer), row);
    if (!is_bare) continue;
    which = OptimizerWords{"", optimizer.optimizer().param_groups()}.parameter(*row.parameter);
    break;
  }
  TORCH_CHECK(false, "Attempting to unscale FP16 gradients. In C++: the gradient of ", which,
              " is float16, in which it underflows without the loss scale; keep the weights in "
              "float32 and run the forward pass under mezzo::Autocast, or train float32 masters "
              "with mezzo::MasterWeights or weight_storage(WeightStorage::master) in the "
              "optimizer's options (GradScaler({.allow_fp16_gradients = true}) unscales in "
              "float16 all the same)");
}

inline void check_has_gradients(bool has_gradients, const torch::optim::Optimizer& optimizer) {
  if (has_gradients) return;
  std::size_t parameters = 0;
  for_each_parameter(optimizer, [&](std::size_t, const at::Tensor&) { ++parameters; });
  TORCH_CHECK(
      false, "No inf checks were recorded for this optimizer. In C++: none of its parameters (",
      parameters,
      " in all) has a gradient; call scaler.scale(loss).backward() before step(), and make the "
      "optimizer from the parameters() of the model that computed the loss");
}

inline constexpr const char* kNoneHasNoNewScale =
    "update(new_scale): this scaler has LossScaleKind::none, whose scale stays 1; make it with "
    "{.kind = LossScaleKind::fixed} or dynamic, or call update()";

inline void check_step_options(const StepOptions& options) {
  TORCH_CHECK(is_above(options.max_norm, 0), "step: max_norm is ", options.max_norm,
              "; it should be positive, and infinite for no clipping");
}

inline bool clips(const StepOptions& options) { return !is_positive_infinity(options.max_norm); }

/// Makes the gradients of weights with a float master float, in the plan and in `.grad`.
/// \throws c10::Error, before any write, if an EmaScope has put an average in the place of one
inline void widen_for_masters(optim::FusedOptimizer* fused, StepPlan& plan) {
  for (const StepPlan::Row& row : plan.rows) {
    if (!keeps_master(fused, row)) continue;
    refuse_average(*row.parameter, {"unscale_", fused->optimizer().param_groups()});
  }
  for (StepPlan::Row& row : plan.rows) {
    if (!is_low_precision(row.gradient) || !keeps_master(fused, row)) continue;
    const NoGraphGuard no_graph(row.gradient.is_inference());
    row.gradient = row.parameter->grad().to(at::kFloat);
    row.parameter->mutable_grad() = row.gradient;
  }
}

/// Gives each master its weight's gradient, for callers that hold master_params(optimizer).
inline void show_at_masters(optim::FusedOptimizer* fused, const StepPlan& plan) {
  for (const StepPlan::Row& row : plan.rows) {
    if (keeps_master(fused, row)) (void)fused->master_param(row.group, *row.parameter);
  }
}

/// Writes the line about a skip to std::cerr: for each of the first ten in a row, for the eleventh
/// with what to look for, and then for every 1000th. For a scale at its floor once, and then for
/// every 1000th.
inline void tell_of_skip(const SkippedStep& skipped) {
  constexpr int64_t kRarely = 1000;
  constexpr int64_t kAsAStart = 10;  // a scale that starts too high makes about so many
  const bool is_at_floor = skipped.times_at_floor > 0;
  const int64_t times = is_at_floor ? skipped.times_at_floor : skipped.times_in_a_row;
  const int64_t each = is_at_floor ? 1 : kAsAStart + 1;
  if (times > each && times % kRarely != 0) return;
  std::string line = skipped.message();
  if (is_at_floor) {
    line += ", the lowest allowed (step " + std::to_string(times) +
            " in a row that was skipped there; from here on one in " + std::to_string(kRarely) +
            " is printed): look for an inf or NaN in the data, the loss or the weights";
  } else if (times > kAsAStart) {
    line += " (step " + std::to_string(times) + " in a row that was skipped; from here on one in " +
            std::to_string(kRarely) +
            " is printed): no loss scale cures an inf or NaN in the data, the loss or the weights; "
            "mezzo::DivergenceWatch (mezzo/diagnose.h) tells which it is";
  }
  std::cerr << line + "\n";
}

}  // namespace detail

MEZZO_INLINE GradScaler::GradScaler(const LossScaleOptions& options)
    : rule_(LossScale::of(options)),
      initial_state_(rule_.initial_state()),
      enabled_(options.enabled),
      recheck_(options.recheck),
      allow_fp16_gradients_(options.allow_fp16_gradients),
      loss_id_(options.loss_id),
      on_skip_(&detail::tell_of_skip) {}

// --- Unscaling ---------------------------------------------------------------------------------

MEZZO_INLINE void GradScaler::unscale_(AnyOptimizer optimizer) {
  optim::FusedOptimizer* const fused = detail::as_fused(optimizer);
  if (fused != nullptr) fused->check_unscale();
  if (!enabled_) {
    if (fused == nullptr) return;
    const c10::NoGradGuard no_grad;
    StepPlan plan = fused->plan();
    detail::widen_for_masters(fused, plan);
    detail::show_at_masters(fused, plan);
    return;
  }
  require_scale("unscale_");
  const detail::Stage stage = records_.of(optimizer.optimizer()).stage;
  TORCH_CHECK(
      stage != detail::Stage::unscaled,
      "unscale_() has already been called on this optimizer since the last update(). In C++: "
      "call scaler.unscale_(optimizer) once an iteration, after its last backward(), and "
      "scaler.update() at the end of each iteration");
  TORCH_CHECK(stage != detail::Stage::stepped,
              "unscale_() is being called after step(). In C++: call scaler.unscale_(optimizer) "
              "before scaler.step(optimizer), and scaler.update() at the end of each iteration");
  unscale_into(optimizer);
}

/// Unscales in place, after the gradients of weights with masters have become float.
MEZZO_INLINE void GradScaler::unscale_into(AnyOptimizer optimizer) {
  const c10::NoGradGuard no_grad;
  optim::FusedOptimizer* const fused = detail::as_fused(optimizer);
  detail::OptimizerRecord& record = records_.of(optimizer.optimizer());
  StepPlan plan = detail::plan_of(optimizer);
  if (plan.has_bare_half && !allow_fp16_gradients_) detail::refuse_half_gradients(optimizer, plan);
  for (const auto& values : detail::values_by_device(plan)) {  // what may throw, before any write
    detail::check_unscalable(values, detail::on_device(scale_->inverse(), values.front().device()));
  }
  detail::widen_for_masters(fused, plan);
  record.found_inf = at::Tensor();
  for (const auto& values : detail::values_by_device(plan)) {
    const at::Tensor inv_scale = detail::on_device(scale_->inverse(), values.front().device());
    at::Tensor found = at::zeros({}, inv_scale.options());
    detail::unscale_and_check_(values, found, inv_scale);
    found = detail::on_device(found, scale_->original().device());
    record.found_inf = record.found_inf.defined() ? record.found_inf.add(found) : found;
  }
  detail::show_at_masters(fused, plan);
  record.stage = detail::Stage::unscaled;
}

MEZZO_INLINE bool GradScaler::is_unscaled(AnyOptimizer optimizer) const {
  const detail::OptimizerRecord* const record = records_.find(optimizer.optimizer());
  return record != nullptr && record->stage == detail::Stage::unscaled;
}

MEZZO_INLINE at::Tensor GradScaler::forget(AnyOptimizer optimizer) {
  const detail::OptimizerRecord* const known = records_.find(optimizer.optimizer());
  if (known == nullptr) return {};
  const c10::NoGradGuard no_grad;
  const detail::OptimizerRecord record = *known;
  records_.forget(optimizer.optimizer());
  const bool is_told_by_step = record.stage == detail::Stage::stepped;  // not by one that threw
  if (!record.found_inf.defined() || is_told_by_step) return record.found_inf;
  if (!scale_->original().is_cpu()) {
    post_skip(record.found_inf);
  } else {
    note_skip(record, scale_->original().item<float>());
  }
  return record.found_inf;
}

// --- Stepping ----------------------------------------------------------------------------------

MEZZO_INLINE StepResult GradScaler::step(AnyOptimizer optimizer, const StepOptions& options) {
  detail::check_step_options(options);
  const c10::NoGradGuard no_grad;
  if (!enabled_) return step_without_scale(optimizer, options);
  optim::FusedOptimizer* const fused = detail::as_fused(optimizer);
  return fused != nullptr ? step_fused(*fused, optimizer.optimizer(), options)
                          : step_on_host(optimizer, options, /*torch_step=*/nullptr);
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

/// Notes a skip for `on_skip`, unless the inf was known before this scaler's checks.
MEZZO_INLINE void GradScaler::note_skip(const detail::OptimizerRecord& record, float scale) {
  if (record.found_inf.item<float>() != 0.0F) skipped_scale_ = scale;
}

/// Notes a skip that only the device knows of: `on_skip` is called once the letter has arrived.
MEZZO_INLINE void GradScaler::post_skip(const at::Tensor& found_inf) {
  const at::Tensor& scale = scale_->original();
  const std::shared_ptr<detail::StepLetter> letter = letter_pool_.letter_for(scale.device());
  letter->send(scale, {.inv_scale = scale_->inverse(), .found_inf = found_inf});
  letters_.push_back(letter);
}

/// Combines what a read of the gradients found with what `unscale_` had noted. Afterwards
/// `verdict.found_inf` decides the step, and `record.found_inf` counts for the next scale.
/// \param counts  false: the result of the read is ignored (LossScaleOptions::recheck)
/// \param known_inf  not 0: an inf was found before this scaler's checks; what the read finds then
///   prevents the step but does not move the scale
MEZZO_INLINE void GradScaler::check_verdict(detail::OptimizerRecord& record, Verdict& verdict,
                                            bool was_unscaled, bool counts,
                                            const at::Tensor& known_inf) {
  const at::Device device = scale_->original().device();
  at::Tensor found = detail::on_device(verdict.found_inf, device);
  if (!counts) found = at::zeros_like(found);
  const at::Tensor before = was_unscaled ? record.found_inf : at::Tensor();
  const auto joined = [&](const at::Tensor& flag) {
    return before.defined() ? before.add(flag) : flag;
  };
  const at::Tensor all = joined(found);
  record.found_inf = all;
  if (known_inf.defined()) {
    record.found_inf = joined(found.mul(detail::on_device(known_inf, device).eq(0.0)));
  }
  verdict.found_inf = detail::on_device(all, verdict.inv_scale.device());
}

/// Steps with an optimizer that takes a verdict: the device decides, and the host does not wait.
MEZZO_INLINE StepResult GradScaler::step_fused(optim::FusedOptimizer& fused,
                                               const torch::optim::Optimizer& optimizer,
                                               const StepOptions& options) {
  detail::OptimizerRecord& record = record_to_step(optimizer);
  const at::Tensor& scale = scale_->original();
  detail::tell_witness(fused, scale, options.max_norm);
  const bool was_unscaled = options.is_unscaled || record.stage == detail::Stage::unscaled;
  const at::Tensor inv_scale = was_unscaled ? at::ones_like(scale) : scale_->inverse();
  StepPlan plan = fused.plan();
  if (!was_unscaled && !allow_fp16_gradients_ && plan.has_bare_half) {
    detail::refuse_half_gradients(fused, plan);
  }
  Verdict verdict = fused.read(plan, inv_scale);
  const bool is_known = options.is_unscaled || record.found_inf.defined();
  detail::check_has_gradients(plan.has_rows() || is_known, optimizer);
  check_verdict(record, verdict, was_unscaled, !was_unscaled || recheck_, options.known_inf);
  std::shared_ptr<detail::StepLetter> letter;  // made before the step, for it may throw
  if (!scale.is_cpu()) letter = letter_pool_.letter_for(scale.device());
  fused.apply(std::move(plan), verdict, options);
  record.stage = detail::Stage::stepped;
  if (scale.is_cpu()) {
    StepOutcome outcome = detail::outcome_on_cpu(scale, verdict.on(scale.device()), was_unscaled);
    if (outcome.found_inf) note_skip(record, outcome.scale);
    return StepResult(std::move(outcome));
  }
  letter->send(scale, verdict, was_unscaled);
  if (options.known_inf.defined()) {
    post_skip(record.found_inf);
  } else {
    letters_.push_back(letter);
  }
  return StepResult(std::make_shared<detail::DeviceStepSlot>(letter));
}

/// Steps with any other optimizer, or with arguments of its own: the host decides, and waits for
/// the device.
/// \param torch_step  torch.amp's step, which leaves `.grad` unscaled; null for a step with
///   StepOptions, which leaves `.grad` as it was or, on request, zero
MEZZO_INLINE StepResult GradScaler::step_on_host(AnyOptimizer optimizer, const StepOptions& options,
                                                 const StepFunction& torch_step) {
  detail::OptimizerRecord& record = record_to_step(optimizer.optimizer());
  detail::tell_witness(optimizer, scale_->original(), options.max_norm);
  const bool was_unscaled = options.is_unscaled || record.stage == detail::Stage::unscaled;
  const bool unscales_here =
      !was_unscaled && (torch_step != nullptr || (options.zero_grad && !detail::clips(options)));
  if (unscales_here) unscale_into(optimizer);
  const bool is_true = was_unscaled || unscales_here;  // `.grad` has lost the scale
  Verdict verdict{.inv_scale = scale_->inverse(), .found_inf = record.found_inf};
  const bool counts = was_unscaled ? recheck_ : !unscales_here;
  if (counts || detail::clips(options)) {
    const c10::NoGradGuard no_grad;
    const StepPlan plan = detail::plan_of(optimizer);
    const bool is_known = options.is_unscaled || record.found_inf.defined();
    detail::check_has_gradients(plan.has_rows() || is_known, optimizer.optimizer());
    if (!is_true && plan.has_bare_half && !allow_fp16_gradients_) {
      detail::refuse_half_gradients(optimizer, plan);
    }
    verdict = detail::read_gradients(
        plan, is_true ? at::ones_like(scale_->original()) : scale_->inverse());
    check_verdict(record, verdict, is_true, counts, options.known_inf);
  }
  detail::check_has_gradients(verdict.found_inf.defined(), optimizer.optimizer());
  if (unscales_here && !detail::clips(options) && options.known_inf.defined()) {
    const c10::NoGradGuard no_grad;  // the verdict has its own reference to the old flag
    const at::Tensor known = detail::on_device(options.known_inf, record.found_inf.device());
    record.found_inf = record.found_inf.mul(known.eq(0.0));
  }
  const std::shared_ptr<detail::StepLetter> letter =
      letter_pool_.letter_for(scale_->original().device());
  letter->send_and_wait(scale_->original(), verdict, was_unscaled);
  StepOutcome outcome = letter->outcome();
  if (!detail::clips(options)) outcome.grad_norm = outcome.grad_max_abs = std::nullopt;
  if (outcome.ran && torch_step != nullptr) {
    const detail::StepWithoutVersion step(optimizer.optimizer());
    outcome.value = torch_step();
    detail::drop_weight_casts();
  } else if (outcome.ran) {
    const double inverse = is_true ? 1.0 : detail::inverse_scale(outcome.scale);
    const double clip = detail::clips(options)
                            ? detail::clip_coefficient(letter->sum_of_squares(), options.max_norm)
                            : 1.0;
    const detail::LentGradients lent(optimizer.optimizer(), inverse * clip);
    if (is_true || !lent.found_inf()) {
      const detail::StepWithoutVersion step(optimizer.optimizer());
      outcome.value = optimizer.step();
    } else {  // a product overflows where, read in float, none did
      outcome = {
          .ran = false, .found_inf = true, .scale = outcome.scale, .was_unscaled = was_unscaled};
      if (detail::clips(options)) {
        outcome.grad_norm = outcome.grad_max_abs = std::numeric_limits<double>::infinity();
      }
      record.found_inf = at::ones_like(record.found_inf);
    }
  }
  if (!outcome.ran && options.known_inf.defined()) {
    note_skip(record, outcome.scale);
  } else if (!outcome.ran) {  // the record says the same as the letter: no second wait
    skipped_scale_ = outcome.scale;
  }
  record.stage = detail::Stage::stepped;
  if (options.zero_grad) detail::zero_gradients(optimizer.optimizer());
  return StepResult(std::move(outcome));
}

/// Steps for a disabled scaler: clips, sets to zero and steps, whatever the gradients are.
MEZZO_INLINE StepResult GradScaler::step_without_scale(AnyOptimizer optimizer,
                                                       const StepOptions& options) {
  optim::FusedOptimizer* const fused = detail::as_fused(optimizer);
  detail::tell_witness(optimizer, /*scale=*/{}, options.max_norm);
  const bool wants_plan = fused != nullptr || detail::clips(options);
  StepPlan plan = wants_plan ? detail::plan_of(optimizer) : StepPlan();
  Verdict verdict;
  std::shared_ptr<detail::StepLetter> letter;
  if (detail::clips(options) && plan.has_rows()) {
    const at::Device device =
        plan.rows.empty() ? at::Device(at::kCPU) : plan.rows.front().gradient.device();
    const at::Tensor one = at::ones({}, at::TensorOptions().device(device).dtype(at::kFloat));
    verdict = fused != nullptr ? fused->read(plan, one) : detail::read_gradients(plan, one);
    verdict.found_inf.zero_();
    letter = letter_pool_.letter_for(verdict.inv_scale.device());
    fused != nullptr ? letter->send(one, verdict) : letter->send_and_wait(one, verdict);
  }
  StepOutcome outcome{.ran = true, .value = at::Tensor()};
  if (fused != nullptr) {
    fused->apply(std::move(plan), verdict, options);
    if (letter == nullptr) return StepResult(std::move(outcome));
    if (letter->device().is_cpu()) return StepResult(letter->outcome());
    return StepResult(std::make_shared<detail::DeviceStepSlot>(letter));
  }
  double factor = 1.0;
  if (letter != nullptr) {
    outcome = letter->outcome();
    factor = detail::clip_coefficient(letter->sum_of_squares(), options.max_norm);
  }
  {
    const detail::LentGradients lent(optimizer.optimizer(), factor);
    const detail::StepWithoutVersion step(optimizer.optimizer());
    outcome.value = optimizer.step();
  }
  if (options.zero_grad) detail::zero_gradients(optimizer.optimizer());
  return StepResult(std::move(outcome));
}

// --- The end of an iteration -------------------------------------------------------------------

MEZZO_INLINE void GradScaler::update() {
  if (!enabled_) return records_.clear();
  require_scale("update");
  const std::vector<at::Tensor> checks = records_.found_inf();
  TORCH_CHECK(
      !checks.empty(),
      "No inf checks were recorded prior to update. In C++: call scaler.step(optimizer), or "
      "scaler.unscale_(optimizer), before scaler.update(), which is called once an "
      "iteration");
  {
    const c10::NoGradGuard no_grad;                                 // not for the callback
    for (const at::Tensor& flag : records_.found_without_step()) {  // no step tells of it
      if (scale_->original().is_cpu()) {
        note_skip({.found_inf = flag}, scale_->original().item<float>());
      } else {
        post_skip(flag);
      }
    }
    at::Tensor found = checks.front();
    for (std::size_t i = 1; i < checks.size(); ++i) found = found.add(checks[i]);
    scale_->advance(rule_, found, next_scale_place());
  }
  finish_iteration();
}

MEZZO_INLINE void GradScaler::update(double new_scale) {
  if (!enabled_) return records_.clear();
  require_scale("update");
  TORCH_CHECK(rule_.kind() != LossScaleKind::none, detail::kNoneHasNoNewScale);
  const double high = std::min<double>(rule_.max_scale(), detail::kLargestFloat);
  detail::check_scale_value("new_scale", new_scale, rule_.min_scale(), high);
  scale_->write_scale(static_cast<float>(new_scale), next_scale_place());
  finish_iteration();
}

MEZZO_INLINE void GradScaler::update(const at::Tensor& new_scale) {
  if (!enabled_) return records_.clear();
  require_scale("update");
  TORCH_CHECK(new_scale.defined() && new_scale.numel() == 1 && !new_scale.requires_grad(),
              "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
              "torch.FloatTensor with requires_grad=False. In C++: pass a double, or a tensor of "
              "one element that requires no grad, not one that is ",
              detail::tensor_words(new_scale),
              new_scale.defined() && new_scale.requires_grad() ? " and requires grad" : "");
  TORCH_CHECK(rule_.kind() != LossScaleKind::none, detail::kNoneHasNoNewScale);
  scale_->write_scale(new_scale, rule_.min_scale(), rule_.max_scale(), next_scale_place());
  finish_iteration();
}

/// Returns where the next scale is written for `on_skip`, in the last letter of the iteration;
/// undefined if nobody will be told of it.
MEZZO_INLINE at::Tensor GradScaler::next_scale_place() const {
  const bool is_told = on_skip_ && !letters_.empty() && !skipped_scale_ &&
                       detail::capture_on(scale_->original().device()) == 0;
  return is_told ? letters_.back()->next_scale_place() : at::Tensor();
}

/// Forgets the optimizers, and tells `on_skip` of all iterations that are known by now to have
/// skipped a step.
MEZZO_INLINE void GradScaler::finish_iteration() {
  records_.clear();
  const auto letters = std::exchange(letters_, {});
  if (detail::capture_on(scale_->original().device()) != 0) return;  // no callback in a graph
  const SkipCallback callback = on_skip_;  // a copy: it may silence or replace itself
  const auto tell = [&](float scale, float next_scale) {
    const bool is_at_floor = scale == next_scale && next_scale <= rule_.min_scale();
    times_at_floor_ = is_at_floor ? times_at_floor_ + 1 : 0;
    ++times_in_a_row_;
    if (!callback) return;
    callback({.loss_id = loss_id_,
              .scale = scale,
              .next_scale = next_scale,
              .times_at_floor = times_at_floor_,
              .times_in_a_row = times_in_a_row_});
  };
  const auto end_row = [&] { times_at_floor_ = times_in_a_row_ = 0; };
  if (skipped_scale_) {
    const float overflowed = *std::exchange(skipped_scale_, std::nullopt);
    if (callback) tell(overflowed, scale_->original().item<float>());
  } else if (!letters.empty() && callback) {
    letters.back()->next_scale_sent();
    pending_lines_.add(letters);
  } else if (pending_lines_.empty()) {
    end_row();
  }
  pending_lines_.poll(tell, end_row);
}

MEZZO_INLINE void GradScaler::require_scale(const char* call) const {
  TORCH_CHECK(
      scale_->defined(), "Attempted ", call,
      " but _scale is None.  This may indicate your script did not use scaler.scale(loss or "
      "outputs) earlier in the iteration. In C++: call scaler.scale(loss).backward() first; the "
      "scale is made with the first tensor that is scaled");
}

MEZZO_INLINE at::Tensor GradScaler::scale_on(at::Device device) {
  if (!scale_->defined()) {
    detail::require_update_kernel(rule_, device);
    scale_->make(initial_state_, device);
  }
  return detail::on_device(scale_->original(), device);
}

// --- State -------------------------------------------------------------------------------------

namespace detail {

/// Reads numbers from a state dictionary. A key without a fallback has to be there.
class StateReader {
 public:
  explicit StateReader(const std::map<std::string, double>& state) : state_(state) {}

  double value(const char* key) const {
    const auto found = state_.find(key);
    TORCH_CHECK(found != state_.end(), "The source state dict lacks \"", key,
                "\"; give load_state_dict what state_dict() of a GradScaler returned");
    return found->second;
  }
  double value(const char* key, double fallback) const {
    const auto found = state_.find(key);
    return found == state_.end() ? fallback : found->second;
  }
  int64_t count(const char* key) const { return whole(key, value(key)); }
  int64_t count(const char* key, int64_t fallback) const {
    return whole(key, value(key, static_cast<double>(fallback)));
  }

 private:
  static int64_t whole(const char* key, double value) {
    constexpr double kLargest = std::numeric_limits<int32_t>::max();
    TORCH_CHECK(is_finite(value) && value >= 0 && value <= kLargest && value == std::floor(value),
                "The source state dict has ", key, " = ", value,
                "; it should be a whole number from 0 to 2147483647");
    return static_cast<int64_t>(value);
  }

  const std::map<std::string, double>& state_;
};

}  // namespace detail

MEZZO_INLINE double GradScaler::get_scale() const { return enabled_ ? read_state().scale : 1.0; }

template <class Number>
void GradScaler::change_rule(const char* name, Number LossScaleOptions::*option, Number value) {
  TORCH_CHECK(rule_.kind() == LossScaleKind::dynamic, name,
              " belongs to a dynamic loss scale, and this scaler's is constant; make the scaler "
              "with {.kind = LossScaleKind::dynamic}, the default");
  LossScaleOptions options = rule_;
  options.*option = value;
  rule_ = LossScale::of(options);
}

MEZZO_INLINE void GradScaler::set_growth_factor(double growth_factor) {
  change_rule("growth_factor", &LossScaleOptions::growth_factor, growth_factor);
}

MEZZO_INLINE void GradScaler::set_backoff_factor(double backoff_factor) {
  change_rule("backoff_factor", &LossScaleOptions::backoff_factor, backoff_factor);
}

MEZZO_INLINE void GradScaler::set_growth_interval(int64_t growth_interval) {
  change_rule("growth_interval", &LossScaleOptions::growth_interval, growth_interval);
}

MEZZO_INLINE LossScaleState GradScaler::read_state() const {
  return scale_->defined() ? scale_->read() : initial_state_;
}

MEZZO_INLINE GradScaler::StateDict GradScaler::state_dict() const {
  if (!enabled_) return {};
  const LossScaleState state = read_state();
  return {{"scale", state.scale},
          {"growth_factor", rule_.growth_factor()},
          {"backoff_factor", rule_.backoff_factor()},
          {"growth_interval", static_cast<double>(rule_.growth_interval())},
          {"_growth_tracker", state.growth_tracker},
          {"min_scale", rule_.min_scale()},
          {"max_scale", rule_.max_scale()},
          {"hysteresis", rule_.hysteresis()},
          {"_hysteresis_left", state.hysteresis_left},
          {"_loss_scale_kind", static_cast<double>(rule_.kind())}};
}

MEZZO_INLINE void GradScaler::load_state_dict(const StateDict& state) {
  if (!enabled_) return;
  TORCH_CHECK(!state.empty(),
              "The source state dict is empty, possibly because it was saved from a disabled "
              "instance of GradScaler. In C++: make this scaler with "
              "GradScaler({.enabled = false}) too, or leave load_state_dict out and begin with "
              "a new scale");
  const detail::StateReader reader(state);
  const int64_t kind = reader.count("_loss_scale_kind", static_cast<int64_t>(rule_.kind()));
  TORCH_CHECK(kind <= static_cast<int64_t>(LossScaleKind::dynamic),
              "The source state dict has _loss_scale_kind = ", kind,
              "; it should be 0 (none), 1 (fixed) or 2 (dynamic)");
  const LossScale rule =
      LossScale::of({.init_scale = reader.value("scale"),
                     .growth_factor = reader.value("growth_factor"),
                     .backoff_factor = reader.value("backoff_factor"),
                     .growth_interval = reader.count("growth_interval"),
                     .min_scale = reader.value("min_scale", rule_.min_scale()),
                     .max_scale = reader.value("max_scale", rule_.max_scale()),
                     .hysteresis = reader.count("hysteresis", rule_.hysteresis()),
                     .kind = static_cast<LossScaleKind>(kind)});
  LossScaleState next = rule.initial_state();
  next.growth_tracker = static_cast<int32_t>(reader.count("_growth_tracker"));
  next.hysteresis_left =
      static_cast<int32_t>(reader.count("_hysteresis_left", next.hysteresis_left));
  if (scale_->defined()) detail::require_update_kernel(rule, scale_->original().device());
  rule_ = rule;
  initial_state_ = next;
  if (scale_->defined()) scale_->write(next);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
