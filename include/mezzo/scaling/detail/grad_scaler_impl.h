#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/detail/inference_tensors.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/kernels/gradient_passes.h>
#include <mezzo/kernels/graph_capture.h>
#include <mezzo/kernels/step_use.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/detail/optimizer_words.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iostream>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns a tensor's version; 0 of an inference tensor, which has none.
inline uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}

inline bool has_master(const StepPlan::Row& row) {
  return row.storage == optim::WeightStorage::master;
}

/// Throws for the first gradient that would be unscaled in float16, naming its parameter.
[[noreturn]] inline void refuse_half_gradients(AnyOptimizer optimizer, const StepPlan& plan) {
  std::string which = "a parameter";
  for (const StepPlan::Row& row : plan.rows) {
    const bool is_bare = row.gradient.scalar_type() == at::kHalf && !has_master(row);
    if (!is_bare) continue;
    which = OptimizerWords{"", optimizer.optimizer().param_groups()}.parameter(*row.parameter);
    break;
  }
  TORCH_CHECK(false, "Attempting to unscale FP16 gradients. In C++: the gradient of ", which,
              " is float16, in which it underflows without the loss scale; keep the weights in "
              "float32 and run the forward pass under mezzo::Autocast, or train float32 masters "
              "with mezzo::MasterWeights or an optimizer of mezzo's that is given "
              "{.weight_storage = WeightStorage::master} (GradScaler({.allow_fp16_gradients = "
              "true}) unscales in "
              "float16 all the same)");
}

inline void check_has_gradients(bool has_gradients, const torch::optim::Optimizer& optimizer) {
  if (has_gradients) return;
  std::size_t parameters = 0;
  for_each_parameter(optimizer, [&](std::size_t, const at::Tensor&) { ++parameters; });
  TORCH_CHECK(
      false, "No inf checks were recorded for this optimizer. In C++: none of its parameters (",
      parameters,
      " in all) has a gradient, or had one at unscale_; call scaler.scale(loss).backward() before "
      "it, and make the optimizer from the parameters() of the model that computed the loss; do "
      "not "
      "step an optimizer whose model this iteration leaves out");
}

inline constexpr const char* kNoneHasNoNewScale =
    "update(new_scale): this scaler has LossScaleKind::none, whose scale stays 1; make it with "
    "{.kind = LossScaleKind::fixed} or dynamic, or call update()";

inline bool clips(const StepOptions& options) { return !is_positive_infinity(options.max_norm); }

/// Clips the unscaled gradients of `plan` in place to `max_norm`, as `clip_grad_norm_` does: those
/// of double by a double, others by the nearest float.
inline void clip_in_place(const StepPlan& plan, const StepOutcome& outcome, double max_norm) {
  const double coefficient = max_norm / (*outcome.grad_norm + 1e-6);
  if (coefficient >= 1) return;  // a NaN spreads, as from libtorch's clipping
  for (const std::vector<at::Tensor>& gradients : values_by_device(plan)) {
    std::vector<at::Tensor> others;
    for (const at::Tensor& gradient : each_once(gradients)) {
      if (gradient.scalar_type() == at::kDouble) {
        gradient.mul_(coefficient);
      } else {
        others.push_back(gradient);
      }
    }
    const auto number = at::TensorOptions().device(gradients.front().device()).dtype(at::kFloat);
    at::Tensor unread = at::zeros({}, number);
    if (!others.empty()) unscale_and_check_(others, unread, at::full({}, coefficient, number));
  }
}

/// Makes the gradients of weights with a float master float, in the plan and in `.grad`.
inline void widen_for_masters(StepPlan& plan) {
  for (StepPlan::Row& row : plan.rows) {
    if (!is_low_precision(row.gradient) || !has_master(row)) continue;
    const NoGraphGuard no_graph(row.gradient.is_inference());
    row.gradient = row.parameter->grad().to(at::kFloat);
    row.parameter->mutable_grad() = row.gradient;
  }
}

/// Gives each master its weight's gradient, for callers that hold master_params(optimizer).
inline void show_at_masters(optim::FusedOptimizer* fused, const StepPlan& plan) {
  for (const StepPlan::Row& row : plan.rows) {
    if (has_master(row)) (void)fused->master_param(*row.parameter);
  }
}

/// Prints the message of a skip, if limited_skip_message returns one, to std::cerr.
inline void print_skip_message(const SkippedStep& skipped) {
  const std::string line = limited_skip_message(skipped);
  if (!line.empty()) std::cerr << line + "\n";
}

}  // namespace detail

MEZZO_INLINE GradScaler::GradScaler(const LossScale& options)
    : rule_(options.checked()),
      initial_state_(rule_.initial_state()),
      on_skip_(&detail::print_skip_message) {}

// --- Unscaling ---------------------------------------------------------------------------------

/// Returns the record of `optimizer`. A record of other parameters belongs to a destroyed optimizer
/// that had the same address, and is replaced by a new one.
MEZZO_INLINE GradScaler::Record& GradScaler::record_of(const torch::optim::Optimizer& optimizer) {
  Record& record = records_[&optimizer];
  std::vector<WeakTensor> params;
  for (const auto& group : optimizer.param_groups()) {
    if (!group.params().empty()) params.emplace_back(group.params().front().getIntrusivePtr());
  }
  const bool is_same =
      record.params.empty() ||
      std::any_of(params.begin(), params.end(), [&record](const WeakTensor& param) {
        return std::find(record.params.begin(), record.params.end(), param) != record.params.end();
      });
  if (!is_same) {
    add_found_inf(record);
    record = {};
  }
  if (record.params.empty()) record.params = std::move(params);
  return record;
}

/// Throws if a gradient of `plan`, which is about to be unscaled, was unscaled for another
/// optimizer, and not written since.
MEZZO_INLINE void GradScaler::check_not_unscaled(const Record& record, AnyOptimizer optimizer,
                                                 const StepPlan& plan) const {
  std::unordered_map<const c10::TensorImpl*, uint32_t> versions;
  for (const auto& [other, its] : records_) {
    if (&its == &record) continue;
    for (const UnscaledGrad& one : its.unscaled) {
      versions[one.grad._unsafe_get_target()] = one.version;
    }
  }
  if (versions.empty() || rule_.kind == LossScaleKind::none) return;
  for (const StepPlan::Row& row : plan.rows) {
    const at::Tensor& gradient = row.parameter->grad();
    const auto found = versions.find(gradient.unsafeGetTensorImpl());
    TORCH_CHECK(
        found == versions.end() || found->second != detail::version_of(gradient), "GradScaler: ",
        detail::OptimizerWords{"", optimizer.optimizer().param_groups()}.parameter(*row.parameter),
        " belongs to two optimizers, and its gradient was unscaled for the other one already; "
        "train it with one of them, or let optimizers of mezzo's step without unscale_, which "
        "leaves gradients as they are");
  }
}

/// Throws if a parameter had no gradient any more when `scale` was called after `unscale_`, and has
/// one now: a backward pass of a scaled loss has made it. A pass that adds to an unscaled gradient
/// is not detected.
MEZZO_INLINE void GradScaler::check_still_unscaled(const Record& record,
                                                   AnyOptimizer optimizer) const {
  for (const UnscaledGrad& one : record.unscaled) {
    if (!one.is_cleared) continue;
    const at::Tensor param(one.param.lock());
    TORCH_CHECK(
        !param.defined() || !param.grad().defined(), "GradScaler: the gradient of ",
        detail::OptimizerWords{"", optimizer.optimizer().param_groups()}.parameter(param),
        " came after unscale_, from a backward pass of a scaled loss: it carries the loss scale, "
        "and "
        "step() would take it as unscaled; call unscale_ after the last backward pass or, between "
        "two passes of one iteration, as SAM needs them, forget_iteration()");
  }
}

/// Notes which unscaled gradients were cleared before a loss is scaled. Threads may call it at
/// once.
MEZZO_INLINE void GradScaler::mark_cleared_grads() {
  for (auto& [optimizer, record] : records_) {
    if (record.stage != Stage::unscaled || rule_.kind == LossScaleKind::none) continue;
    const std::lock_guard lock(scale_->mutex());
    for (UnscaledGrad& one : record.unscaled) {
      const at::Tensor param(one.param.lock());
      if (param.defined() && !param.grad().defined()) one.is_cleared = true;
    }
  }
}

/// Warns once if gradients cannot carry the current scale: since the last `update`, no loss was
/// scaled and no caller has read the scale.
MEZZO_INLINE void GradScaler::warn_unless_scaled(const char* call) {
  if (has_warned_ || rule_.kind != LossScaleKind::dynamic || scale_->is_captured() ||
      scale_->uses() != uses_at_update_) {
    return;
  }
  has_warned_ = true;
  TORCH_WARN(
      "GradScaler: ", call,
      "() is called, and no loss was scaled since the last update(). It divides gradients by "
      "the present loss scale, which may have moved: call scaler.scale(loss).backward() in "
      "each iteration, and scaler.update() once at its end, after the steps of all "
      "optimizers");
}

MEZZO_INLINE at::Tensor GradScaler::unscale_(AnyOptimizer optimizer) {
  optim::FusedOptimizer* const fused = optimizer.mezzos();
  if (!rule_.enabled) {
    if (fused == nullptr) return {};
    const c10::NoGradGuard no_grad;
    StepPlan plan = fused->plan();
    detail::widen_for_masters(plan);
    detail::show_at_masters(fused, plan);
    return {};
  }
  require_scale("unscale_");
  const Stage stage = record_of(optimizer.optimizer()).stage;
  TORCH_CHECK(
      stage != Stage::unscaled,
      "unscale_() has already been called on this optimizer since the last update(). In C++: "
      "call scaler.unscale_(optimizer) once an iteration, after its last backward(), and "
      "scaler.update() at the end of each iteration");
  TORCH_CHECK(stage != Stage::stepped,
              "unscale_() is being called after step(). In C++: call scaler.unscale_(optimizer) "
              "before scaler.step(optimizer), and scaler.update() at the end of each iteration");
  warn_unless_scaled("unscale_");
  return unscale_into(optimizer);
}

/// Unscales in place, after the gradients of weights with masters have become float.
MEZZO_INLINE at::Tensor GradScaler::unscale_into(AnyOptimizer optimizer) {
  const c10::NoGradGuard no_grad;
  optim::FusedOptimizer* const fused = optimizer.mezzos();
  Record& record = records_[&optimizer.optimizer()];
  StepPlan plan = detail::plan_of(optimizer);
  if (plan.has_bare_half && !rule_.allow_fp16_gradients) {
    detail::refuse_half_gradients(optimizer, plan);
  }
  check_not_unscaled(record, optimizer, plan);
  for (const StepPlan::Row& row : plan.rows) {  // what may throw, before any write
    const at::Tensor values = detail::values_of(plan, row);
    TORCH_CHECK(
        detail::can_unscale(values, detail::on_device(scale_->inverse(), values.device())),
        "GradScaler: the gradient of ",
        detail::OptimizerWords{"", optimizer.optimizer().param_groups()}.parameter(*row.parameter),
        " has elements that share memory, as an expanded tensor has, and cannot be unscaled in "
        "place; clone() it first");
  }
  detail::widen_for_masters(plan);
  record.found_inf = at::Tensor();
  for (const auto& values : detail::values_by_device(plan)) {
    const at::Tensor inv_scale = detail::on_device(scale_->inverse(), values.front().device());
    at::Tensor found = at::zeros({}, inv_scale.options());
    detail::unscale_and_check_(values, found, inv_scale);
    found = detail::on_device(found, scale_->original().device());
    record.found_inf = record.found_inf.defined() ? record.found_inf.add(found) : found;
  }
  detail::show_at_masters(fused, plan);
  record.stage = Stage::unscaled;
  record.unscaled.clear();
  for (const StepPlan::Row& row : plan.rows) {
    const at::Tensor& gradient = row.parameter->grad();
    record.unscaled.push_back({WeakTensor(row.parameter->getIntrusivePtr()),
                               WeakTensor(gradient.getIntrusivePtr()),
                               detail::version_of(gradient)});
  }
  return record.found_inf;
}

// --- Stepping ----------------------------------------------------------------------------------

MEZZO_INLINE StepResult GradScaler::step(AnyOptimizer optimizer, const StepOptions& options) {
  TORCH_CHECK(detail::is_above(options.max_norm, 0), "step: max_norm is ", options.max_norm,
              "; it should be positive, and infinite for no clipping");
  const c10::NoGradGuard no_grad;
  if (!rule_.enabled) return step_without_scale(optimizer, options);
  optim::FusedOptimizer* const fused = optimizer.mezzos();
  return fused != nullptr ? step_fused(*fused, options) : step_on_host(optimizer, options);
}

MEZZO_INLINE StepResult GradScaler::step_with_closure(
    AnyOptimizer optimizer, const torch::optim::Optimizer::LossClosure& closure) {
  if (!closure) return step(optimizer);
  TORCH_CHECK(
      !rule_.enabled,
      "Closure use is not currently supported if GradScaler is enabled. In C++: compute the loss "
      "and call scaler.scale(loss).backward() before scaler.step(optimizer), or make the scaler "
      "with GradScaler({.enabled = false})");
  return StepResult(StepOutcome{.ran = true, .value = optimizer.step(closure)});
}

MEZZO_INLINE GradScaler::Record& GradScaler::record_to_step(
    const torch::optim::Optimizer& optimizer) {
  require_scale("step");
  Record& record = record_of(optimizer);
  TORCH_CHECK(
      record.stage != Stage::stepped,
      "step() has already been called since the last update(). In C++: call scaler.update() "
      "at the end of each iteration, after the steps of all its optimizers");
  if (record.stage == Stage::ready) warn_unless_scaled("step");
  return record;
}

/// Adds what `unscale_` has noted to what a read of the gradients found. Afterwards
/// `verdict.found_inf` decides the step, and `record.found_inf` counts for the next scale.
MEZZO_INLINE void GradScaler::check_verdict(Record& record, Verdict& verdict) {
  const at::Tensor found = detail::on_device(verdict.found_inf, scale_->original().device());
  record.found_inf = record.found_inf.defined() ? record.found_inf.add(found) : found;
  verdict.found_inf = detail::on_device(record.found_inf, verdict.inv_scale.device());
}

/// Returns a step's result, which a device tells later.
MEZZO_INLINE StepResult GradScaler::result_of(const Verdict& verdict, bool was_unscaled) {
  const at::Tensor& scale = scale_->original();
  if (scale.is_cpu()) return StepResult(detail::outcome_of(scale, verdict, was_unscaled));
  return StepResult(letter_pool_.send(scale, verdict, was_unscaled));
}

/// Steps with an optimizer that takes a verdict: the device decides, and the host does not wait.
MEZZO_INLINE StepResult GradScaler::step_fused(optim::FusedOptimizer& fused,
                                               const StepOptions& options) {
  Record& record = record_to_step(fused.optimizer());
  const at::Tensor& scale = scale_->original();
  const bool was_unscaled = record.stage == Stage::unscaled;
  StepPlan plan = fused.plan();
  if (!was_unscaled && !rule_.allow_fp16_gradients && plan.has_bare_half) {
    detail::refuse_half_gradients(fused, plan);
  }
  was_unscaled ? check_still_unscaled(record, fused) : check_not_unscaled(record, fused, plan);
  Verdict verdict = fused.read(plan, was_unscaled ? at::ones_like(scale) : scale_->inverse());
  if (!was_unscaled) record.found_inf = at::Tensor();  // of a step that threw
  detail::check_has_gradients(was_unscaled ? record.found_inf.defined() : plan.has_rows(),
                              fused.optimizer());
  check_verdict(record, verdict);
  StepResult result = result_of(verdict, was_unscaled);  // may throw, and so goes first
  fused.apply(std::move(plan), verdict, options);
  record.stage = Stage::stepped;
  const bool is_captured = !scale.is_cpu() && detail::capture_on(scale.device()) != 0;
  if (!is_captured) results_.push_back(result);  // replays do not notify the host
  return result;
}

/// Steps with any other optimizer, as torch.amp does: the gradients are unscaled and clipped where
/// they lie, and the host decides, for which it waits.
MEZZO_INLINE StepResult GradScaler::step_on_host(AnyOptimizer optimizer,
                                                 const StepOptions& options) {
  Record& record = record_to_step(optimizer.optimizer());
  const at::Tensor& scale = scale_->original();
  const bool was_unscaled = record.stage == Stage::unscaled;
  if (!was_unscaled) unscale_into(optimizer);
  detail::check_has_gradients(record.found_inf.defined(), optimizer.optimizer());
  Verdict verdict{.inv_scale = scale_->inverse(), .found_inf = record.found_inf};
  StepPlan plan;
  if (was_unscaled || detail::clips(options)) {
    plan = detail::plan_of(optimizer);
    if (was_unscaled) check_still_unscaled(record, optimizer);
    verdict = detail::read_gradients(plan, at::ones_like(scale));
    check_verdict(record, verdict);
  }
  StepOutcome outcome = letter_pool_.wait_for(scale, verdict, was_unscaled);
  if (outcome.ran) {
    if (detail::clips(options)) detail::clip_in_place(plan, outcome, options.max_norm);
    outcome.value = optimizer.step();
  }
  record.stage = Stage::stepped;
  detail::skipped_optimizer = outcome.ran ? nullptr : &optimizer.optimizer();
  if (options.zero_grad) detail::zero_gradients(optimizer.optimizer());
  return results_.emplace_back(std::move(outcome));
}

/// Steps for a disabled scaler: clips, sets to zero and steps, whatever the gradients are.
MEZZO_INLINE StepResult GradScaler::step_without_scale(AnyOptimizer optimizer,
                                                       const StepOptions& options) {
  optim::FusedOptimizer* const fused = optimizer.mezzos();
  const bool wants_plan = fused != nullptr || detail::clips(options);
  StepPlan plan = wants_plan ? detail::plan_of(optimizer) : StepPlan();
  Verdict verdict;
  StepOutcome outcome{.ran = true, .value = at::Tensor()};
  if (detail::clips(options) && plan.has_rows()) {
    const at::Device device = plan.rows.empty() ? at::kCPU : plan.rows.front().gradient.device();
    const at::Tensor one = at::ones({}, at::TensorOptions().device(device).dtype(at::kFloat));
    verdict = fused != nullptr ? fused->read(plan, one) : detail::read_gradients(plan, one);
    verdict.found_inf.zero_();
    if (fused != nullptr && !device.is_cpu()) {
      StepResult result(letter_pool_.send(one, verdict, /*was_unscaled=*/false));
      fused->apply(std::move(plan), verdict, options);
      return result;
    }
    outcome = letter_pool_.wait_for(one, verdict, /*was_unscaled=*/false);
  }
  if (fused != nullptr) {
    fused->apply(std::move(plan), verdict, options);
    return StepResult(std::move(outcome));
  }
  if (outcome.grad_norm) detail::clip_in_place(plan, outcome, options.max_norm);
  outcome.value = optimizer.step();
  if (options.zero_grad) detail::zero_gradients(optimizer.optimizer());
  return StepResult(std::move(outcome));
}

// --- The end of an iteration -------------------------------------------------------------------

MEZZO_INLINE void GradScaler::update() {
  if (!rule_.enabled) return;
  require_scale("update");
  for (const auto& [optimizer, record] : records_) add_found_inf(record);
  TORCH_CHECK(
      found_inf_.defined(),
      "No inf checks were recorded prior to update. In C++: call scaler.step(optimizer), or "
      "scaler.unscale_(optimizer), before scaler.update(), which is called once an "
      "iteration; optimizer.step() alone checks nothing");
  scale_->advance(rule_, found_inf_);
  finish_iteration();
}

/// Adds the found_inf of an optimizer to that of the iteration. For an optimizer that was unscaled
/// but not stepped, also adds a result, which `on_skip` reports.
MEZZO_INLINE void GradScaler::add_found_inf(const Record& record) {
  const at::Tensor& found = record.found_inf;
  if (!found.defined()) return;
  found_inf_ = found_inf_.defined() ? found_inf_.add(found) : found;
  if (record.stage != Stage::unscaled) return;
  const Verdict verdict{.inv_scale = scale_->inverse(), .found_inf = found};
  results_.push_back(result_of(verdict, /*was_unscaled=*/false));
}

MEZZO_INLINE void GradScaler::update(double new_scale) {
  if (!rule_.enabled) return;
  require_scale("update");
  TORCH_CHECK(rule_.kind != LossScaleKind::none, detail::kNoneHasNoNewScale);
  const double high = std::min<double>(rule_.max_scale, detail::kLargestFloat);
  detail::check_scale_value("new_scale", new_scale, rule_.min_scale, high);
  for (const auto& [optimizer, record] : records_) add_found_inf(record);
  scale_->write_scale(static_cast<float>(new_scale));
  finish_iteration();
  scale_->count_use();  // the caller knows it, and may multiply by it
}

MEZZO_INLINE void GradScaler::update(const at::Tensor& new_scale) {
  if (!rule_.enabled) return;
  require_scale("update");
  TORCH_CHECK(new_scale.defined() && new_scale.numel() == 1 && !new_scale.requires_grad(),
              "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
              "torch.FloatTensor with requires_grad=False. In C++: pass a double, or a tensor of "
              "one element that requires no grad, not one that is ",
              detail::tensor_words(new_scale),
              new_scale.defined() && new_scale.requires_grad() ? " and requires grad" : "");
  TORCH_CHECK(rule_.kind != LossScaleKind::none, detail::kNoneHasNoNewScale);
  for (const auto& [optimizer, record] : records_) add_found_inf(record);
  scale_->write_scale(new_scale, rule_.min_scale, rule_.max_scale);
  finish_iteration();
  scale_->count_use();
}

/// Forgets the optimizers, and tells `on_skip` of all iterations that are known by now to have
/// skipped a step: reads the results that have arrived, in order, and never waits. On the CPU this
/// iteration's have; a skip on a device waits for the next iteration's, which has the scale that
/// followed.
MEZZO_INLINE void GradScaler::finish_iteration() {
  Results results = std::exchange(results_, {});
  forget_iteration();
  uses_at_update_ = scale_->uses();
  if (detail::capture_on(scale_->original().device()) != 0) return;  // no callback in a graph
  if (!results.empty()) {
    iterations_.push_back(std::move(results));
  } else if (iterations_.empty()) {
    times_at_floor_ = times_in_a_row_ = 0;
  }
  const auto is_there = [](const StepResult& result) { return result.ready(); };
  while (!iterations_.empty() &&
         std::all_of(iterations_[0].begin(), iterations_[0].end(), is_there)) {
    std::optional<float> skipped_scale, next_scale;
    for (const StepResult& result : iterations_[0]) {
      if (result.found_inf()) skipped_scale = result.scale();
    }
    if (scale_->original().is_cpu()) {
      next_scale = scale_->original().item<float>();
    } else if (iterations_.size() > 1 && iterations_[1][0].ready()) {
      next_scale = iterations_[1][0].scale();
    }
    if (skipped_scale && !next_scale) return;
    for (const StepResult& result : std::exchange(iterations_[0], {})) clipping_.see(result);
    iterations_.pop_front();
    if (skipped_scale) {
      tell_of_skip(*skipped_scale, *next_scale);
    } else {
      times_at_floor_ = times_in_a_row_ = 0;
    }
  }
}

MEZZO_INLINE void GradScaler::tell_of_skip(float scale, float next_scale) {
  const bool is_at_floor = scale == next_scale && next_scale <= rule_.min_scale;
  times_at_floor_ = is_at_floor ? times_at_floor_ + 1 : 0;
  ++times_in_a_row_;
  const SkipCallback callback = on_skip_;  // a copy: it may silence or replace itself
  if (!callback) return;
  callback({.loss_id = rule_.loss_id,
            .scale = scale,
            .next_scale = next_scale,
            .times_at_floor = times_at_floor_,
            .times_in_a_row = times_in_a_row_});
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

MEZZO_INLINE double GradScaler::get_scale() const {
  if (!rule_.enabled) return 1.0;
  scale_->count_use();  // the caller may multiply by it
  return read_state().scale;
}

template <class Number>
void GradScaler::change_rule(const char* name, Number LossScale::*option, Number value) {
  TORCH_CHECK(rule_.kind == LossScaleKind::dynamic, name,
              " belongs to a dynamic loss scale, and this scaler's is constant; make the scaler "
              "with {.kind = LossScaleKind::dynamic}, the default");
  LossScale options = rule_;
  options.*option = value;
  rule_ = options.checked();
}

MEZZO_INLINE void GradScaler::set_growth_factor(double growth_factor) {
  change_rule("growth_factor", &LossScale::growth_factor, growth_factor);
}

MEZZO_INLINE void GradScaler::set_backoff_factor(double backoff_factor) {
  change_rule("backoff_factor", &LossScale::backoff_factor, backoff_factor);
}

MEZZO_INLINE void GradScaler::set_growth_interval(int64_t growth_interval) {
  change_rule("growth_interval", &LossScale::growth_interval, growth_interval);
}

MEZZO_INLINE LossScaleState GradScaler::read_state() const {
  return scale_->defined() ? scale_->read() : initial_state_;
}

MEZZO_INLINE GradScaler::StateDict GradScaler::state_dict() const {
  if (!rule_.enabled) return {};
  scale_->count_use();
  const LossScaleState state = read_state();
  return {{"scale", state.scale},
          {"growth_factor", rule_.growth_factor},
          {"backoff_factor", rule_.backoff_factor},
          {"growth_interval", static_cast<double>(rule_.growth_interval)},
          {"_growth_tracker", state.growth_tracker},
          {"min_scale", rule_.min_scale},
          {"max_scale", rule_.max_scale},
          {"hysteresis", static_cast<double>(rule_.hysteresis)},
          {"_hysteresis_left", state.hysteresis_left},
          {"_loss_scale_kind", static_cast<double>(rule_.kind)}};
}

MEZZO_INLINE void GradScaler::load_state_dict(const StateDict& state) {
  if (!rule_.enabled) return;
  TORCH_CHECK(!state.empty(),
              "The source state dict is empty, possibly because it was saved from a disabled "
              "instance of GradScaler. In C++: make this scaler with "
              "GradScaler({.enabled = false}) too, or leave load_state_dict out and begin with "
              "a new scale");
  const auto value = [&state](const char* key, std::optional<double> fallback = std::nullopt) {
    const auto found = state.find(key);
    TORCH_CHECK(found != state.end() || fallback, "The source state dict lacks \"", key,
                "\"; give load_state_dict what state_dict() of a GradScaler returned");
    return found != state.end() ? found->second : *fallback;
  };
  const auto count = [&value](const char* key, std::optional<double> fallback = std::nullopt) {
    const double number = value(key, fallback);
    TORCH_CHECK(detail::is_finite(number) && number >= 0 &&
                    number <= std::numeric_limits<int32_t>::max() && number == std::floor(number),
                "The source state dict has ", key, " = ", number,
                "; it should be a whole number from 0 to 2147483647");
    return static_cast<int64_t>(number);
  };
  const int64_t kind = count("_loss_scale_kind", static_cast<double>(rule_.kind));
  TORCH_CHECK(kind <= static_cast<int64_t>(LossScaleKind::dynamic),
              "The source state dict has _loss_scale_kind = ", kind,
              "; it should be 0 (none), 1 (fixed) or 2 (dynamic)");
  LossScale rule = rule_;
  rule.init_scale = value("scale");
  rule.growth_factor = value("growth_factor");
  rule.backoff_factor = value("backoff_factor");
  rule.growth_interval = count("growth_interval");
  rule.min_scale = value("min_scale", rule_.min_scale);
  rule.max_scale = value("max_scale", rule_.max_scale);
  rule.hysteresis = count("hysteresis", static_cast<double>(rule_.hysteresis));
  rule.kind = static_cast<LossScaleKind>(kind);
  rule = rule.checked();
  LossScaleState next = rule.initial_state();
  next.growth_tracker = static_cast<int32_t>(count("_growth_tracker"));
  next.hysteresis_left = static_cast<int32_t>(count("_hysteresis_left", next.hysteresis_left));
  if (scale_->defined()) detail::require_update_kernel(rule, scale_->original().device());
  rule_ = rule;
  initial_state_ = next;
  if (scale_->defined()) scale_->write(next);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
