/// \file
/// Implementation of Amp: the cast of models, their calls, losses and steps, and state in files.
///
///     pass:          set true gradients aside, run backward from the scaled loss,
///                    take the scale off, move it, add back what was set aside
///     delayed pass:  run backward from the scaled loss; the gradients keep the scale until
///                    the next pass that is not delayed, a pass of another loss, or the step
///     step:          skip if a gradient is inf or NaN
///
/// A scale moves whenever it is taken off, which is from all gradients that carry it. An inf stays
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

// --- Checks before anything is changed, and the cast ---------------------------------------------

/// Returns Apex's message, with what to do in C++.
inline const char* describe_expected_float32(at::ScalarType found) {
  return is_training_dtype(found)
             ? ", expected float32. When using amp.initialize, you do not need to call .half() on "
               "your model before passing it, no matter what optimization level you choose. In "
               "C++: call model->to(torch::kFloat) before making the optimizer, and leave the cast "
               "to "
               "mezzo::initialize"
             : ", expected float32. What is quantized cannot be trained, at any level: load the "
               "float32 weights that it was made from, or leave it out of the model's parameters, "
               "as a buffer, which is not cast";
}

/// Apex's check that a model is in float32: a model that is already cast has no float32 weights for
/// masters to start from.
inline void check_model(const torch::nn::Module& model) {
  for (const auto& item : model.named_parameters()) {
    const at::Tensor& parameter = item.value();
    const at::ScalarType dtype = parameter.scalar_type();
    TORCH_CHECK(!at::isFloatingType(dtype) || dtype == at::kFloat, "Found param ", item.key(),
                " of ", model.name(), " with type ", dtype_name(dtype),
                describe_expected_float32(dtype));
    TORCH_CHECK(parameter.is_cpu() || parameter.is_cuda() || parameter.is_mps(), "Found param ",
                item.key(), " of ", model.name(), " on ", parameter.device(),
                "; mixed precision is for models on cpu, cuda and mps: move it there first");
  }
  for (const auto& item : model.named_buffers()) {
    const at::ScalarType dtype = item.value().scalar_type();
    TORCH_CHECK(!is_low_precision(dtype), "Found buffer ", item.key(), " of ", model.name(),
                " with type ", dtype_name(dtype), describe_expected_float32(dtype));
  }
}

/// Casts a tensor object in place, so that other holders of the object (optimizers) see the cast.
inline void cast_in_place(at::Tensor tensor, at::ScalarType dtype) {
  if (!tensor.defined() || !is_training_dtype(tensor.scalar_type())) return;
  const at::Tensor gradient = tensor.grad();
  tensor.set_data(tensor.detach().to(dtype));
  if (gradient.defined()) tensor.mutable_grad() = gradient.to(dtype);
}

/// Whether a module is a batch norm, by what its class is or by its running variance: torch's,
/// mezzo's SyncBatchNorm, one in an AutocastModule or in TorchScript, one of your own.
inline bool is_batch_norm(const torch::nn::Module& module) {
  return module.named_buffers(/*recurse=*/false).contains("running_var") ||
         dynamic_cast<const torch::nn::BatchNorm1dImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::BatchNorm2dImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::BatchNorm3dImpl*>(&module) != nullptr;
}

/// Casts floating parameters and buffers. torch::nn::Module::to(dtype) would cast float8 and
/// integer buffers too; a batch norm's count of batches would then stop at 2048 in half.
inline void cast_model(torch::nn::Module& model, at::ScalarType dtype, bool keep_batchnorm_fp32) {
  const c10::NoGradGuard no_grad;
  std::unordered_set<const c10::TensorImpl*> kept;  // also where another module shares them
  const auto each_tensor = [](torch::nn::Module& module, const auto& visit) {
    for (const at::Tensor& parameter : module.parameters(/*recurse=*/false)) visit(parameter);
    for (const at::Tensor& buffer : module.buffers(/*recurse=*/false)) visit(buffer);
  };
  const auto flatten = [](auto* recurrent) {  // cuDNN requires its weights to be contiguous
    if (recurrent != nullptr) recurrent->flatten_parameters();
  };
  model.apply([&](torch::nn::Module& module) {
    if (!keep_batchnorm_fp32 || !is_batch_norm(module)) return;
    each_tensor(module, [&](const at::Tensor& one) { kept.insert(one.unsafeGetTensorImpl()); });
  });
  model.apply([&](torch::nn::Module& module) {
    each_tensor(module, [&](const at::Tensor& one) {
      if (kept.count(one.unsafeGetTensorImpl()) == 0) cast_in_place(one, dtype);
    });
    flatten(dynamic_cast<torch::nn::RNNImpl*>(&module));
    flatten(dynamic_cast<torch::nn::LSTMImpl*>(&module));
    flatten(dynamic_cast<torch::nn::GRUImpl*>(&module));
  });
}

/// Whether an optimizer has stepped. State alone does not tell: Adagrad makes it in the
/// constructor.
inline bool has_stepped(const torch::optim::Optimizer& optimizer) {
  return std::any_of(
      optimizer.state().begin(), optimizer.state().end(), [](const auto& parameter_and_state) {
        const auto* const adagrad =
            dynamic_cast<const torch::optim::AdagradParamState*>(parameter_and_state.second.get());
        return adagrad == nullptr || adagrad->step() != 0;
      });
}

/// Refuses what cannot be trained at `level`, before the cast, which cannot be undone.
inline void check_models_and_optimizers(const ModelRefs& models, const OptimizerRefs& optimizers,
                                        const OptLevel& level) {
  std::unordered_set<const c10::TensorImpl*> model_parameters;
  for (const auto& model : models.modules()) {
    check_model(*model);
    for (const at::Tensor& one : model->parameters())
      model_parameters.insert(one.unsafeGetTensorImpl());
  }
  const bool is_cast = is_low_precision(level.cast_model_type().value_or(at::kFloat));
  for (std::size_t i = 0; i < optimizers.optimizers().size(); ++i) {
    torch::optim::Optimizer& optimizer = *optimizers.optimizers()[i];
    const std::vector<at::Tensor> own =
        OptimizerDescription{"", optimizer.param_groups()}.parameters();
    const bool holds_one = std::ranges::any_of(own, [&](const at::Tensor& parameter) {
      return model_parameters.contains(parameter.unsafeGetTensorImpl());
    });
    // It would step parameters that never get a gradient, and nothing else would show the mistake.
    TORCH_CHECK(holds_one, "optimizer ", i,
                " holds no parameter of the models that were given; construct it with their "
                "parameters, or give its model too");
    if (!is_cast) continue;
    TORCH_CHECK(!has_stepped(optimizer), "optimizer ", i,
                " has stepped already, in float32, and the level casts the model; call "
                "mezzo::initialize before the first step, and load a saved state afterwards");
    if (!level.master_weights() || OptimizerRef(optimizer).mixed_precision() != nullptr) continue;
    (void)MasterWeights(optimizer);  // refuses what it cannot step
    check_no_duplicates(own, {"MasterWeights", optimizer.param_groups()});
  }
}

// --- Losses --------------------------------------------------------------------------------------

inline std::string make_loss_scaler_key(std::size_t loss) {
  return "loss_scaler" + std::to_string(loss);
}

/// Returns a complete state for GradScaler. An entry by Apex has only two values; the others are
/// those of `present`.
inline GradScaler::StateDict make_scaler_state(const std::string& key,
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

/// Returns `value` with its tensors cast; what holds no tensors that a cast could reach is passed
/// on as it is.
template <class T>
decltype(auto) cast_tensors(std::optional<at::ScalarType> dtype, T&& value) {
  return map_tensors(std::forward<T>(value), [dtype](const at::Tensor& tensor) {
    return dtype ? cast_if_training_dtype(tensor, *dtype) : tensor;
  });
}

inline at::Tensor make_unit_scale(at::Device device) {
  return at::ones({}, at::TensorOptions().device(device).dtype(at::kFloat));
}

/// Returns the gradient of some parameter; undefined if there is none.
inline at::Tensor find_any_gradient(const torch::optim::Optimizer& optimizer) {
  at::Tensor found;
  for_each_parameter(optimizer, [&](const at::Tensor& parameter) {
    if (!found.defined()) found = parameter.mutable_grad();
  });
  return found;
}

/// If one of the optimizers has an inf or NaN, writes a NaN into the gradients of the others, so
/// that their steps are skipped. Clearing the gradients clears this mark too. No host sync.
inline void propagate_found_inf(const std::vector<const torch::optim::Optimizer*>& optimizers) {
  if (optimizers.size() < 2) return;
  const c10::NoGradGuard no_grad;
  std::vector<StepPlan> plans;
  std::vector<at::Tensor> found;
  for (const auto* optimizer : optimizers) {
    const StepPlan& plan = plans.emplace_back(make_torch_plan(*optimizer));
    if (plan.params.empty()) continue;
    const std::vector<at::Tensor> gradients = dense_gradients(plan);
    found.push_back(
        compute_grad_stats_across_devices(gradients, make_unit_scale(gradients[0].device()))
            .found_inf);
  }
  for (const StepPlan& plan : plans) {
    for (const StepPlan::Param& param : plan.params) {
      at::Tensor first = gradient_values(*param.parameter);
      if (first.numel() == 0) continue;
      while (first.dim() > 0) first = first.select(0, 0);
      for (const at::Tensor& one : found) {
        const at::Tensor is_bad = to_device(one, first.device()).ne(0);
        const double nan = std::numeric_limits<double>::quiet_NaN();
        first.copy_(at::where(is_bad, at::full_like(first, nan), first));
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
  TORCH_CHECK(level.uses_autocast() || op_overrides_ == nullptr, "op_overrides: the level ",
              level.name(),
              " casts no ops, so that op lists mean nothing there; use O1, or leave it out");
  if (enabled_) detail::check_models_and_optimizers(models, optimizers, level);
  for (torch::optim::Optimizer* optimizer : optimizers.optimizers()) {
    ManagedOptimizer& one =
        optimizers_.emplace_back(ManagedOptimizer{optimizer, nullptr, *optimizer});
    if (!enabled_ || !level.master_weights() || one.wrapped.mixed_precision() != nullptr) continue;
    one.masters = std::make_unique<MasterWeights>(*optimizer);
    one.wrapped = OptimizerRef(*one.masters);
  }
  for (int64_t i = 0; i < options.num_losses; ++i) {
    GradScalerOptions rule = level.loss_scale();
    rule.enabled = enabled_;
    rule.allow_fp16_gradients = level.cast_model_type() == at::kHalf && !level.master_weights();
    rule.loss_id = i;
    LossScaler& loss = loss_scalers_.emplace_back(LossScaler{GradScaler(rule)});
    if (options.verbosity < 1) loss.scaler.on_skip(nullptr);
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
      "amp.forward(model, ...): the first argument is no model; give one that was given to "
      "mezzo::initialize, or a module inside one");
  ForwardRegions regions;
  const auto module = detail::module_pointer(model);
  TORCH_CHECK(module != nullptr,
              "amp.forward(model, ...): the model is an empty holder or a null pointer; construct "
              "it first");
  enter_autocast_regions(*module, regions);
  const auto inputs = enabled_ ? level_.cast_model_type() : std::nullopt;
  const auto outputs = enabled_ ? level_.cast_model_outputs() : std::nullopt;
  const auto forward = [&]() -> decltype(auto) {
    return module->forward(detail::cast_tensors(inputs, std::forward<Args>(args))...);
  };
  if constexpr (detail::contains_tensors<decltype(forward())>()) {
    return detail::cast_tensors(outputs, forward());
  } else {
    return forward();
  }
}

inline void Amp::enter_autocast_regions(const torch::nn::Module& wanted,
                                        ForwardRegions& regions) const {
  const auto has_wanted = [&wanted](const detail::AmpModel& model) {
    const auto is_wanted = [&wanted](const auto& one) { return one.get() == &wanted; };
    return is_wanted(model.module) ||
           std::ranges::any_of(model.module->modules(/*include_self=*/false), is_wanted);
  };
  const auto model = std::ranges::find_if(models_, has_wanted);
  TORCH_CHECK(model != models_.end(), "amp.forward(model, ...): ", wanted.name(),
              " is none of the models that were given to mezzo::initialize, nor inside one; give "
              "all models to one call, mezzo::initialize({a, b}, ...)");
  if (!enabled_ || !level_.uses_autocast()) return;
  for (std::size_t i = 0; i < regions.size(); ++i) {
    const c10::DeviceType device = detail::kAutocastDevices[i];
    const auto is_there = [device](const at::Tensor& one) { return one.device().type() == device; };
    if (!model->parameters.empty() && std::ranges::none_of(model->parameters, is_there)) continue;
    regions[i].emplace(detail::validated_options({.device_type = device,
                                                  .dtype = level_.precision().compute_dtype,
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
      const auto backward_ends = c10::make_scope_exit([this] { is_in_backward_ = false; });
      std::forward<Backward>(backward)(pass.scaled);
    }
    if (enabled_) post_backward(pass, options.delay_unscale);
  } catch (...) {  // gradients that carried the same scale before stay as the pass left them
    for (std::size_t i = 0; i < pass.stashes.size(); ++i) {
      if (pass.stashes[i]) pass.optimizers[i]->loss_scaler = nullptr;
    }
    throw;
  }
}

inline void Amp::check_not_in_backward(const char* call) const {
  TORCH_CHECK(!is_in_backward_, call,
              ": called within the backward pass of a scale_loss; let that return first");
}

inline Amp::BackwardPass Amp::prepare_backward(const at::Tensor& value,
                                               const OptimizerRefs& optimizers,
                                               const ScaleLossOptions& options) {
  check_not_in_backward("scale_loss");
  BackwardPass pass{&find_loss_scaler(options.loss_id), value};
  TORCH_CHECK(value.defined(),
              "scale_loss: loss is undefined; give the tensor that the criterion returned");
  TORCH_CHECK(!optimizers.optimizers().empty(),
              "scale_loss: name the optimizers that the loss is for, one or several in braces");
  for (const auto* optimizer : optimizers.optimizers()) {
    pass.optimizers.push_back(&find_optimizer(*optimizer));
  }
  if (!enabled_) return pass;
  check_no_shared_parameters();
  if (pass.loss->is_unscaled) unscale_gradients(*pass.loss), update_scale(*pass.loss);
  for (const ManagedOptimizer* one : pass.optimizers) {
    LossScaler* const other = one->loss_scaler;
    if (other != nullptr && other != pass.loss) unscale_gradients(*other), update_scale(*other);
  }
  const bool is_low = detail::is_low_precision(value);
  pass.scaled = pass.loss->scaler.scale(is_low ? value.to(at::kFloat) : value);
  for (const ManagedOptimizer* one : pass.optimizers) {
    auto& stash = pass.stashes.emplace_back();
    if (one->has_pending_step && one->loss_scaler == nullptr) {
      stash = std::make_unique<detail::GradientStash>(
          detail::OptimizerDescription{"", one->optimizer->param_groups()}.parameters());
    }
  }
  for (ManagedOptimizer* one : pass.optimizers) {  // after all that may throw
    one->has_pending_step = true;
    one->loss_scaler = pass.loss;
  }
  return pass;
}

/// Takes the scale off and moves it, and adds the gradients that were set aside; if `delays` is
/// true, only where gradients were set aside. Without a delay an inf in the gradients of one
/// optimizer counts for all optimizers of the pass, since the loss has overflowed.
inline void Amp::post_backward(const BackwardPass& pass, bool delays) {
  const bool has_aside = std::any_of(pass.stashes.begin(), pass.stashes.end(),
                                     [](const auto& one) { return one != nullptr; });
  if (delays && !has_aside) return;
  unscale_gradients(*pass.loss);
  if (!delays) {
    std::vector<const torch::optim::Optimizer*> optimizers;
    for (const ManagedOptimizer* one : pass.optimizers) optimizers.push_back(one->optimizer);
    detail::propagate_found_inf(optimizers);
  }
  for (const auto& one : pass.stashes) {
    if (one) one->add_back();
  }
  update_scale(*pass.loss);
}

inline void Amp::unscale_gradients(LossScaler& loss) {
  for (ManagedOptimizer& one : optimizers_) {
    if (one.loss_scaler != &loss) continue;
    if (detail::find_any_gradient(*one.optimizer).defined()) {
      loss.scaler.unscale_(one.wrapped);
      loss.is_unscaled = true;
    }
    one.loss_scaler = nullptr;
  }
}

inline void Amp::update_scale(LossScaler& loss) {
  if (std::exchange(loss.is_unscaled, false)) loss.scaler.update();  // a callback may throw
}

/// Refuses a parameter of two optimizers: each would unscale its gradient.
inline void Amp::check_no_shared_parameters() const {
  if (optimizers_.size() < 2) return;
  std::unordered_map<const c10::TensorImpl*, const torch::optim::Optimizer*> owners;
  for (const ManagedOptimizer& one : optimizers_) {
    detail::for_each_parameter(*one.optimizer, [&](const at::Tensor& parameter) {
      const auto known = owners.emplace(parameter.unsafeGetTensorImpl(), one.optimizer).first;
      TORCH_CHECK(
          known->second == one.optimizer, "scale_loss: two optimizers hold ",
          detail::OptimizerDescription{"", one.optimizer->param_groups()}.describe_param(parameter),
          ", whose gradient both would unscale and step with; give it to one of them");
    });
  }
}

inline StepResult Amp::step(torch::optim::Optimizer& optimizer, const StepOptions& options) {
  check_not_in_backward("step");
  ManagedOptimizer& one = find_optimizer(optimizer);
  if (!enabled_) return scaler().step(one.wrapped, options);
  TORCH_CHECK(one.has_pending_step,
              "step: no loss was scaled for this optimizer since its last step; call "
              "amp.backward(loss, optimizer), which runs backward, before each amp.step");
  if (LossScaler* const loss = one.loss_scaler) unscale_gradients(*loss), update_scale(*loss);
  StepResult result = step_if_finite(one.wrapped, options);
  one.has_pending_step = false;
  return result;
}

/// Checks, clips and steps with true gradients.
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
  ManagedOptimizer& one = find_optimizer(optimizer);
  optimizer.zero_grad(set_to_none);
  one.has_pending_step = false;
  one.loss_scaler = nullptr;
}

inline std::vector<at::Tensor> Amp::master_params(torch::optim::Optimizer& optimizer) {
  return mezzo::master_params(find_optimizer(optimizer).wrapped);
}

inline OptimizerRef& Amp::wrapped_optimizer(torch::optim::Optimizer& optimizer) {
  return find_optimizer(optimizer).wrapped;
}

/// Returns the entry of an optimizer, after masters have been made for new groups.
inline Amp::ManagedOptimizer& Amp::find_optimizer(const torch::optim::Optimizer& optimizer) {
  ManagedOptimizer* found = nullptr;
  for (ManagedOptimizer& one : optimizers_) {
    const bool keeps_masters = enabled_ && level_.master_weights() && one.masters == nullptr;
    if (keeps_masters) one.wrapped.mixed_precision()->enable_master_weights();
    if (one.optimizer == &optimizer) found = &one;
  }
  TORCH_CHECK(found != nullptr,
              "optimizer: it was not given to mezzo::initialize; name the object that was");
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
  const bool is_outstanding =
      std::any_of(optimizers_.begin(), optimizers_.end(),
                  [](const ManagedOptimizer& one) { return one.has_pending_step; });
  TORCH_CHECK(!is_outstanding, call,
              ": a loss was scaled for an optimizer that has not stepped yet; call it after "
              "amp.step, or amp.zero_grad to give the gradients up");
}

inline Amp::StateDict Amp::state_dict() const {
  check_no_pending_step("state_dict");
  StateDict all;
  if (!enabled_) return all;
  for (std::size_t i = 0; i < loss_scalers_.size(); ++i) {
    GradScaler::StateDict entry = loss_scalers_[i].scaler.state_dict();
    entry["loss_scale"] = entry.at("scale");
    entry["unskipped"] = entry.at("_growth_tracker");
    all[detail::make_loss_scaler_key(i)] = std::move(entry);
  }
  return all;
}

inline void Amp::check_state_dict(const StateDict& state) const {
  if (!enabled_) return;
  check_no_pending_step("load_state_dict");
  TORCH_CHECK(state.size() == loss_scalers_.size(), "load_state_dict: state_dict contains ",
              state.size(), " entries, while ", loss_scalers_.size(),
              " loss_scalers are used; give mezzo::initialize the num_losses that was saved");
  for (std::size_t i = 0; i < loss_scalers_.size(); ++i) {
    const std::string key = detail::make_loss_scaler_key(i);
    TORCH_CHECK(state.count(key) == 1, "load_state_dict: the state lacks \"", key,
                "\"; it should be what Amp::state_dict or Apex's amp.state_dict returned");
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
