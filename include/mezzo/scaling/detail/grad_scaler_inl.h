#pragma once

#include <mezzo/base/detail/describe.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/detail/inference_mode.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/kernels/unscale.h>
#include <mezzo/kernels/graph_capture.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/detail/optimizer_description.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline bool has_master(const StepPlan::Param& param) {
  return param.storage == optim::WeightStorage::fp32_master;
}

inline void check_has_gradients(bool has_gradients, const torch::optim::Optimizer& optimizer) {
  TORCH_CHECK(
      has_gradients,
      "No inf checks were recorded for this optimizer. In C++: none of its parameters (",
      OptimizerDescription{"", optimizer.param_groups()}.parameters().size(),
      " in all) has a gradient, or had one at unscale_; call scaler.scale(loss).backward() before "
      "it, and make the optimizer from the parameters() of the model that computed the loss; do "
      "not step an optimizer whose model this iteration leaves out");
}

inline bool has_max_norm(const StepOptions& options) {
  return !is_positive_infinity(options.max_norm);
}

/// Makes the gradients of weights with a float master float, in the plan and in `.grad`, and gives
/// them to the masters, for callers that hold master_params(optimizer).
inline void set_master_grads(optim::MixedPrecisionOptimizer* fused, StepPlan& plan) {
  for (StepPlan::Param& param : plan.params) {
    if (!has_master(param)) continue;
    if (is_low_precision(param.gradient)) {
      const NoGradInferenceGuard no_graph(param.gradient.is_inference());
      param.gradient = param.parameter->grad().to(at::kFloat);
      param.parameter->mutable_grad() = param.gradient;
    }
    (void)fused->master_param(*param.parameter);
  }
}

/// Takes the step of an optimizer that is not mezzo's, with gradients that carry no scale, or skips
/// it.
inline StepResult maybe_opt_step(OptimizerRef optimizer, const std::vector<at::Tensor>& gradients,
                                 StepResult::Values outcome, const StepOptions& options) {
  if (outcome.applied) {
    if (has_max_norm(options) && outcome.grad_norm) {
      clip_in_place(gradients, *outcome.grad_norm, options.max_norm);
    }
    outcome.step_return = optimizer.step();
  }
  skipped_optimizer = outcome.applied ? nullptr : &optimizer.optimizer();
  if (options.zero_grad) zero_gradients(optimizer.optimizer());
  return StepResult(std::move(outcome));
}

/// Adds a flag to the sum of several, which is undefined before the first.
inline void add_flag(at::Tensor& sum, const at::Tensor& flag) {
  sum = sum.defined() ? sum.add(flag) : flag;
}

}  // namespace detail

MEZZO_INLINE GradScaler::GradScaler(const GradScalerOptions& options)
    : options_(options.validated()), initial_state_(options_.initial_state()) {}

// --- Unscaling ---------------------------------------------------------------------------------

MEZZO_INLINE GradScaler::State& GradScaler::get_state(const torch::optim::Optimizer& optimizer) {
  State present(optimizer);
  State& state = per_optimizer_states_.try_emplace(&optimizer, present).first->second;
  if (!state.is_of_same_optimizer(present)) {
    add_found_inf(state);
    state = std::move(present);
  }
  return state;
}

/// Throws, naming the parameter, if a gradient of `plan` may not be unscaled.
MEZZO_INLINE void GradScaler::check_scaled(const torch::optim::Optimizer& optimizer,
                                           const StepPlan& plan) const {
  const bool refuses_half = plan.has_fp16_without_master && !options_.allow_fp16_gradients;
  for (const StepPlan::Param& param : plan.params) {
    const bool is_half = param.gradient.scalar_type() == at::kHalf && !detail::has_master(param);
    TORCH_CHECK(
        !refuses_half || !is_half, "Attempting to unscale FP16 gradients. In C++: the gradient of ",
        detail::describe_param(optimizer, *param.parameter),
        " is float16, in which it underflows without the loss scale; keep the weights in "
        "float32 and run the forward pass under mezzo::AutocastGuard, or train float32 masters "
        "with mezzo::MasterWeights or an optimizer of mezzo's that is given "
        "{.weight_storage = WeightStorage::fp32_master} (GradScaler({.allow_fp16_gradients = "
        "true}) unscales in float16 all the same)");
  }
  State::check_not_unscaled(per_optimizer_states_, optimizer, plan);
}

/// Notes which unscaled gradients were cleared before a loss is scaled. Threads may call it at
/// once.
MEZZO_INLINE void GradScaler::mark_cleared_grads() {
  if (per_optimizer_states_.empty()) return;
  const std::lock_guard lock(*mutex_);
  for (auto& [optimizer, state] : per_optimizer_states_) state.mark_cleared_grads();
}

MEZZO_INLINE at::Tensor GradScaler::unscale_(OptimizerRef optimizer) {
  optim::MixedPrecisionOptimizer* const fused = optimizer.mixed_precision();
  if (!options_.enabled) {
    if (fused == nullptr) return {};
    const c10::NoGradGuard no_grad;
    StepPlan plan = fused->plan();
    detail::set_master_grads(fused, plan);
    return {};
  }
  check_scale_initialized("unscale_");
  State& state = get_state(optimizer.optimizer());
  TORCH_CHECK(
      state.stage != OptState::unscaled,
      "unscale_() has already been called on this optimizer since the last update(). In C++: "
      "call scaler.unscale_(optimizer) once an iteration, after its last backward(), and "
      "scaler.update() at the end of each iteration");
  TORCH_CHECK(state.stage != OptState::stepped,
              "unscale_() is being called after step(). In C++: call scaler.unscale_(optimizer) "
              "before scaler.step(optimizer), and scaler.update() at the end of each iteration");
  reporter_.warn_unless_used(options_, "unscale_");
  unscale_grads(optimizer, state);
  return state.found_inf;
}

/// Unscales in place, after the gradients of weights with masters have become float.
MEZZO_INLINE void GradScaler::unscale_grads(OptimizerRef optimizer, State& state) {
  const c10::NoGradGuard no_grad;
  StepPlan plan = detail::make_plan(optimizer);
  check_scaled(optimizer.optimizer(), plan);
  const at::Tensor& inverse = scale_.inverse;
  auto param = plan.params.begin();
  for (const at::Tensor& gradient : detail::dense_gradients(plan)) {  // before any write
    TORCH_CHECK(detail::can_unscale(gradient, detail::to_device(inverse, gradient.device())),
                "GradScaler: the gradient of ",
                detail::describe_param(optimizer.optimizer(), *param->parameter),
                " has elements that share memory, as an expanded tensor has, and cannot be "
                "unscaled in place; clone() it first");
    ++param;
  }
  detail::set_master_grads(optimizer.mixed_precision(), plan);
  state.found_inf = at::Tensor();
  detail::for_each_device(detail::dense_gradients(plan), [&](const auto& here) {
    const at::Tensor inv_scale = detail::to_device(inverse, here.front().device());
    at::Tensor found = at::zeros({}, inv_scale.options());
    detail::unscale_and_check_({here.begin(), here.end()}, found, inv_scale);
    detail::add_flag(state.found_inf, detail::to_device(found, inverse.device()));
  });
  state.stage = OptState::unscaled;
  if (options_.mode != LossScaleMode::none) state.set_unscaled_grads(plan);
}

// --- Stepping ----------------------------------------------------------------------------------

MEZZO_INLINE StepResult GradScaler::step(OptimizerRef optimizer, const StepOptions& options) {
  TORCH_CHECK(detail::is_above(options.max_norm, 0), "step: max_norm is ", options.max_norm,
              "; it should be positive, and infinite for no clipping");
  const c10::NoGradGuard no_grad;
  if (!options_.enabled) return step_disabled(optimizer, options);
  optim::MixedPrecisionOptimizer* const fused = optimizer.mixed_precision();
  return fused != nullptr ? step_fused(*fused, options) : step_with_host_sync(optimizer, options);
}

MEZZO_INLINE StepResult GradScaler::step_with_closure(
    OptimizerRef optimizer, const torch::optim::Optimizer::LossClosure& closure) {
  if (!closure) return step(optimizer);
  TORCH_CHECK(
      !options_.enabled,
      "Closure use is not currently supported if GradScaler is enabled. In C++: compute the loss "
      "and call scaler.scale(loss).backward() before scaler.step(optimizer), or make the scaler "
      "with GradScaler({.enabled = false})");
  return StepResult(StepResult::Values{.applied = true, .step_return = optimizer.step(closure)});
}

MEZZO_INLINE GradScaler::State& GradScaler::get_state_to_step(
    const torch::optim::Optimizer& optimizer) {
  check_scale_initialized("step");
  State& state = get_state(optimizer);
  TORCH_CHECK(
      state.stage != OptState::stepped,
      "step() has already been called since the last update(). In C++: call scaler.update() "
      "at the end of each iteration, after the steps of all its optimizers");
  if (state.stage == OptState::ready) reporter_.warn_unless_used(options_, "step");
  return state;
}

/// Merges the found_inf of `unscale_` into that of this read. Afterwards
/// `stats.found_inf` decides the step, and `state.found_inf` counts for the next scale.
MEZZO_INLINE void GradScaler::merge_found_inf(State& state, GradStats& stats) const {
  detail::add_flag(state.found_inf, detail::to_device(stats.found_inf, scale_.scale.device()));
  stats.found_inf = detail::to_device(state.found_inf, stats.inv_scale.device());
}

/// Steps with an optimizer that takes GradStats: the device decides, and the host does not wait.
MEZZO_INLINE StepResult GradScaler::step_fused(optim::MixedPrecisionOptimizer& fused,
                                               const StepOptions& options) {
  State& state = get_state_to_step(fused.optimizer());
  const bool was_unscaled = state.stage == OptState::unscaled;
  StepPlan plan = fused.plan();
  was_unscaled ? state.check_still_unscaled(fused.optimizer())
               : check_scaled(fused.optimizer(), plan);
  GradStats stats =
      fused.grad_stats(plan, was_unscaled ? at::ones_like(scale_.scale) : scale_.inverse);
  if (!was_unscaled) state.found_inf = at::Tensor();  // of a step that threw
  detail::check_has_gradients(was_unscaled ? state.found_inf.defined() : plan.has_params(),
                              fused.optimizer());
  merge_found_inf(state, stats);
  StepResult result = future_pool_.make_result(scale_.scale, stats, was_unscaled);  // may throw
  fused.apply(std::move(plan), stats, options);
  state.stage = OptState::stepped;
  const bool is_captured = detail::current_capture_id(scale_.scale.device()) != 0;
  if (!is_captured) reporter_.observe(result);  // replays do not notify the host
  return result;
}

/// Steps with any other optimizer, as torch.amp does: the gradients are unscaled and clipped where
/// they lie, and the host decides, for which it waits.
MEZZO_INLINE StepResult GradScaler::step_with_host_sync(OptimizerRef optimizer,
                                                        const StepOptions& options) {
  State& state = get_state_to_step(optimizer.optimizer());
  const at::Tensor& scale = scale_.scale;
  const bool was_unscaled = state.stage == OptState::unscaled;
  if (!was_unscaled) unscale_grads(optimizer, state);
  detail::check_has_gradients(state.found_inf.defined(), optimizer.optimizer());
  GradStats stats{.inv_scale = scale_.inverse, .found_inf = state.found_inf};
  std::vector<at::Tensor> gradients;
  if (was_unscaled || detail::has_max_norm(options)) {
    gradients = detail::dense_gradients(detail::make_plan(optimizer));
    if (was_unscaled) state.check_still_unscaled(optimizer.optimizer());
    stats = detail::compute_grad_stats_across_devices(gradients, at::ones_like(scale));
    merge_found_inf(state, stats);
  }
  const StepResult::Values outcome = future_pool_.make_result(scale, stats, was_unscaled).values();
  const StepResult result = detail::maybe_opt_step(optimizer, gradients, outcome, options);
  state.stage = OptState::stepped;
  reporter_.observe(result);
  return result;
}

/// Steps for a disabled scaler: has_max_norm, sets to zero and steps, whatever the gradients are.
MEZZO_INLINE StepResult GradScaler::step_disabled(OptimizerRef optimizer,
                                                  const StepOptions& options) {
  optim::MixedPrecisionOptimizer* const fused = optimizer.mixed_precision();
  const bool wants_plan = fused != nullptr || detail::has_max_norm(options);
  StepPlan plan = wants_plan ? detail::make_plan(optimizer) : StepPlan();
  std::vector<at::Tensor> gradients;
  GradStats stats;
  StepResult result(StepResult::Values{.applied = true, .step_return = at::Tensor()});
  if (detail::has_max_norm(options) && plan.has_params()) {
    gradients = detail::dense_gradients(plan);
    const at::Device device = gradients.empty() ? at::kCPU : gradients.front().device();
    const at::Tensor one = at::ones({}, at::TensorOptions().device(device).dtype(at::kFloat));
    stats = fused != nullptr ? fused->grad_stats(plan, one)
                             : detail::compute_grad_stats_across_devices(gradients, one);
    stats.found_inf.zero_();
    result = future_pool_.make_result(one, stats, /*was_unscaled=*/false);
  }
  if (fused == nullptr) {
    return detail::maybe_opt_step(optimizer, gradients, result.values(), options);
  }
  fused->apply(std::move(plan), stats, options);
  return result;
}

// --- The end of an iteration -------------------------------------------------------------------

MEZZO_INLINE void GradScaler::update() {
  if (!options_.enabled) return;
  check_scale_initialized("update");
  for (const auto& [optimizer, state] : per_optimizer_states_) add_found_inf(state);
  TORCH_CHECK(
      found_inf_.defined(),
      "No inf checks were recorded prior to update. In C++: call scaler.step(optimizer), or "
      "scaler.unscale_(optimizer), before scaler.update(), which is called once an "
      "iteration; optimizer.step() alone checks nothing");
  detail::update_scale_(options_, scale_, found_inf_);
  finish_iteration();
}

/// Adds the found_inf of an optimizer to that of the iteration. For an optimizer that was unscaled
/// but not stepped, also adds a result, which `on_skip` reports.
MEZZO_INLINE void GradScaler::add_found_inf(const State& state) {
  if (!state.found_inf.defined()) return;
  detail::add_flag(found_inf_, state.found_inf);
  if (state.stage != OptState::unscaled) return;
  const GradStats stats{.inv_scale = scale_.inverse, .found_inf = state.found_inf};
  reporter_.observe(future_pool_.make_result(scale_.scale, stats, /*was_unscaled=*/false));
}

MEZZO_INLINE bool GradScaler::can_set_scale() const {
  if (!options_.enabled) return false;
  check_scale_initialized("update");
  TORCH_CHECK(options_.mode != LossScaleMode::none,
              "update(new_scale): this scaler has LossScaleMode::none, whose scale stays 1; make "
              "it with {.mode = LossScaleMode::fixed} or dynamic, or call update()");
  return true;
}

MEZZO_INLINE void GradScaler::update(double new_scale) {
  if (!can_set_scale()) return;
  const double high = std::min<double>(options_.max_scale, detail::kFloatMax);
  detail::check_scale_value("new_scale", new_scale, options_.min_scale, high);
  set_scale(at::full({}, new_scale, scale_.scale.options()));
}

MEZZO_INLINE void GradScaler::update(const at::Tensor& new_scale) {
  if (!can_set_scale()) return;
  TORCH_CHECK(new_scale.defined() && new_scale.numel() == 1 && !new_scale.requires_grad(),
              "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
              "torch.FloatTensor with requires_grad=False. In C++: pass a double, or a tensor of "
              "one element that requires no grad, not one that is ",
              detail::describe(new_scale),
              new_scale.defined() && new_scale.requires_grad() ? " and requires grad" : "");
  set_scale(new_scale);
}

/// Ends the iteration with a scale of the caller's, who may multiply a loss by it.
MEZZO_INLINE void GradScaler::set_scale(const at::Tensor& new_scale) {
  for (const auto& [optimizer, state] : per_optimizer_states_) add_found_inf(state);
  scale_.scale.copy_(new_scale.reshape({})).clamp_(options_.min_scale, options_.max_scale);
  at::reciprocal_out(scale_.inverse, scale_.scale);
  finish_iteration();
  reporter_.note_use();
}

/// Clears the states of the optimizers, and reports skips.
MEZZO_INLINE void GradScaler::finish_iteration() {
  per_optimizer_states_.clear();
  found_inf_ = at::Tensor();
  reporter_.finish_iteration(options_, scale_.scale);
}

MEZZO_INLINE void GradScaler::check_scale_initialized(const char* call) const {
  TORCH_CHECK(
      scale_.scale.defined(), "Attempted ", call,
      " but _scale is None.  This may indicate your script did not use scaler.scale(loss or "
      "outputs) earlier in the iteration. In C++: call scaler.scale(loss).backward() first; the "
      "scale is made with the first tensor that is scaled");
}

/// Returns the scale on the device of a loss. Threads may call it at once.
MEZZO_INLINE at::Tensor GradScaler::get_scale_on(at::Device device) {
  const std::lock_guard lock(*mutex_);
  if (!scale_.scale.defined()) lazy_init_scale(device);
  reporter_.note_use(detail::current_capture_id(device) != 0);
  return detail::to_device(scale_.scale, device);
}

MEZZO_INLINE void GradScaler::lazy_init_scale(at::Device device) {
  detail::check_update_kernel(options_, device);
  detail::check_not_capturing(device, "the loss scale");
  const c10::InferenceMode no_inference(
      false);  // inference tensors cannot be written outside of it
  const auto number = at::TensorOptions().device(device).dtype(at::kFloat);
  const LossScaleState& state = initial_state_;
  scale_ = {at::full({}, state.scale, number),
            at::full({}, detail::inverse_scale(state.scale), number),
            at::full({}, state.growth_tracker, number.dtype(at::kInt)),
            at::full({}, state.hysteresis_tracker, number.dtype(at::kInt))};
}

// --- State -------------------------------------------------------------------------------------

MEZZO_INLINE double GradScaler::get_scale() const {
  if (!options_.enabled) return 1.0;
  reporter_.note_use();
  return scale_.scale.defined() ? scale_.scale.item<float>() : initial_state_.scale;
}

template <class Number>
void GradScaler::set_option(const char* name, Number GradScalerOptions::*option, Number value) {
  TORCH_CHECK(options_.mode == LossScaleMode::dynamic, name,
              " belongs to a dynamic loss scale, and this scaler's is constant; make the scaler "
              "with {.mode = LossScaleMode::dynamic}, the default");
  GradScalerOptions options = options_;
  options.*option = value;
  options_ = options.validated();
}

MEZZO_INLINE void GradScaler::set_growth_factor(double growth_factor) {
  set_option("growth_factor", &GradScalerOptions::growth_factor, growth_factor);
}

MEZZO_INLINE void GradScaler::set_backoff_factor(double backoff_factor) {
  set_option("backoff_factor", &GradScalerOptions::backoff_factor, backoff_factor);
}

MEZZO_INLINE void GradScaler::set_growth_interval(int64_t growth_interval) {
  set_option("growth_interval", &GradScalerOptions::growth_interval, growth_interval);
}

/// Returns the state for a caller, who may multiply a loss by the scale.
MEZZO_INLINE LossScaleState GradScaler::read_state() const {
  reporter_.note_use();
  if (!scale_.scale.defined()) return initial_state_;
  return {.scale = scale_.scale.item<float>(),
          .growth_tracker = scale_.growth_tracker.item<int32_t>(),
          .hysteresis_tracker = scale_.hysteresis_tracker.item<int32_t>()};
}

MEZZO_INLINE GradScaler::StateDict GradScaler::state_dict() const {
  if (!options_.enabled) return {};
  const LossScaleState state = read_state();
  return {{"scale", state.scale},
          {"growth_factor", options_.growth_factor},
          {"backoff_factor", options_.backoff_factor},
          {"growth_interval", static_cast<double>(options_.growth_interval)},
          {"_growth_tracker", state.growth_tracker},
          {"min_scale", options_.min_scale},
          {"max_scale", options_.max_scale},
          {"hysteresis", static_cast<double>(options_.hysteresis)},
          {"_hysteresis_tracker", state.hysteresis_tracker},
          {"_loss_scale_mode", static_cast<double>(options_.mode)}};
}

MEZZO_INLINE void GradScaler::load_state_dict(const StateDict& state) {
  if (!options_.enabled) return;
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
  const int64_t mode = count("_loss_scale_mode", static_cast<double>(options_.mode));
  TORCH_CHECK(mode <= static_cast<int64_t>(LossScaleMode::dynamic),
              "The source state dict has _loss_scale_mode = ", mode,
              "; it should be 0 (none), 1 (fixed) or 2 (dynamic)");
  GradScalerOptions options = options_;
  options.init_scale = value("scale");
  options.growth_factor = value("growth_factor");
  options.backoff_factor = value("backoff_factor");
  options.growth_interval = count("growth_interval");
  options.min_scale = value("min_scale", options_.min_scale);
  options.max_scale = value("max_scale", options_.max_scale);
  options.hysteresis = count("hysteresis", static_cast<double>(options_.hysteresis));
  options.mode = static_cast<LossScaleMode>(mode);
  options = options.validated();
  LossScaleState next = options.initial_state();
  next.growth_tracker = static_cast<int32_t>(count("_growth_tracker"));
  next.hysteresis_tracker =
      static_cast<int32_t>(count("_hysteresis_tracker", next.hysteresis_tracker));
  if (scale_.scale.defined()) detail::check_update_kernel(options, scale_.scale.device());
  options_ = options;
  initial_state_ = next;
  if (!scale_.scale.defined()) return;
  scale_.scale.fill_(next.scale);
  scale_.inverse.fill_(detail::inverse_scale(next.scale));
  scale_.growth_tracker.fill_(next.growth_tracker);
  scale_.hysteresis_tracker.fill_(next.hysteresis_tracker);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
