/// \file
/// Implementation of Amp: casts of models, forward, backward, steps, and state dicts.
///
///     backward:          stash unscaled gradients, run backward from the scaled loss,
///                        unscale, update the scale, add the stashed gradients
///     delayed backward:  run backward from the scaled loss; gradients stay scaled until a
///                        backward without delay, one of another loss, or the step
///     step:              skip if a gradient is inf or NaN
///
/// All gradients with one scale are unscaled together, and the scale is then updated. An inf stays
/// in `.grad`, where the step finds it.
#pragma once

#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/for_each_tensor.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/mixed_precision_policy.h>
#include <mezzo/base/model_refs.h>
#include <mezzo/base/version.h>
#include <mezzo/opt_levels/amp.h>
#include <mezzo/opt_levels/opt_level.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/detail/optimizer_description.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/optimizer_ref.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <c10/core/DeviceType.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/rnn.h>
#include <torch/optim/adagrad.h>

#include <algorithm>
#include <cstddef>
#include <iostream>
#include <limits>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

// --- Checks before the cast, and the cast --------------------------------------------------------

/// Returns the end of Apex's message, with the remedy in C++.
inline const char* describe_expected_float32(at::ScalarType dtype) {
  return is_training_dtype(dtype)
             ? ", expected float32. When using amp.initialize, you do not need to call .half() on "
               "your model before passing it, no matter what optimization level you choose. In "
               "C++: call model->to(torch::kFloat) before constructing the optimizer"
             : ", expected float32. Quantized tensors cannot be trained at any level: load the "
               "float32 weights, or register the tensor as a buffer, which is not cast";
}

/// Apex's check that a model is float32: masters are copied from it.
inline void check_model(const torch::nn::Module& model) {
  for (const auto& item : model.named_parameters()) {
    const at::Tensor& parameter = item.value();
    const at::ScalarType dtype = parameter.scalar_type();
    TORCH_CHECK(!at::isFloatingType(dtype) || dtype == at::kFloat, "Found param ", item.key(),
                " of ", model.name(), " with type ", dtype_name(dtype),
                describe_expected_float32(dtype));
    TORCH_CHECK(has_autocast(parameter.device().type()), "Found param ", item.key(), " of ",
                model.name(), " on ", parameter.device(),
                ", which has no autocast; move the model to another device, such as cpu or cuda, "
                "first");
  }
  for (const auto& item : model.named_buffers()) {
    const at::ScalarType dtype = item.value().scalar_type();
    TORCH_CHECK(!is_low_precision(dtype), "Found buffer ", item.key(), " of ", model.name(),
                " with type ", dtype_name(dtype), describe_expected_float32(dtype));
  }
}

/// Casts a tensor object in place, so that optimizers still hold it.
inline void cast_in_place(at::Tensor tensor, at::ScalarType dtype) {
  if (!tensor.defined() || !is_training_dtype(tensor.scalar_type())) return;
  const at::Tensor gradient = tensor.grad();
  tensor.set_data(tensor.detach().to(dtype));
  if (gradient.defined()) tensor.mutable_grad() = gradient.to(dtype);
}

/// Returns whether a module is a batch norm, by its class or a buffer "running_var": also mezzo's
/// SyncBatchNorm, one in an AutocastModule or in TorchScript, and user-defined ones.
inline bool is_batch_norm(const torch::nn::Module& module) {
  return module.named_buffers(/*recurse=*/false).contains("running_var") ||
         dynamic_cast<const torch::nn::BatchNorm1dImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::BatchNorm2dImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::BatchNorm3dImpl*>(&module) != nullptr;
}

/// Casts floating-point parameters and buffers. torch::nn::Module::to(dtype) would cast float8 and
/// integer buffers too; a batch norm's num_batches_tracked would then stop at 2048 in float16.
inline void cast_model(torch::nn::Module& model, at::ScalarType dtype, bool keep_batchnorm_fp32) {
  const c10::NoGradGuard no_grad;
  std::unordered_set<const c10::TensorImpl*>
      batch_norm_tensors;  // also if another module shares them
  const auto each_tensor = [](torch::nn::Module& module, const auto& visit) {
    for (const at::Tensor& parameter : module.parameters(/*recurse=*/false)) visit(parameter);
    for (const at::Tensor& buffer : module.buffers(/*recurse=*/false)) visit(buffer);
  };
  const auto flatten = [](auto* recurrent) {  // cuDNN requires its weights to be contiguous
    if (recurrent != nullptr) recurrent->flatten_parameters();
  };
  model.apply([&](torch::nn::Module& module) {
    if (!keep_batchnorm_fp32 || !is_batch_norm(module)) return;
    each_tensor(module,
                [&](const at::Tensor& t) { batch_norm_tensors.insert(t.unsafeGetTensorImpl()); });
  });
  model.apply([&](torch::nn::Module& module) {
    each_tensor(module, [&](const at::Tensor& tensor) {
      if (!batch_norm_tensors.contains(tensor.unsafeGetTensorImpl())) cast_in_place(tensor, dtype);
    });
    flatten(dynamic_cast<torch::nn::RNNImpl*>(&module));
    flatten(dynamic_cast<torch::nn::LSTMImpl*>(&module));
    flatten(dynamic_cast<torch::nn::GRUImpl*>(&module));
  });
}

/// Returns whether an optimizer has stepped. Adagrad has state before its first step.
inline bool has_stepped(const torch::optim::Optimizer& optimizer) {
  return std::any_of(
      optimizer.state().begin(), optimizer.state().end(), [](const auto& parameter_and_state) {
        const auto* const adagrad =
            dynamic_cast<const torch::optim::AdagradParamState*>(parameter_and_state.second.get());
        return adagrad == nullptr || adagrad->step() != 0;
      });
}

/// Throws for models and optimizers that cannot be trained at `level`, before the cast, which
/// cannot be undone.
inline void check_models_and_optimizers(const ModelRefs& models, const OptimizerRefs& optimizers,
                                        const OptLevel& level) {
  std::unordered_set<const c10::TensorImpl*> model_parameters;
  for (const auto& model : models.modules()) {
    check_model(*model);
    for (const at::Tensor& parameter : model->parameters()) {
      model_parameters.insert(parameter.unsafeGetTensorImpl());
    }
  }
  const bool is_cast = is_low_precision(level.cast_model_type().value_or(at::kFloat));
  for (std::size_t i = 0; i < optimizers.optimizers().size(); ++i) {
    torch::optim::Optimizer& optimizer = *optimizers.optimizers()[i];
    const std::vector<at::Tensor> parameters =
        OptimizerDescription{"", optimizer.param_groups()}.parameters();
    const bool has_model_parameter =
        std::ranges::any_of(parameters, [&](const at::Tensor& parameter) {
          return model_parameters.contains(parameter.unsafeGetTensorImpl());
        });
    // Its parameters would never get a gradient, without any other error.
    TORCH_CHECK(has_model_parameter, "optimizer ", i,
                " has no parameter of the models; construct it with their parameters, or pass its "
                "model too");
    if (!is_cast) continue;
    TORCH_CHECK(!has_stepped(optimizer), "optimizer ", i,
                " has already stepped, in float32, and the level casts the model; call "
                "mezzo::initialize before the first step, and load a saved state afterwards");
    if (!level.master_weights() || OptimizerRef(optimizer).mixed_precision() != nullptr) continue;
    (void)MasterWeights(optimizer);  // throws for optimizers that it cannot step
    check_no_duplicates(parameters, {"MasterWeights", optimizer.param_groups()});
  }
}

// --- Losses --------------------------------------------------------------------------------------

inline std::string make_loss_scaler_key(std::size_t loss_id) {
  return "loss_scaler" + std::to_string(loss_id);
}

/// Returns a complete state for GradScaler. Takes values that an entry by Apex lacks from
/// `current`.
inline GradScaler::StateDict make_scaler_state(const std::string& key,
                                               const GradScaler::StateDict& entry,
                                               GradScaler::StateDict current) {
  for (const char* name : {"loss_scale", "unskipped"}) {
    TORCH_CHECK(entry.count(name) == 1, "load_state_dict: missing key \"", name, "\" in ", key,
                "; pass the result of Amp::state_dict or Apex's amp.state_dict");
  }
  for (const auto& [name, value] : entry) current[name] = value;
  current["scale"] = entry.at("loss_scale");
  current["_growth_tracker"] = entry.at("unskipped");
  current.erase("loss_scale");
  current.erase("unskipped");
  return current;
}

/// Returns `value` with its tensors cast. Returns a value of a type without tensors unchanged.
template <class T>
decltype(auto) cast_tensors(std::optional<at::ScalarType> dtype, T&& value) {
  return map_tensors(std::forward<T>(value), [dtype](const at::Tensor& tensor) {
    return dtype ? cast_if_training_dtype(tensor, *dtype) : tensor;
  });
}

inline at::Tensor make_unit_scale(at::Device device) {
  return at::ones({}, at::TensorOptions().device(device).dtype(at::kFloat));
}

/// Returns the gradient of one parameter; undefined if no parameter has one.
inline at::Tensor find_any_gradient(const torch::optim::Optimizer& optimizer) {
  at::Tensor gradient;
  for_each_parameter(optimizer, [&](const at::Tensor& parameter) {
    if (!gradient.defined()) gradient = parameter.mutable_grad();
  });
  return gradient;
}

/// If an optimizer has an inf or NaN in its gradients, writes a NaN into the gradients of the
/// others, so that they skip their steps too. No host sync.
inline void propagate_found_inf(const std::vector<const torch::optim::Optimizer*>& optimizers) {
  if (optimizers.size() < 2) return;
  const c10::NoGradGuard no_grad;
  std::vector<StepPlan> plans;
  std::vector<at::Tensor> found_infs;
  for (const auto* optimizer : optimizers) {
    const StepPlan& plan = plans.emplace_back(make_torch_plan(*optimizer));
    if (plan.params.empty()) continue;
    const std::vector<at::Tensor> gradients = dense_gradients(plan);
    found_infs.push_back(
        compute_grad_stats_across_devices(gradients, make_unit_scale(gradients[0].device()))
            .found_inf);
  }
  for (const StepPlan& plan : plans) {
    for (const StepPlan::Param& param : plan.params) {
      at::Tensor first = gradient_values(*param.parameter);
      if (first.numel() == 0) continue;
      while (first.dim() > 0) first = first.select(0, 0);
      for (const at::Tensor& found_inf : found_infs) {
        const at::Tensor is_inf = to_device(found_inf, first.device()).ne(0);
        const double nan = std::numeric_limits<double>::quiet_NaN();
        first.copy_(at::where(is_inf, at::full_like(first, nan), first));
      }
      break;
    }
  }
}

}  // namespace detail

inline Amp::Amp(ModelRefs models, const OptimizerRefs& optimizers, const OptLevel& level,
                const InitializeOptions& options)
    : level_(level), enabled_(options.enabled), op_overrides_(options.op_overrides) {
  TORCH_CHECK(options.num_losses >= 1, "num_losses is ", options.num_losses,
              "; it should be at least 1");
  TORCH_CHECK(level.uses_autocast() || op_overrides_ == nullptr,
              "op_overrides have no effect at level ", level.name(),
              ", which does not use autocast; use O1, or leave them out");
  if (enabled_) detail::check_models_and_optimizers(models, optimizers, level);
  for (torch::optim::Optimizer* optimizer : optimizers.optimizers()) {
    AmpOptimizer& amp_optimizer =
        optimizers_.emplace_back(AmpOptimizer{optimizer, nullptr, *optimizer});
    if (!enabled_ || !level.master_weights()) continue;
    if (amp_optimizer.wrapped.mixed_precision() != nullptr) continue;
    amp_optimizer.masters = std::make_unique<MasterWeights>(*optimizer);
    amp_optimizer.wrapped = OptimizerRef(*amp_optimizer.masters);
  }
  for (int64_t i = 0; i < options.num_losses; ++i) {
    GradScalerOptions scaler_options = level.loss_scale();
    scaler_options.enabled = enabled_;
    scaler_options.allow_fp16_gradients =
        level.cast_model_type() == at::kHalf && !level.master_weights();
    scaler_options.loss_id = i;
    LossScaler& loss_scaler = loss_scalers_.emplace_back(LossScaler{GradScaler(scaler_options)});
    if (options.verbosity < 1) loss_scaler.scaler.on_skip(nullptr);
  }
  unit_scaler_.on_skip(nullptr);
  if (enabled_) {
    if (options.verbosity >= 1) std::cout << level.describe() << std::flush;
    for (const auto& model : models.modules()) {
      const auto dtype = level.cast_model_type();
      if (dtype) detail::cast_model(*model, *dtype, level.keep_batchnorm_fp32());
    }
  }
  for (const auto& model : models.modules()) models_.push_back({model, model->parameters()});
}

// --- Models --------------------------------------------------------------------------------------

template <class Model, class... Args>
decltype(auto) Amp::forward(Model&& model, Args&&... args) const {
  static_assert(
      std::convertible_to<Model, ModelRefs>,
      "amp.forward(model, ...): the first argument is not a model; pass one that was passed to "
      "mezzo::initialize, or a module inside one");
  ForwardRegions regions;
  const auto module = detail::module_pointer(model);
  TORCH_CHECK(module != nullptr,
              "amp.forward(model, ...): the model is an empty holder or a null pointer; construct "
              "it first");
  enter_autocast_regions(*module, regions);
  const auto input_dtype = enabled_ ? level_.cast_model_type() : std::nullopt;
  const auto output_dtype = enabled_ ? level_.cast_model_outputs() : std::nullopt;
  const auto call = [&]() -> decltype(auto) {
    return module->forward(detail::cast_tensors(input_dtype, std::forward<Args>(args))...);
  };
  if constexpr (detail::contains_tensors<decltype(call())>()) {
    return detail::cast_tensors(output_dtype, call());
  } else {
    return call();
  }
}

/// Enters the autocast regions of the model that is or contains `module`.
inline void Amp::enter_autocast_regions(const torch::nn::Module& module,
                                        ForwardRegions& regions) const {
  const auto is_module = [&module](const auto& pointer) { return pointer.get() == &module; };
  const auto model = std::ranges::find_if(models_, [&](const detail::AmpModel& candidate) {
    return is_module(candidate.module) ||
           std::ranges::any_of(candidate.module->modules(/*include_self=*/false), is_module);
  });
  TORCH_CHECK(model != models_.end(), "amp.forward(model, ...): ", module.name(),
              " was not passed to mezzo::initialize, and is not inside a model that was; pass all "
              "models to one call, mezzo::initialize({a, b}, ...)");
  if (!enabled_ || !level_.uses_autocast()) return;
  for (const auto& [type, key] : detail::autocast_devices()) {
    const c10::DeviceType device = type;  // Clang 14 cannot capture `type`
    const auto is_on_device = [device](const at::Tensor& parameter) {
      return parameter.device().type() == device;
    };
    const auto& parameters = model->parameters;
    if (!parameters.empty() && std::ranges::none_of(parameters, is_on_device)) continue;
    regions[detail::autocast_device_index(device)].emplace(
        detail::validated_options({.device_type = device,
                                   .dtype = level_.mixed_precision_policy().compute_dtype,
                                   .op_overrides = op_overrides_}));
  }
}

// --- Losses and steps ----------------------------------------------------------------------------

inline void Amp::backward(const at::Tensor& loss, const OptimizerRefs& optimizers,
                          const ScaleLossOptions& options) {
  scale_loss(loss, optimizers, options, [](const at::Tensor& scaled) { scaled.backward(); });
}

template <std::invocable<const at::Tensor&> Backward>
void Amp::scale_loss(const at::Tensor& loss, const OptimizerRefs& optimizers,
                     const ScaleLossOptions& options, Backward&& backward) {
  const BackwardPass pass = prepare_backward(loss, optimizers, options);
  try {
    {
      is_in_backward_ = true;
      const auto reset = c10::make_scope_exit([this] { is_in_backward_ = false; });
      std::forward<Backward>(backward)(pass.scaled_loss);
    }
    if (enabled_) post_backward(pass, options.delay_unscale);
  } catch (...) {  // gradients that were already scaled stay as backward left them
    for (std::size_t i = 0; i < pass.stashes.size(); ++i) {
      if (pass.stashes[i]) pass.optimizers[i]->loss_scaler = nullptr;
    }
    throw;
  }
}

inline void Amp::check_not_in_backward(const char* call) const {
  TORCH_CHECK(!is_in_backward_, call,
              ": called during amp.backward or amp.scale_loss; call it after that returns");
}

inline Amp::BackwardPass Amp::prepare_backward(const at::Tensor& loss,
                                               const OptimizerRefs& optimizers,
                                               const ScaleLossOptions& options) {
  check_not_in_backward("backward");
  BackwardPass pass{&find_loss_scaler(options.loss_id), loss};
  TORCH_CHECK(loss.defined(), "Amp: loss is undefined; pass the result of the criterion");
  TORCH_CHECK(!optimizers.optimizers().empty(),
              "Amp: no optimizer; pass those that the loss is for, one or several in braces");
  for (const auto* optimizer : optimizers.optimizers()) {
    pass.optimizers.push_back(&find_optimizer(*optimizer));
  }
  if (!enabled_) return pass;
  check_no_shared_parameters();
  if (pass.loss_scaler->has_pending_update) {
    unscale_gradients(*pass.loss_scaler);
    update_scale(*pass.loss_scaler);
  }
  for (const AmpOptimizer* optimizer : pass.optimizers) {
    LossScaler* const other = optimizer->loss_scaler;
    if (other == nullptr || other == pass.loss_scaler) continue;
    unscale_gradients(*other);
    update_scale(*other);
  }
  const bool is_low_precision = detail::is_low_precision(loss);
  pass.scaled_loss = pass.loss_scaler->scaler.scale(is_low_precision ? loss.to(at::kFloat) : loss);
  for (const AmpOptimizer* amp_optimizer : pass.optimizers) {
    auto& stash = pass.stashes.emplace_back();
    if (amp_optimizer->has_pending_step && amp_optimizer->loss_scaler == nullptr) {
      stash = std::make_unique<detail::GradientStash>(
          detail::OptimizerDescription{"", amp_optimizer->optimizer->param_groups()}.parameters());
    }
  }
  for (AmpOptimizer* optimizer : pass.optimizers) {  // after everything that may throw
    optimizer->has_pending_step = true;
    optimizer->loss_scaler = pass.loss_scaler;
  }
  return pass;
}

/// Unscales, updates the scale and adds the stashed gradients; with `delay_unscale` only if there
/// are any. Without it an inf in the gradients of one optimizer counts for all optimizers of the
/// pass, since the loss has overflowed.
inline void Amp::post_backward(const BackwardPass& pass, bool delay_unscale) {
  const bool has_stash =
      std::ranges::any_of(pass.stashes, [](const auto& stash) { return stash != nullptr; });
  if (delay_unscale && !has_stash) return;
  unscale_gradients(*pass.loss_scaler);
  if (!delay_unscale) {
    std::vector<const torch::optim::Optimizer*> optimizers;
    for (const AmpOptimizer* amp_optimizer : pass.optimizers) {
      optimizers.push_back(amp_optimizer->optimizer);
    }
    detail::propagate_found_inf(optimizers);
  }
  for (const auto& stash : pass.stashes) {
    if (stash) stash->add_back();
  }
  update_scale(*pass.loss_scaler);
}

inline void Amp::unscale_gradients(LossScaler& loss_scaler) {
  for (AmpOptimizer& amp_optimizer : optimizers_) {
    if (amp_optimizer.loss_scaler != &loss_scaler) continue;
    if (detail::find_any_gradient(*amp_optimizer.optimizer).defined()) {
      loss_scaler.scaler.unscale_(amp_optimizer.wrapped);
      loss_scaler.has_pending_update = true;
    }
    amp_optimizer.loss_scaler = nullptr;
  }
}

inline void Amp::update_scale(LossScaler& loss_scaler) {
  // The flag first: an on_skip callback may throw.
  if (std::exchange(loss_scaler.has_pending_update, false)) loss_scaler.scaler.update();
}

/// Throws for a parameter in two optimizers, which would both unscale its gradient.
inline void Amp::check_no_shared_parameters() const {
  if (optimizers_.size() < 2) return;
  std::unordered_map<const c10::TensorImpl*, const torch::optim::Optimizer*> optimizer_by_param;
  for (const AmpOptimizer& amp_optimizer : optimizers_) {
    const auto* const optimizer = amp_optimizer.optimizer;
    detail::for_each_parameter(*optimizer, [&](const at::Tensor& parameter) {
      const auto entry =
          optimizer_by_param.emplace(parameter.unsafeGetTensorImpl(), optimizer).first;
      TORCH_CHECK(
          entry->second == optimizer, "Amp: two optimizers hold ",
          detail::OptimizerDescription{"", optimizer->param_groups()}.describe_param(parameter),
          ", and both would unscale its gradient; pass it to one of them");
    });
  }
}

inline StepResult Amp::step(torch::optim::Optimizer& optimizer, const StepOptions& options) {
  check_not_in_backward("step");
  AmpOptimizer& amp_optimizer = find_optimizer(optimizer);
  if (!enabled_) return scaler().step(amp_optimizer.wrapped, options);
  TORCH_CHECK(amp_optimizer.has_pending_step,
              "step: no loss was scaled for this optimizer since its last step; call "
              "amp.backward(loss, optimizer) before each amp.step");
  if (LossScaler* const loss_scaler = amp_optimizer.loss_scaler) {
    unscale_gradients(*loss_scaler);
    update_scale(*loss_scaler);
  }
  StepResult result = step_if_finite(amp_optimizer.wrapped, options);
  amp_optimizer.has_pending_step = false;
  return result;
}

/// Checks, clips and steps with unscaled gradients.
inline StepResult Amp::step_if_finite(OptimizerRef optimizer, const StepOptions& options) {
  const at::Tensor gradient = detail::find_any_gradient(optimizer.optimizer());
  if (!gradient.defined()) return StepResult({.applied = true, .step_return = optimizer.step()});
  if (!std::exchange(has_unit_scale_, true)) {
    (void)unit_scaler_.scale(detail::make_unit_scale(gradient.device()));
  }
  unit_scaler_.discard_iteration();  // of a step that threw
  StepResult result = unit_scaler_.step(optimizer, options);
  unit_scaler_.update();
  return result;
}

inline void Amp::zero_grad(torch::optim::Optimizer& optimizer, bool set_to_none) {
  check_not_in_backward("zero_grad");
  AmpOptimizer& amp_optimizer = find_optimizer(optimizer);
  optimizer.zero_grad(set_to_none);
  amp_optimizer.has_pending_step = false;
  amp_optimizer.loss_scaler = nullptr;
}

inline std::vector<at::Tensor> Amp::master_params(torch::optim::Optimizer& optimizer) {
  return mezzo::master_params(find_optimizer(optimizer).wrapped);
}

inline OptimizerRef& Amp::wrapped_optimizer(torch::optim::Optimizer& optimizer) {
  return find_optimizer(optimizer).wrapped;
}

/// Returns the entry of an optimizer. First creates the masters of new param groups.
inline Amp::AmpOptimizer& Amp::find_optimizer(const torch::optim::Optimizer& optimizer) {
  AmpOptimizer* found = nullptr;
  for (AmpOptimizer& amp_optimizer : optimizers_) {
    if (enabled_ && level_.master_weights() && amp_optimizer.masters == nullptr) {
      amp_optimizer.wrapped.mixed_precision()->enable_master_weights();
    }
    if (amp_optimizer.optimizer == &optimizer) found = &amp_optimizer;
  }
  TORCH_CHECK(found != nullptr,
              "optimizer: it was not passed to mezzo::initialize; pass the object that was");
  return *found;
}

inline Amp::LossScaler& Amp::find_loss_scaler(int64_t loss_id) {
  TORCH_CHECK(loss_id >= 0 && loss_id < num_losses(), "loss_id is ", loss_id,
              "; it should be between 0 and num_losses - 1, which is ", num_losses() - 1,
              " (mezzo::initialize takes {.num_losses = ...})");
  return loss_scalers_[static_cast<std::size_t>(loss_id)];
}

// --- State ---------------------------------------------------------------------------------------

inline void Amp::check_no_pending_step(const char* call) const {
  const bool is_pending = std::ranges::any_of(optimizers_, [](const AmpOptimizer& amp_optimizer) {
    return amp_optimizer.has_pending_step;
  });
  TORCH_CHECK(!is_pending, call,
              ": a loss was scaled for an optimizer that has not stepped yet; call it after "
              "amp.step, or amp.zero_grad to discard the gradients");
}

inline Amp::StateDict Amp::state_dict() const {
  check_no_pending_step("state_dict");
  StateDict state;
  if (!enabled_) return state;
  for (std::size_t i = 0; i < loss_scalers_.size(); ++i) {
    GradScaler::StateDict entry = loss_scalers_[i].scaler.state_dict();
    entry["loss_scale"] = entry.at("scale");
    entry["unskipped"] = entry.at("_growth_tracker");
    state[detail::make_loss_scaler_key(i)] = std::move(entry);
  }
  return state;
}

inline void Amp::check_state_dict(const StateDict& state) const {
  if (!enabled_) return;
  check_no_pending_step("load_state_dict");
  TORCH_CHECK(state.size() == loss_scalers_.size(), "load_state_dict: state_dict contains ",
              state.size(), " entries, while ", loss_scalers_.size(),
              " loss_scalers are used; pass the saved num_losses to mezzo::initialize");
  for (std::size_t i = 0; i < loss_scalers_.size(); ++i) {
    const std::string key = detail::make_loss_scaler_key(i);
    TORCH_CHECK(state.count(key) == 1, "load_state_dict: missing key \"", key,
                "\"; pass the result of Amp::state_dict or Apex's amp.state_dict");
    const GradScaler& scaler = loss_scalers_[i].scaler;
    GradScaler(scaler.options())
        .load_state_dict(detail::make_scaler_state(key, state.at(key), scaler.state_dict()));
  }
}

inline void Amp::load_state_dict(const StateDict& state) {
  check_state_dict(state);
  for (std::size_t i = 0; i < loss_scalers_.size() && enabled_; ++i) {
    const std::string key = detail::make_loss_scaler_key(i);
    GradScaler& scaler = loss_scalers_[i].scaler;
    scaler.load_state_dict(detail::make_scaler_state(key, state.at(key), scaler.state_dict()));
  }
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
