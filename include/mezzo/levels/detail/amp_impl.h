/// \file
/// Amp: how models are called, how passes of losses become steps, and its state in files.
#pragma once

#include <mezzo/levels/detail/amp_models.h>
#include <mezzo/levels/initialize.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cstddef>
#include <iostream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline void check_initialize_options(const InitializeOptions& options, const OptLevel& level) {
  TORCH_CHECK(options.num_losses >= 1, "num_losses is ", options.num_losses,
              "; it should be at least 1");
  TORCH_CHECK(level.uses_op_lists() || options.policy.empty(), "policy: the level ", level.name(),
              " casts no ops, so that op lists mean nothing there; use O1, or leave it out");
  TORCH_CHECK(level.uses_op_lists() || options.weight_cache.empty(), "weight_cache: the level ",
              level.name(), " has no region that would read it; use O1, or leave it out");
}

inline bool contains(const std::vector<torch::optim::Optimizer*>& list,
                     const torch::optim::Optimizer* optimizer) {
  return std::find(list.begin(), list.end(), optimizer) != list.end();
}

inline std::string loss_scaler_key(std::size_t loss) {
  return "loss_scaler" + std::to_string(loss);
}

/// An entry as GradScaler takes it: the values of `present` where the entry, as one of Apex's, has
/// only the two that Apex writes.
inline GradScaler::StateDict full_scaler_state(const std::string& key,
                                               const GradScaler::StateDict& entry,
                                               GradScaler::StateDict present) {
  for (const char* name : {"loss_scale", "unskipped"}) {
    TORCH_CHECK(entry.count(name) == 1, "load_state_dict: ", key, " lacks \"", name,
                "\"; it should be what Amp::state_dict or Apex's amp.state_dict returned");
  }
  for (const auto& [name, value] : entry) present[name] = value;
  present["scale"] = entry.at("loss_scale");
  present["_growth_tracker"] = entry.at("unskipped");
  present.erase("loss_scale");
  present.erase("unskipped");
  return present;
}

}  // namespace detail

inline Amp::Amp(ModelList models, const OptimizerList& optimizers, const OptLevel& level,
                const InitializeOptions& options)
    : level_(level),
      enabled_(options.enabled),
      policy_(options.policy),
      weight_cache_(options.weight_cache) {
  detail::check_initialize_options(options, level);
  if (enabled_) detail::check_models_and_optimizers(models, optimizers, level);
  for (torch::optim::Optimizer* optimizer : optimizers.optimizers()) {
    passes_.emplace_back(*optimizer, enabled_ && level.master_weights());
  }
  for (int64_t i = 0; i < options.num_losses; ++i) {
    const bool keeps_half = level.cast_model_type() == at::kHalf && !level.master_weights();
    scalers_.emplace_back(GradScalerOptions(level.loss_scale())
                              .enabled(enabled_)
                              .allow_fp16_gradients(keeps_half)
                              .loss_id(i));
    if (options.verbosity < 1) scalers_.back().on_skip(nullptr);
  }
  losses_.resize(scalers_.size());
  if (enabled_) {
    if (options.verbosity >= 1) std::cout << level.describe() << std::flush;
    input_dtype_ = level.cast_model_type();
    output_dtype_ = level.cast_model_outputs();
    for (const auto& model : models.modules()) {
      if (input_dtype_) detail::cast_model(*model, *input_dtype_, level.keep_batchnorm_fp32());
    }
  }
  for (const auto& model : models.modules()) models_.emplace_back(model);
}

template <class Model, class... Args>
decltype(auto) Amp::operator()(Model&& model, Args&&... args) const {
  static_assert(std::convertible_to<Model, ModelList>,
                "amp(model, ...): the first argument is no model; give one that was given to "
                "mezzo::initialize, or a module inside one");
  const auto module = detail::module_pointer(model);
  TORCH_CHECK(module != nullptr,
              "amp(model, ...): the model is an empty holder; construct it first");
  const auto known = std::find_if(models_.begin(), models_.end(),
                                  [&](const auto& one) { return one.contains(*module); });
  TORCH_CHECK(known != models_.end(), "amp(model, ...): ", module->name(),
              " is none of the models that were given to mezzo::initialize, nor inside one");
  detail::ForwardRegions regions;
  if (enabled_ && level_.uses_op_lists()) {
    for (const auto type : {c10::DeviceType::CPU, c10::DeviceType::CUDA}) {
      if (!known->runs_on(type)) continue;
      regions.enter(detail::checked_region({.device = type,
                                            .dtype = level_.precision().compute(),
                                            .cache = weight_cache_,
                                            .policy = policy_}));
    }
  }
  return detail::cast_result(output_dtype_, [&]() -> decltype(auto) {
    return module->forward(detail::forward_argument(input_dtype_, std::forward<Args>(args))...);
  });
}

inline void Amp::scale_loss(const at::Tensor& loss, const OptimizerList& optimizers,
                            const ScaleLossOptions& options) {
  scale_loss(loss, optimizers, options, [](const at::Tensor& scaled) { scaled.backward(); });
}

template <std::invocable<const at::Tensor&> Backward>
void Amp::scale_loss(const at::Tensor& loss, const OptimizerList& optimizers,
                     const ScaleLossOptions& options, Backward&& backward) {
  const at::Tensor scaled = begin_pass(loss, optimizers, options);
  try {
    is_in_backward_ = true;
    const auto backward_ends = c10::make_scope_exit([this] { is_in_backward_ = false; });
    std::forward<Backward>(backward)(scaled);
  } catch (...) {
    for (const auto* optimizer : optimizers.optimizers()) passes_of(*optimizer).give_pass_up();
    throw;
  }
  end_pass(optimizers, options);
}

inline void Amp::refuse_within_backward(const char* call) const {
  TORCH_CHECK(!is_in_backward_, call,
              ": called within the backward pass of a scale_loss; let that return first");
}

inline at::Tensor Amp::begin_pass(const at::Tensor& loss, const OptimizerList& optimizers,
                                  const ScaleLossOptions& options) {
  refuse_within_backward("scale_loss");
  const std::size_t id = checked_loss(options.loss_id);
  TORCH_CHECK(loss.defined(),
              "scale_loss: loss is undefined; give the tensor that the criterion returned");
  TORCH_CHECK(!optimizers.optimizers().empty(),
              "scale_loss: name the optimizers that the loss is for, one or several in braces");
  for (const auto* optimizer : optimizers.optimizers()) passes_of(*optimizer);
  if (!enabled_) return loss;
  detail::refuse_shared_parameters(optimizers);
  Loss& iteration = losses_[id];
  for (const auto* optimizer : optimizers.optimizers()) {
    if (detail::contains(iteration.stepped, optimizer)) end_iteration(id);
  }
  for (const auto* optimizer : optimizers.optimizers()) {
    detail::OptimizerPasses& passes = passes_of(*optimizer);
    if (passes.scaled_by().value_or(id) != id) unscale(passes);
  }
  const bool is_low = detail::is_low_precision(loss.scalar_type());
  const at::Tensor scaled = scalers_[id].scale(is_low ? loss.to(at::kFloat) : loss);
  for (auto* optimizer : optimizers.optimizers()) {  // after all that may throw
    passes_of(*optimizer).expect_gradients_of(id);
    if (!detail::contains(iteration.waiting, optimizer)) iteration.waiting.push_back(optimizer);
  }
  return scaled;
}

inline void Amp::end_pass(const OptimizerList& optimizers, const ScaleLossOptions& options) {
  if (!enabled_ || options.delay_unscale) return;
  std::vector<at::Tensor> found;  // wherever it shows, it is the loss that overflowed
  for (const auto* optimizer : optimizers.optimizers()) {
    detail::OptimizerPasses& passes = passes_of(*optimizer);
    const auto known = static_cast<std::ptrdiff_t>(passes.found_inf().size());
    unscale(passes);
    found.insert(found.end(), passes.found_inf().begin() + known, passes.found_inf().end());
  }
  if (optimizers.optimizers().size() == 1) return;
  for (const auto* optimizer : optimizers.optimizers()) passes_of(*optimizer).hear_of(found);
}

inline void Amp::unscale(detail::OptimizerPasses& passes) {
  const std::size_t loss = *passes.scaled_by();
  if (passes.unscale(scalers_[loss])) losses_[loss].was_checked = true;
}

inline StepResult Amp::step(torch::optim::Optimizer& optimizer, const StepOptions& options) {
  refuse_within_backward("step");
  detail::OptimizerPasses& passes = passes_of(optimizer);
  if (!enabled_) return scalers_.front().step(passes.stepper(), options);
  TORCH_CHECK(passes.awaits_step(),
              "step: no loss was scaled for this optimizer since its last step; call "
              "amp.scale_loss(loss, optimizer), which runs backward, before each amp.step");
  const bool is_direct = !passes.unscaled_by().has_value();
  if (!is_direct && passes.scaled_by()) unscale(passes);
  const std::size_t loss = is_direct ? *passes.scaled_by() : *passes.unscaled_by();
  const AnyOptimizer stepper = passes.stepper();
  const auto take_back = [&] {
    if (passes.take_back(scalers_[loss], stepper)) losses_[loss].was_checked = true;
  };
  if (!is_direct) scalers_[loss].adopt(stepper, passes.found_inf());
  try {
    StepResult result = scalers_[loss].step(stepper, options);
    take_back();
    finish(optimizer);
    return result;
  } catch (...) {
    take_back();
    throw;
  }
}

inline void Amp::zero_grad(torch::optim::Optimizer& optimizer, bool set_to_none) {
  refuse_within_backward("zero_grad");
  detail::OptimizerPasses& passes = passes_of(optimizer);
  passes.clear_gradients(set_to_none);
  finish(optimizer);
}

/// The optimizer waits for nothing any more; losses that waited for it alone move their scale.
inline void Amp::finish(torch::optim::Optimizer& optimizer) {
  passes_of(optimizer).forget();
  for (Loss& iteration : losses_) {
    if (std::erase(iteration.waiting, &optimizer) != 0) iteration.stepped.push_back(&optimizer);
  }
  for (std::size_t id = 0; id < losses_.size(); ++id) {
    const Loss& iteration = losses_[id];
    if (detail::contains(iteration.stepped, &optimizer) && iteration.waiting.empty()) {
      end_iteration(id);
    }
  }
}

/// Gradients that carry a scale lose it before the scale moves.
inline void Amp::end_iteration(std::size_t loss) {
  for (detail::OptimizerPasses& passes : passes_) {
    if (passes.scaled_by() == loss) unscale(passes);
  }
  const Loss ended = std::exchange(losses_[loss], {});
  if (ended.was_checked) scalers_[loss].update();  // a callback about a skip may throw
}

inline std::vector<at::Tensor> Amp::master_params(torch::optim::Optimizer& optimizer) {
  return mezzo::master_params(passes_of(optimizer).stepper());
}

inline AnyOptimizer& Amp::optimizer(torch::optim::Optimizer& given) {
  return passes_of(given).stepper();
}

inline GradScaler& Amp::scaler(int64_t loss_id) { return scalers_[checked_loss(loss_id)]; }

inline detail::OptimizerPasses& Amp::passes_of(const torch::optim::Optimizer& optimizer) {
  const auto found = std::find_if(passes_.begin(), passes_.end(), [&](const auto& passes) {
    return &passes.given() == &optimizer;
  });
  TORCH_CHECK(found != passes_.end(),
              "optimizer: it was not given to mezzo::initialize; name the object that was");
  return *found;
}

inline std::size_t Amp::checked_loss(int64_t loss_id) const {
  TORCH_CHECK(loss_id >= 0 && loss_id < num_losses(), "loss_id is ", loss_id,
              "; it should be between 0 and num_losses - 1, which is ", num_losses() - 1,
              " (mezzo::initialize takes {.num_losses = ...})");
  return static_cast<std::size_t>(loss_id);
}

inline void Amp::require_between_iterations(const char* call) const {
  TORCH_CHECK(std::none_of(passes_.begin(), passes_.end(),
                           [](const auto& passes) { return passes.awaits_step(); }),
              call,
              ": a loss was scaled for an optimizer that has not stepped yet; call it after "
              "amp.step, or amp.zero_grad to give the gradients up");
}

inline Amp::StateDict Amp::state_dict() const {
  require_between_iterations("state_dict");
  StateDict all;
  if (!enabled_) return all;
  for (std::size_t i = 0; i < scalers_.size(); ++i) {
    GradScaler::StateDict entry = scalers_[i].state_dict();
    entry["loss_scale"] = entry.at("scale");
    entry["unskipped"] = entry.at("_growth_tracker");
    all[detail::loss_scaler_key(i)] = std::move(entry);
  }
  return all;
}

inline void Amp::load_state_dict(const StateDict& state) {
  if (!enabled_) return;
  require_between_iterations("load_state_dict");
  TORCH_CHECK(state.size() == scalers_.size(), "load_state_dict: state_dict contains ",
              state.size(), " entries, while ", scalers_.size(),
              " loss_scalers are used; give mezzo::initialize the num_losses that was saved");
  std::vector<GradScaler> loaded;
  for (std::size_t i = 0; i < scalers_.size(); ++i) {
    const std::string key = detail::loss_scaler_key(i);
    const auto entry = state.find(key);
    TORCH_CHECK(entry != state.end(), "load_state_dict: state_dict lacks \"", key, "\"");
    GradScaler trial(GradScalerOptions(scalers_[i].rule()));
    trial.load_state_dict(detail::full_scaler_state(key, entry->second, scalers_[i].state_dict()));
    loaded.push_back(std::move(trial));
  }
  for (std::size_t i = 0; i < scalers_.size(); ++i) {
    scalers_[i].load_state_dict(loaded[i].state_dict());
  }
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
