#pragma once

#include <mezzo/base/detail/describe.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/detail/inference_mode.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/kernels/graph_capture.h>
#include <mezzo/kernels/unscale.h>
#include <mezzo/optim/detail/grad_hooks.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/detail/optimizer_description.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/Context.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline bool has_fp32_master(const StepPlan::Param& param) {
  return param.storage == optim::WeightStorage::fp32_master;
}

inline void check_has_gradients(bool has_gradients, const torch::optim::Optimizer& optimizer) {
  TORCH_CHECK(
      has_gradients, "No inf checks were recorded for this optimizer. In C++: none of its ",
      OptimizerDescription{"", optimizer.param_groups()}.parameters().size(),
      " parameters has a gradient, or had one at unscale_; call scaler.scale(loss).backward() "
      "first, construct the optimizer with the parameters() of the model that computed the loss, "
      "and do not step an optimizer whose model did not take part in this iteration");
}

inline bool has_max_norm(const StepOptions& options) {
  return !is_positive_infinity(options.max_norm);
}

/// Casts the gradients of weights with a float32 master to float32, in the plan and in `.grad`.
/// Calls master_param() so that the masters, which callers may hold, share these gradients.
inline void set_master_grads(optim::MixedPrecisionOptimizer* optimizer, StepPlan& plan) {
  for (StepPlan::Param& param : plan.params) {
    if (!has_fp32_master(param)) continue;
    if (is_low_precision(param.gradient)) {
      const NoGradInferenceGuard no_grad(param.gradient.is_inference());
      param.gradient = param.parameter->grad().to(at::kFloat);
      param.parameter->mutable_grad() = param.gradient;
    }
    (void)optimizer->master_param(*param.parameter);
  }
}

/// Clips the unscaled gradients and calls `optimizer.step()`, or skips the step if one is inf or
/// NaN. For optimizers of torch::optim.
inline StepResult maybe_opt_step(OptimizerRef optimizer, const std::vector<at::Tensor>& gradients,
                                 StepResult::Values values, const StepOptions& options) {
  if (values.applied) {
    if (has_max_norm(options) && values.grad_norm) {
      clip_in_place(gradients, *values.grad_norm, options.max_norm);
    }
    values.step_return = optimizer.step();
  }
  skipped_optimizer = values.applied ? nullptr : &optimizer.optimizer();
  if (options.zero_grad) zero_gradients(optimizer.optimizer());
  return StepResult(std::move(values));
}

/// Adds `flag` to `sum`, which is undefined before the first flag.
inline void add_flag(at::Tensor& sum, const at::Tensor& flag) {
  sum = sum.defined() ? sum.add(flag) : flag;
}

}  // namespace detail

MEZZO_INLINE GradScaler::GradScaler(const GradScalerOptions& options)
    : options_(options.validated()), initial_state_(options_.initial_state()) {}

MEZZO_INLINE GradScaler::GradScaler(at::Device device, const GradScalerOptions& options)
    : GradScaler(options) {
  if (!options_.enabled || !device.is_cuda() || at::hasCUDA()) return;
  TORCH_WARN(
      "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling. In C++: "
      "GradScaler() without a device also scales on other devices");
  options_.enabled = false;
}

// --- Unscaling ---------------------------------------------------------------------------------

MEZZO_INLINE GradScaler::PerOptimizerState& GradScaler::get_optimizer_state(
    const torch::optim::Optimizer& optimizer) {
  PerOptimizerState new_state(optimizer);
  PerOptimizerState& state = per_optimizer_states_.try_emplace(&optimizer, new_state).first->second;
  if (!state.is_of_same_optimizer(new_state)) {
    add_found_inf(state);
    state = std::move(new_state);
  }
  return state;
}

/// Throws if a gradient of `plan` must not be unscaled, naming its parameter.
MEZZO_INLINE void GradScaler::check_can_unscale(const torch::optim::Optimizer& optimizer,
                                                const StepPlan& plan) const {
  const bool rejects_fp16 = plan.has_fp16_without_master && !options_.allow_fp16_gradients;
  for (const StepPlan::Param& param : plan.params) {
    const bool is_fp16 =
        param.gradient.scalar_type() == at::kHalf && !detail::has_fp32_master(param);
    TORCH_CHECK(
        !rejects_fp16 || !is_fp16, "Attempting to unscale FP16 gradients. In C++: the gradient of ",
        detail::describe_param(optimizer, *param.parameter),
        " is float16, in which it underflows without the loss scale; keep the weights in float32 "
        "and run the forward pass under mezzo::AutocastGuard, or train float32 masters with "
        "mezzo::MasterWeights or a mezzo optimizer with {.weight_storage = "
        "WeightStorage::fp32_master} (GradScaler({.allow_fp16_gradients = true}) unscales in "
        "float16)");
  }
  PerOptimizerState::check_not_unscaled(per_optimizer_states_, optimizer, plan);
}

/// Called before a loss is scaled. Thread-safe.
MEZZO_INLINE void GradScaler::mark_cleared_grads() {
  if (per_optimizer_states_.empty()) return;
  const std::lock_guard lock(*mutex_);
  for (auto& [optimizer, state] : per_optimizer_states_) state.mark_cleared_grads();
}

MEZZO_INLINE at::Tensor GradScaler::unscale_(OptimizerRef optimizer) {
  detail::check_not_stepped_in_backward(optimizer.optimizer(), "unscale_");
  optim::MixedPrecisionOptimizer* const mixed_precision = optimizer.mixed_precision();
  if (!options_.enabled) {
    if (mixed_precision == nullptr) return {};
    const c10::NoGradGuard no_grad;
    StepPlan plan = mixed_precision->plan();
    detail::set_master_grads(mixed_precision, plan);
    return {};
  }
  check_scale_initialized("unscale_");
  PerOptimizerState& state = get_optimizer_state(optimizer.optimizer());
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

/// Casts the gradients of weights with masters to float32, then unscales all in place. Returns
/// their statistics; without norm_sq, unless ranks decide together.
MEZZO_INLINE GradStats GradScaler::unscale_grads(OptimizerRef optimizer, PerOptimizerState& state) {
  const c10::NoGradGuard no_grad;
  StepPlan plan = detail::make_plan(optimizer);
  check_can_unscale(optimizer.optimizer(), plan);
  const at::Tensor& inverse = scale_.inv_scale;
  auto param = plan.params.begin();
  for (const at::Tensor& gradient : detail::dense_gradients(plan)) {  // before any write
    TORCH_CHECK(detail::can_unscale(gradient, detail::to_device(inverse, gradient.device())),
                "GradScaler: the gradient of ",
                detail::describe_param(optimizer.optimizer(), *param->parameter),
                " has overlapping elements, as an expanded tensor has, and cannot be unscaled in "
                "place; clone() it first");
    ++param;
  }
  GradStats stats{.inv_scale = inverse};
  if (plan.other_ranks_have_grads) stats = detail::compute_grad_stats(optimizer, plan, inverse);
  detail::set_master_grads(optimizer.mixed_precision(), plan);
  state.found_inf = at::Tensor();
  detail::for_each_device(detail::dense_gradients(plan), [&](const auto& here) {
    const at::Tensor inv_scale = detail::to_device(inverse, here.front().device());
    at::Tensor found = at::zeros({}, inv_scale.options());
    detail::unscale_and_check_({here.begin(), here.end()}, found, inv_scale);
    detail::add_flag(state.found_inf, detail::to_device(found, inverse.device()));
  });
  if (stats.found_inf.defined()) {
    state.found_inf = detail::to_device(stats.found_inf, inverse.device());
  } else {
    stats.found_inf = state.found_inf;
  }
  state.stage = OptState::unscaled;
  if (options_.mode != LossScaleMode::none) state.set_unscaled_grads(plan);
  return stats;
}

// --- Stepping ----------------------------------------------------------------------------------

MEZZO_INLINE StepResult GradScaler::step(OptimizerRef optimizer, const StepOptions& options) {
  TORCH_CHECK(detail::is_above(options.max_norm, 0), "step: max_norm is ", options.max_norm,
              "; it should be positive, and infinite for no clipping");
  detail::check_not_stepped_in_backward(optimizer.optimizer(), "step");
  const c10::NoGradGuard no_grad;
  if (!options_.enabled) return step_disabled(optimizer, options);
  return optimizer.mixed_precision() != nullptr ? step_on_device(optimizer, options)
                                                : step_with_host_sync(optimizer, options);
}

MEZZO_INLINE StepResult GradScaler::step_with_closure(
    OptimizerRef optimizer, const torch::optim::Optimizer::LossClosure& closure) {
  if (!closure) return step(optimizer);
  TORCH_CHECK(
      !options_.enabled,
      "Closure use is not currently supported if GradScaler is enabled. In C++: compute the loss "
      "and call scaler.scale(loss).backward() before scaler.step(optimizer), or construct "
      "GradScaler({.enabled = false})");
  return StepResult(StepResult::Values{.applied = true, .step_return = optimizer.step(closure)});
}

MEZZO_INLINE GradScaler::PerOptimizerState& GradScaler::get_optimizer_state_for_step(
    const torch::optim::Optimizer& optimizer) {
  check_scale_initialized("step");
  PerOptimizerState& state = get_optimizer_state(optimizer);
  TORCH_CHECK(
      state.stage != OptState::stepped,
      "step() has already been called since the last update(). In C++: call scaler.update() "
      "at the end of each iteration, after the steps of all its optimizers");
  if (state.stage == OptState::ready) reporter_.warn_unless_used(options_, "step");
  return state;
}

/// Merges the found_inf of `unscale_` and of `stats`: afterwards `stats.found_inf` decides the
/// step, and `state.found_inf` the next scale.
MEZZO_INLINE void GradScaler::merge_found_inf(PerOptimizerState& state, GradStats& stats) const {
  detail::add_flag(state.found_inf, detail::to_device(stats.found_inf, scale_.scale.device()));
  stats.found_inf = detail::to_device(state.found_inf, stats.inv_scale.device());
}

/// Steps with a mixed-precision optimizer: the device decides, without a host sync.
MEZZO_INLINE StepResult GradScaler::step_on_device(OptimizerRef optimizer,
                                                   const StepOptions& options) {
  PerOptimizerState& state = get_optimizer_state_for_step(optimizer.optimizer());
  const bool was_unscaled = state.stage == OptState::unscaled;
  StepPlan plan = detail::make_plan(optimizer);
  was_unscaled ? state.check_still_unscaled(optimizer.optimizer())
               : check_can_unscale(optimizer.optimizer(), plan);
  GradStats stats = detail::compute_grad_stats(
      optimizer, plan, was_unscaled ? at::ones_like(scale_.scale) : scale_.inv_scale);
  if (!was_unscaled) state.found_inf = at::Tensor();  // discards that of a step that threw
  detail::check_has_gradients(was_unscaled ? state.found_inf.defined() : plan.any_rank_has_grads(),
                              optimizer.optimizer());
  merge_found_inf(state, stats);
  StepResult result = future_pool_.make_result(scale_.scale, stats, was_unscaled);  // may throw
  optimizer.mixed_precision()->apply(std::move(plan), stats, options);
  state.stage = OptState::stepped;
  const bool is_captured = detail::current_capture_id(scale_.scale.device()) != 0;
  if (!is_captured) reporter_.observe(state.identity, result);  // replays do not notify the host
  return result;
}

/// Steps with an optimizer of torch::optim, as torch.amp does: unscales and clips in place, and
/// synchronizes with the host, which decides.
MEZZO_INLINE StepResult GradScaler::step_with_host_sync(OptimizerRef optimizer,
                                                        const StepOptions& options) {
  PerOptimizerState& state = get_optimizer_state_for_step(optimizer.optimizer());
  const at::Tensor& scale = scale_.scale;
  const bool was_unscaled = state.stage == OptState::unscaled;
  GradStats stats;
  if (!was_unscaled) stats = unscale_grads(optimizer, state);
  detail::check_has_gradients(state.found_inf.defined(), optimizer.optimizer());
  std::vector<at::Tensor> gradients;
  if (was_unscaled || detail::has_max_norm(options)) {
    const StepPlan plan = detail::make_plan(optimizer);
    gradients = detail::dense_gradients(plan);
    if (was_unscaled) state.check_still_unscaled(optimizer.optimizer());
    if (!stats.norm_sq.defined()) {
      stats = detail::compute_grad_stats(optimizer, plan, at::ones_like(scale));
      merge_found_inf(state, stats);
    }
  }
  const StepResult::Values values = future_pool_.make_result(scale, stats, was_unscaled).values();
  const StepResult result = detail::maybe_opt_step(optimizer, gradients, values, options);
  state.stage = OptState::stepped;
  reporter_.observe(state.identity, result);
  return result;
}

/// Clips, zeroes and steps without a check, for a disabled scaler.
MEZZO_INLINE StepResult GradScaler::step_disabled(OptimizerRef optimizer,
                                                  const StepOptions& options) {
  optim::MixedPrecisionOptimizer* const mixed_precision = optimizer.mixed_precision();
  const bool needs_plan = mixed_precision != nullptr || detail::has_max_norm(options);
  StepPlan plan = needs_plan ? detail::make_plan(optimizer) : StepPlan();
  std::vector<at::Tensor> gradients;
  GradStats stats;
  StepResult result(StepResult::Values{.applied = true, .step_return = at::Tensor()});
  if (detail::has_max_norm(options) && plan.any_rank_has_grads()) {
    gradients = detail::dense_gradients(plan);
    const at::Device device = gradients.empty() ? at::kCPU : gradients.front().device();
    const at::Tensor inv_scale = at::ones({}, at::TensorOptions().device(device).dtype(at::kFloat));
    stats = detail::compute_grad_stats(optimizer, plan, inv_scale);
    stats.found_inf.zero_();
    result = future_pool_.make_result(inv_scale, stats, /*was_unscaled=*/false);
  }
  if (mixed_precision == nullptr) {
    return detail::maybe_opt_step(optimizer, gradients, result.values(), options);
  }
  mixed_precision->apply(std::move(plan), stats, options);
  return result;
}

// --- Updating the scale ------------------------------------------------------------------------

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

/// Adds the found_inf of an optimizer to that of the iteration. If the optimizer was unscaled but
/// not stepped, also adds a result for `on_skip`.
MEZZO_INLINE void GradScaler::add_found_inf(const PerOptimizerState& state) {
  if (!state.found_inf.defined()) return;
  detail::add_flag(found_inf_, state.found_inf);
  if (state.stage != OptState::unscaled) return;
  const GradStats stats{.inv_scale = scale_.inv_scale, .found_inf = state.found_inf};
  reporter_.observe(state.identity,
                    future_pool_.make_result(scale_.scale, stats, /*was_unscaled=*/false));
}

MEZZO_INLINE bool GradScaler::can_set_scale() const {
  if (!options_.enabled) return false;
  check_scale_initialized("update");
  TORCH_CHECK(options_.mode != LossScaleMode::none,
              "update(new_scale): this scaler has LossScaleMode::none, whose scale is always 1; "
              "construct it with {.mode = LossScaleMode::fixed} or dynamic, or call update()");
  return true;
}

MEZZO_INLINE void GradScaler::update(double new_scale) {
  if (!can_set_scale()) return;
  const double highest = std::min<double>(options_.max_scale, detail::kFloatMax);
  detail::check_scale_value("new_scale", new_scale, options_.min_scale, highest);
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

/// Records a use of the scale, since the caller may multiply a loss by it.
MEZZO_INLINE void GradScaler::set_scale(const at::Tensor& new_scale) {
  for (const auto& [optimizer, state] : per_optimizer_states_) add_found_inf(state);
  scale_.scale.copy_(new_scale.reshape({})).clamp_(options_.min_scale, options_.max_scale);
  at::reciprocal_out(scale_.inv_scale, scale_.scale);
  finish_iteration();
  reporter_.record_use();
}

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
      "first scaled tensor creates the scale");
}

/// Returns the scale on the device of a loss, and creates it for the first. Thread-safe.
MEZZO_INLINE at::Tensor GradScaler::get_scale_for(const at::Tensor& output) {
  if (options_.mode != LossScaleMode::none) detail::check_not_stepped_in_backward(output);
  const at::Device device = output.device();
  const std::lock_guard lock(*mutex_);
  if (!scale_.scale.defined()) lazy_init_scale(device);
  reporter_.record_use(detail::current_capture_id(device) != 0);
  return detail::to_device(scale_.scale, device);
}

MEZZO_INLINE void GradScaler::lazy_init_scale(at::Device device) {
  detail::check_scale_update_supported(options_, device);
  detail::check_not_capturing(device, "the loss scale");
  // Inference tensors could not be updated outside InferenceMode.
  const c10::InferenceMode no_inference(false);
  const auto scalar = at::TensorOptions().device(device).dtype(at::kFloat);
  const LossScaleState& state = initial_state_;
  scale_ = {at::full({}, state.scale, scalar),
            at::full({}, detail::compute_inv_scale(state.scale), scalar),
            at::full({}, state.growth_tracker, scalar.dtype(at::kInt)),
            at::full({}, state.hysteresis_tracker, scalar.dtype(at::kInt))};
}

// --- State -------------------------------------------------------------------------------------

MEZZO_INLINE double GradScaler::get_scale() const {
  if (!options_.enabled) return 1.0;
  reporter_.record_use();
  return scale_.scale.defined() ? scale_.scale.item<float>() : initial_state_.scale;
}

template <class Number>
void GradScaler::set_option(const char* name, Number GradScalerOptions::*option, Number value) {
  TORCH_CHECK(
      options_.mode == LossScaleMode::dynamic, name,
      " belongs to a dynamic loss scale, and this scaler's is constant; construct the scaler "
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

/// Records a use of the scale, since the caller may multiply a loss by it.
MEZZO_INLINE LossScaleState GradScaler::read_loss_scale_state() const {
  reporter_.record_use();
  if (!scale_.scale.defined()) return initial_state_;
  return {.scale = scale_.scale.item<float>(),
          .growth_tracker = scale_.growth_tracker.item<int32_t>(),
          .hysteresis_tracker = scale_.hysteresis_tracker.item<int32_t>()};
}

MEZZO_INLINE GradScaler::StateDict GradScaler::state_dict() const {
  if (!options_.enabled) return {};
  const LossScaleState state = read_loss_scale_state();
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
              "instance of GradScaler. In C++: construct this scaler with GradScaler({.enabled = "
              "false}) too, or do not call load_state_dict, which starts from a new scale");
  const auto value = [&state](const char* key, std::optional<double> fallback = std::nullopt) {
    const auto found = state.find(key);
    TORCH_CHECK(found != state.end() || fallback, "The source state dict lacks \"", key,
                "\"; pass a state that state_dict() of a GradScaler returned");
    return found != state.end() ? found->second : *fallback;
  };
  const auto integer = [&value](const char* key, std::optional<double> fallback = std::nullopt) {
    const double result = value(key, fallback);
    TORCH_CHECK(detail::is_finite(result) && result >= 0 &&
                    result <= std::numeric_limits<int32_t>::max() && result == std::floor(result),
                "The source state dict has ", key, " = ", result,
                "; it should be an integer from 0 to 2147483647");
    return static_cast<int64_t>(result);
  };
  const int64_t mode = integer("_loss_scale_mode", static_cast<double>(options_.mode));
  TORCH_CHECK(mode <= static_cast<int64_t>(LossScaleMode::dynamic),
              "The source state dict has _loss_scale_mode = ", mode,
              "; it should be 0 (none), 1 (fixed) or 2 (dynamic)");
  GradScalerOptions options = options_;
  options.init_scale = value("scale");
  options.growth_factor = value("growth_factor");
  options.backoff_factor = value("backoff_factor");
  options.growth_interval = integer("growth_interval");
  options.min_scale = value("min_scale", options_.min_scale);
  options.max_scale = value("max_scale", options_.max_scale);
  options.hysteresis = integer("hysteresis", static_cast<double>(options_.hysteresis));
  options.mode = static_cast<LossScaleMode>(mode);
  options = options.validated();
  LossScaleState next = options.initial_state();
  next.growth_tracker = static_cast<int32_t>(integer("_growth_tracker"));
  next.hysteresis_tracker =
      static_cast<int32_t>(integer("_hysteresis_tracker", next.hysteresis_tracker));
  if (scale_.scale.defined()) detail::check_scale_update_supported(options, scale_.scale.device());
  options_ = options;
  initial_state_ = next;
  if (!scale_.scale.defined()) return;
  scale_.scale.fill_(next.scale);
  scale_.inv_scale.fill_(detail::compute_inv_scale(next.scale));
  scale_.growth_tracker.fill_(next.growth_tracker);
  scale_.hysteresis_tracker.fill_(next.hysteresis_tracker);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
