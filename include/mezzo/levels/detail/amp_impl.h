/// \file
/// Implementation of Amp: calls of models, steps of optimizers, and state in files.
#pragma once

#include <mezzo/levels/detail/amp_call.h>
#include <mezzo/levels/detail/amp_models.h>
#include <mezzo/levels/initialize.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

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
}

inline std::string loss_scaler_key(std::size_t loss) {
  return "loss_scaler" + std::to_string(loss);
}

/// Returns a complete state for GradScaler. An entry by Apex has only two values; the others are
/// those of `present`.
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
    : level_(level), enabled_(options.enabled), policy_(options.policy) {
  detail::check_initialize_options(options, level);
  if (enabled_) detail::check_models_and_optimizers(models, optimizers, level);
  for (torch::optim::Optimizer* optimizer : optimizers.optimizers()) {
    given_.emplace_back(*optimizer, enabled_ && level.master_weights());
    passes_.add_optimizer(given_.back().stepper);
  }
  for (int64_t i = 0; i < options.num_losses; ++i) {
    const bool keeps_half = level.cast_model_type() == at::kHalf && !level.master_weights();
    LossScale scaler_options = level.loss_scale();
    scaler_options.enabled = enabled_;
    scaler_options.allow_fp16_gradients = keeps_half;
    scaler_options.loss_id = i;
    passes_.add_loss(scaler_options);
    if (options.verbosity < 1) scaler(i).on_skip(nullptr);
  }
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
  const detail::CastDtypes dtypes{input_dtype_, output_dtype_};
  ForwardRegions regions;
  const auto module = detail::module_pointer(model);
  TORCH_CHECK(
      module != nullptr,
      "amp(model, ...): the model is an empty holder or a null pointer; construct it first");
  find_and_enter(module.get(), module->name(), regions);
  return detail::run_cast(*module, dtypes, std::forward<Args>(args)...);
}

inline torch::nn::Module& Amp::find_and_enter(const void* wanted, const std::string& name,
                                              ForwardRegions& regions) const {
  for (const detail::AmpModel& model : models_) {
    torch::nn::Module* const found = model.find(wanted);
    if (found == nullptr) continue;
    if (!enabled_ || !level_.uses_op_lists()) return *found;
    for (std::size_t i = 0; i < regions.size(); ++i) {
      if (!model.runs_on(detail::kPolicyDevices[i])) continue;
      regions[i].emplace(detail::checked_region({.device = detail::kPolicyDevices[i],
                                                 .dtype = level_.precision().compute,
                                                 .policy = policy_}));
    }
    return *found;
  }
  TORCH_CHECK(false, "amp(model, ...): ", name,
              " is none of the models that were given to mezzo::initialize, nor inside one; give "
              "all models to one call, mezzo::initialize({a, b}, ...)");
}

inline void Amp::scale_loss(const at::Tensor& loss, const OptimizerList& optimizers,
                            const ScaleLossOptions& options) {
  scale_loss(loss, optimizers, options, [](const at::Tensor& scaled) { scaled.backward(); });
}

template <std::invocable<const at::Tensor&> Backward>
void Amp::scale_loss(const at::Tensor& loss, const OptimizerList& optimizers,
                     const ScaleLossOptions& options, Backward&& backward) {
  detail::LossPasses::Pass pass = begin_pass(loss, optimizers, options);
  try {
    {
      is_in_backward_ = true;
      const auto backward_ends = c10::make_scope_exit([this] { is_in_backward_ = false; });
      std::forward<Backward>(backward)(pass.scaled);
    }
    if (enabled_) passes_.end(pass, options.delay_unscale);
  } catch (...) {
    if (enabled_) passes_.give_up(pass);
    throw;
  }
}

inline void Amp::refuse_within_backward(const char* call) const {
  TORCH_CHECK(!is_in_backward_, call,
              ": called within the backward pass of a scale_loss; let that return first");
}

inline detail::LossPasses::Pass Amp::begin_pass(const at::Tensor& loss,
                                                const OptimizerList& optimizers,
                                                const ScaleLossOptions& options) {
  refuse_within_backward("scale_loss");
  const std::size_t id = checked_loss(options.loss_id);
  TORCH_CHECK(loss.defined(),
              "scale_loss: loss is undefined; give the tensor that the criterion returned");
  TORCH_CHECK(!optimizers.optimizers().empty(),
              "scale_loss: name the optimizers that the loss is for, one or several in braces");
  for (const auto* optimizer : optimizers.optimizers()) given(*optimizer);
  if (!enabled_) return {loss};
  refuse_shared_parameters();
  return passes_.begin(id, loss, optimizers.optimizers());
}

/// Refuses a parameter of two optimizers: each would unscale its gradient.
inline void Amp::refuse_shared_parameters() const {
  if (given_.size() < 2) return;
  std::unordered_map<const c10::TensorImpl*, const torch::optim::Optimizer*> owners;
  for (const Given& one : given_) {
    detail::for_each_parameter(*one.optimizer, [&](std::size_t, const at::Tensor& parameter) {
      const auto known = owners.emplace(parameter.unsafeGetTensorImpl(), one.optimizer).first;
      TORCH_CHECK(known->second == one.optimizer, "scale_loss: two optimizers hold ",
                  detail::OptimizerWords{"", one.optimizer->param_groups()}.parameter(parameter),
                  ", whose gradient both would unscale and step with; give it to one of them");
    });
  }
}

inline StepResult Amp::step(torch::optim::Optimizer& optimizer, const StepOptions& options) {
  refuse_within_backward("step");
  const AnyOptimizer stepper = given(optimizer).stepper;
  if (!enabled_) return scaler().step(stepper, options);
  TORCH_CHECK(passes_.awaits_step(optimizer),
              "step: no loss was scaled for this optimizer since its last step; call "
              "amp.scale_loss(loss, optimizer), which runs backward, before each amp.step");
  return passes_.step(optimizer, options);
}

inline void Amp::zero_grad(torch::optim::Optimizer& optimizer, bool set_to_none) {
  refuse_within_backward("zero_grad");
  given(optimizer);
  passes_.zero_grad(optimizer, set_to_none);
}

inline std::vector<at::Tensor> Amp::master_params(torch::optim::Optimizer& optimizer) {
  return mezzo::master_params(given(optimizer).stepper);
}

inline AnyOptimizer& Amp::optimizer(torch::optim::Optimizer& optimizer) {
  return given(optimizer).stepper;
}

inline GradScaler& Amp::scaler(int64_t loss_id) { return passes_.scaler(checked_loss(loss_id)); }

inline Amp::Given::Given(torch::optim::Optimizer& given, bool wants_masters)
    : optimizer(&given),
      stepper(given),
      keeps_own_masters(wants_masters && stepper.mezzos() != nullptr) {
  if (!wants_masters || keeps_own_masters) return;
  masters = std::make_unique<MasterWeights>(given);
  stepper = AnyOptimizer(*masters);
}

/// Returns the entry of an optimizer, after masters have been made for new groups.
inline Amp::Given& Amp::given(const torch::optim::Optimizer& optimizer) {
  Given* found = nullptr;
  for (Given& one : given_) {
    if (one.keeps_own_masters) one.stepper.mezzos()->enable_master_weights();
    if (one.optimizer == &optimizer) found = &one;
  }
  TORCH_CHECK(found != nullptr,
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
  TORCH_CHECK(!passes_.any_awaits_step(), call,
              ": a loss was scaled for an optimizer that has not stepped yet; call it after "
              "amp.step, or amp.zero_grad to give the gradients up");
}

inline Amp::StateDict Amp::state_dict() const {
  require_between_iterations("state_dict");
  StateDict all;
  if (!enabled_) return all;
  for (std::size_t i = 0; i < passes_.losses(); ++i) {
    GradScaler::StateDict entry = passes_.scaler(i).state_dict();
    entry["loss_scale"] = entry.at("scale");
    entry["unskipped"] = entry.at("_growth_tracker");
    all[detail::loss_scaler_key(i)] = std::move(entry);
  }
  return all;
}

inline void Amp::load_state_dict(const StateDict& state) {
  if (!enabled_) return;
  require_between_iterations("load_state_dict");
  TORCH_CHECK(state.size() == passes_.losses(), "load_state_dict: state_dict contains ",
              state.size(), " entries, while ", passes_.losses(),
              " loss_scalers are used; give mezzo::initialize the num_losses that was saved");
  std::vector<GradScaler> loaded;
  for (std::size_t i = 0; i < passes_.losses(); ++i) {
    const std::string key = detail::loss_scaler_key(i);
    const auto entry = state.find(key);
    TORCH_CHECK(entry != state.end(), "load_state_dict: the state lacks \"", key,
                "\"; it should be what Amp::state_dict or Apex's amp.state_dict returned");
    GradScaler trial(passes_.scaler(i).rule());
    trial.load_state_dict(
        detail::full_scaler_state(key, entry->second, passes_.scaler(i).state_dict()));
    loaded.push_back(std::move(trial));
  }
  for (std::size_t i = 0; i < passes_.losses(); ++i) {
    passes_.scaler(i).load_state_dict(loaded[i].state_dict());
  }
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
