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
#include <mezzo/levels/initialize.h>
#include <mezzo/levels/opt_level.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/detail/optimizer_words.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/optimizer.h>

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
inline const char* expected_float32(at::ScalarType found) {
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
                " of ", model.name(), " with type ", dtype_name(dtype), expected_float32(dtype));
    TORCH_CHECK(parameter.is_cpu() || parameter.is_cuda() || parameter.is_mps(), "Found param ",
                item.key(), " of ", model.name(), " on ", parameter.device(),
                "; mixed precision is for models on cpu, cuda and mps: move it there first");
  }
  for (const auto& item : model.named_buffers()) {
    const at::ScalarType dtype = item.value().scalar_type();
    TORCH_CHECK(!is_low_precision(dtype), "Found buffer ", item.key(), " of ", model.name(),
                " with type ", dtype_name(dtype), expected_float32(dtype));
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
  std::unordered_set<const c10::TensorImpl*> of_models;
  for (const auto& model : models.modules()) {
    check_model(*model);
    for (const at::Tensor& one : model->parameters()) of_models.insert(one.unsafeGetTensorImpl());
  }
  const bool is_cast = is_low_precision(level.cast_model_type().value_or(at::kFloat));
  for (std::size_t i = 0; i < optimizers.optimizers().size(); ++i) {
    torch::optim::Optimizer& optimizer = *optimizers.optimizers()[i];
    const std::vector<at::Tensor> own = OptimizerWords{"", optimizer.param_groups()}.parameters();
    const bool holds_one = std::ranges::any_of(own, [&](const at::Tensor& parameter) {
      return of_models.contains(parameter.unsafeGetTensorImpl());
    });
    // It would step parameters that never get a gradient, and nothing else would show the mistake.
    TORCH_CHECK(holds_one, "optimizer ", i,
                " holds no parameter of the models that were given; construct it with their "
                "parameters, or give its model too");
    if (!is_cast) continue;
    TORCH_CHECK(!has_stepped(optimizer), "optimizer ", i,
                " has stepped already, in float32, and the level casts the model; call "
                "mezzo::initialize before the first step, and load a saved state afterwards");
    if (!level.master_weights() || AnyOptimizer(optimizer).mezzos() != nullptr) continue;
    (void)MasterWeights(optimizer);  // refuses what it cannot step
    refuse_duplicates(own, {"MasterWeights", optimizer.param_groups()});
  }
}

// --- Losses --------------------------------------------------------------------------------------

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

/// Returns `value` with its tensors cast; what holds no tensors that a cast could reach is passed
/// on as it is.
template <class T>
decltype(auto) cast_if(std::optional<at::ScalarType> dtype, T&& value) {
  return map_tensors(std::forward<T>(value), [dtype](const at::Tensor& tensor) {
    return dtype ? cast_if_training_dtype(tensor, *dtype) : tensor;
  });
}

inline at::Tensor one_on(at::Device device) {
  return at::ones({}, at::TensorOptions().device(device).dtype(at::kFloat));
}

/// Returns the gradient of some parameter; undefined if there is none.
inline at::Tensor a_gradient(const torch::optim::Optimizer& optimizer) {
  at::Tensor found;
  for_each_parameter(optimizer, [&](const at::Tensor& parameter) {
    if (!found.defined()) found = parameter.mutable_grad();
  });
  return found;
}

/// If one of the optimizers has an inf or NaN, writes a NaN into the gradients of the others, so
/// that their steps are skipped. Clearing the gradients clears this mark too. No host sync.
inline void share_inf(const std::vector<const torch::optim::Optimizer*>& optimizers) {
  if (optimizers.size() < 2) return;
  const c10::NoGradGuard no_grad;
  std::vector<StepPlan> plans;
  std::vector<at::Tensor> found;
  for (const auto* optimizer : optimizers) {
    const StepPlan& plan = plans.emplace_back(plain_plan(*optimizer));
    if (plan.rows.empty()) continue;
    const std::vector<at::Tensor> gradients = dense_gradients(plan);
    found.push_back(read_gradients(gradients, one_on(gradients[0].device())).found_inf);
  }
  for (const StepPlan& plan : plans) {
    for (const StepPlan::Row& row : plan.rows) {
      at::Tensor first = gradient_values(*row.parameter);
      if (first.numel() == 0) continue;
      while (first.dim() > 0) first = first.select(0, 0);
      for (const at::Tensor& one : found) {
        const at::Tensor is_bad = on_device(one, first.device()).ne(0);
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
    : level_(level), enabled_(options.enabled), policy_(options.policy) {
  TORCH_CHECK(options.num_losses >= 1, "num_losses is ", options.num_losses,
              "; it should be at least 1");
  TORCH_CHECK(level.uses_op_lists() || policy_ == nullptr, "policy: the level ", level.name(),
              " casts no ops, so that op lists mean nothing there; use O1, or leave it out");
  if (enabled_) detail::check_models_and_optimizers(models, optimizers, level);
  for (torch::optim::Optimizer* optimizer : optimizers.optimizers()) {
    Given& one = given_.emplace_back(Given{optimizer, nullptr, *optimizer});
    if (!enabled_ || !level.master_weights() || one.stepper.mezzos() != nullptr) continue;
    one.masters = std::make_unique<MasterWeights>(*optimizer);
    one.stepper = AnyOptimizer(*one.masters);
  }
  for (int64_t i = 0; i < options.num_losses; ++i) {
    GradScalerOptions rule = level.loss_scale();
    rule.enabled = enabled_;
    rule.allow_fp16_gradients = level.cast_model_type() == at::kHalf && !level.master_weights();
    rule.loss_id = i;
    Loss& loss = losses_.emplace_back(Loss{GradScaler(rule)});
    if (options.verbosity < 1) loss.scaler.on_skip(nullptr);
  }
  verdict_.on_skip(nullptr);
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
decltype(auto) Amp::operator()(Model&& model, Args&&... args) const {
  static_assert(std::convertible_to<Model, ModelRefs>,
                "amp(model, ...): the first argument is no model; give one that was given to "
                "mezzo::initialize, or a module inside one");
  ForwardRegions regions;
  const auto module = detail::module_pointer(model);
  TORCH_CHECK(
      module != nullptr,
      "amp(model, ...): the model is an empty holder or a null pointer; construct it first");
  enter(*module, regions);
  const auto inputs = enabled_ ? level_.cast_model_type() : std::nullopt;
  const auto outputs = enabled_ ? level_.cast_model_outputs() : std::nullopt;
  const auto forward = [&]() -> decltype(auto) {
    return module->forward(detail::cast_if(inputs, std::forward<Args>(args))...);
  };
  if constexpr (detail::contains_tensors<decltype(forward())>()) {
    return detail::cast_if(outputs, forward());
  } else {
    return forward();
  }
}

inline void Amp::enter(const torch::nn::Module& wanted, ForwardRegions& regions) const {
  const auto has_wanted = [&wanted](const detail::AmpModel& model) {
    const auto is_wanted = [&wanted](const auto& one) { return one.get() == &wanted; };
    return is_wanted(model.module) ||
           std::ranges::any_of(model.module->modules(/*include_self=*/false), is_wanted);
  };
  const auto model = std::ranges::find_if(models_, has_wanted);
  TORCH_CHECK(model != models_.end(), "amp(model, ...): ", wanted.name(),
              " is none of the models that were given to mezzo::initialize, nor inside one; give "
              "all models to one call, mezzo::initialize({a, b}, ...)");
  if (!enabled_ || !level_.uses_op_lists()) return;
  for (std::size_t i = 0; i < regions.size(); ++i) {
    const c10::DeviceType device = detail::kAutocastDevices[i];
    const auto is_there = [device](const at::Tensor& one) { return one.device().type() == device; };
    if (!model->parameters.empty() && std::ranges::none_of(model->parameters, is_there)) continue;
    regions[i].emplace(detail::validated_options({.device_type = device,
                                                  .dtype = level_.precision().compute_dtype,
                                                  .op_overrides = policy_}));
  }
}

// --- Losses and steps ----------------------------------------------------------------------------

inline void Amp::scale_loss(const at::Tensor& loss, const OptimizerRefs& optimizers,
                            const ScaleLossOptions& options) {
  scale_loss(loss, optimizers, options, [](const at::Tensor& scaled) { scaled.backward(); });
}

template <std::invocable<const at::Tensor&> Backward>
void Amp::scale_loss(const at::Tensor& loss, const OptimizerRefs& optimizers,
                     const ScaleLossOptions& options, Backward&& backward) {
  const Pass pass = begin_pass(loss, optimizers, options);
  try {
    {
      is_in_backward_ = true;
      const auto backward_ends = c10::make_scope_exit([this] { is_in_backward_ = false; });
      std::forward<Backward>(backward)(pass.scaled);
    }
    if (enabled_) end_pass(pass, options.delay_unscale);
  } catch (...) {  // gradients that carried the same scale before stay as the pass left them
    for (std::size_t i = 0; i < pass.aside.size(); ++i) {
      if (pass.aside[i]) pass.optimizers[i]->scaled_by = nullptr;
    }
    throw;
  }
}

inline void Amp::refuse_within_backward(const char* call) const {
  TORCH_CHECK(!is_in_backward_, call,
              ": called within the backward pass of a scale_loss; let that return first");
}

inline Amp::Pass Amp::begin_pass(const at::Tensor& value, const OptimizerRefs& optimizers,
                                 const ScaleLossOptions& options) {
  refuse_within_backward("scale_loss");
  Pass pass{&loss_of(options.loss_id), value};
  TORCH_CHECK(value.defined(),
              "scale_loss: loss is undefined; give the tensor that the criterion returned");
  TORCH_CHECK(!optimizers.optimizers().empty(),
              "scale_loss: name the optimizers that the loss is for, one or several in braces");
  for (const auto* optimizer : optimizers.optimizers()) {
    pass.optimizers.push_back(&given(*optimizer));
  }
  if (!enabled_) return pass;
  refuse_shared_parameters();
  if (pass.loss->was_taken_off) take_scale_off(*pass.loss), end_iteration(*pass.loss);
  for (const Given* one : pass.optimizers) {
    Loss* const other = one->scaled_by;
    if (other != nullptr && other != pass.loss) take_scale_off(*other), end_iteration(*other);
  }
  const bool is_low = detail::is_low_precision(value);
  pass.scaled = pass.loss->scaler.scale(is_low ? value.to(at::kFloat) : value);
  for (const Given* one : pass.optimizers) {
    auto& aside = pass.aside.emplace_back();
    if (one->awaits_step && one->scaled_by == nullptr) {
      aside = std::make_unique<detail::GradientStash>(
          detail::OptimizerWords{"", one->optimizer->param_groups()}.parameters());
    }
  }
  for (Given* one : pass.optimizers) {  // after all that may throw
    one->awaits_step = true;
    one->scaled_by = pass.loss;
  }
  return pass;
}

/// Takes the scale off and moves it, and adds the gradients that were set aside; if `delays` is
/// true, only where gradients were set aside. Without a delay an inf in the gradients of one
/// optimizer counts for all optimizers of the pass, since the loss has overflowed.
inline void Amp::end_pass(const Pass& pass, bool delays) {
  const bool has_aside = std::any_of(pass.aside.begin(), pass.aside.end(),
                                     [](const auto& one) { return one != nullptr; });
  if (delays && !has_aside) return;
  take_scale_off(*pass.loss);
  if (!delays) {
    std::vector<const torch::optim::Optimizer*> optimizers;
    for (const Given* one : pass.optimizers) optimizers.push_back(one->optimizer);
    detail::share_inf(optimizers);
  }
  for (const auto& one : pass.aside) {
    if (one) one->add_back();
  }
  end_iteration(*pass.loss);
}

inline void Amp::take_scale_off(Loss& loss) {
  for (Given& one : given_) {
    if (one.scaled_by != &loss) continue;
    if (detail::a_gradient(*one.optimizer).defined()) {
      loss.scaler.unscale_(one.stepper);
      loss.was_taken_off = true;
    }
    one.scaled_by = nullptr;
  }
}

inline void Amp::end_iteration(Loss& loss) {
  if (std::exchange(loss.was_taken_off, false)) loss.scaler.update();  // a callback may throw
}

/// Refuses a parameter of two optimizers: each would unscale its gradient.
inline void Amp::refuse_shared_parameters() const {
  if (given_.size() < 2) return;
  std::unordered_map<const c10::TensorImpl*, const torch::optim::Optimizer*> owners;
  for (const Given& one : given_) {
    detail::for_each_parameter(*one.optimizer, [&](const at::Tensor& parameter) {
      const auto known = owners.emplace(parameter.unsafeGetTensorImpl(), one.optimizer).first;
      TORCH_CHECK(known->second == one.optimizer, "scale_loss: two optimizers hold ",
                  detail::OptimizerWords{"", one.optimizer->param_groups()}.parameter(parameter),
                  ", whose gradient both would unscale and step with; give it to one of them");
    });
  }
}

inline StepResult Amp::step(torch::optim::Optimizer& optimizer, const StepOptions& options) {
  refuse_within_backward("step");
  Given& one = given(optimizer);
  if (!enabled_) return scaler().step(one.stepper, options);
  TORCH_CHECK(one.awaits_step,
              "step: no loss was scaled for this optimizer since its last step; call "
              "amp.scale_loss(loss, optimizer), which runs backward, before each amp.step");
  if (Loss* const loss = one.scaled_by) take_scale_off(*loss), end_iteration(*loss);
  StepResult result = step_if_finite(one.stepper, options);
  one.awaits_step = false;
  return result;
}

/// Checks, clips and steps with true gradients.
inline StepResult Amp::step_if_finite(AnyOptimizer optimizer, const StepOptions& options) {
  const at::Tensor gradient = detail::a_gradient(optimizer.optimizer());
  if (!gradient.defined()) return StepResult({.ran = true, .value = optimizer.step()});
  if (!std::exchange(has_verdict_scale_, true)) {
    (void)verdict_.scale(detail::one_on(gradient.device()));
  }
  verdict_.discard_iteration();  // of a step that threw
  StepResult result = verdict_.step(optimizer, options);
  verdict_.update();
  return result;
}

inline void Amp::zero_grad(torch::optim::Optimizer& optimizer, bool set_to_none) {
  refuse_within_backward("zero_grad");
  Given& one = given(optimizer);
  optimizer.zero_grad(set_to_none);
  one.awaits_step = false;
  one.scaled_by = nullptr;
}

inline std::vector<at::Tensor> Amp::master_params(torch::optim::Optimizer& optimizer) {
  return mezzo::master_params(given(optimizer).stepper);
}

inline AnyOptimizer& Amp::optimizer(torch::optim::Optimizer& optimizer) {
  return given(optimizer).stepper;
}

/// Returns the entry of an optimizer, after masters have been made for new groups.
inline Amp::Given& Amp::given(const torch::optim::Optimizer& optimizer) {
  Given* found = nullptr;
  for (Given& one : given_) {
    const bool keeps_masters = enabled_ && level_.master_weights() && one.masters == nullptr;
    if (keeps_masters) one.stepper.mezzos()->enable_master_weights();
    if (one.optimizer == &optimizer) found = &one;
  }
  TORCH_CHECK(found != nullptr,
              "optimizer: it was not given to mezzo::initialize; name the object that was");
  return *found;
}

inline Amp::Loss& Amp::loss_of(int64_t loss_id) {
  TORCH_CHECK(loss_id >= 0 && loss_id < num_losses(), "loss_id is ", loss_id,
              "; it should be between 0 and num_losses - 1, which is ", num_losses() - 1,
              " (mezzo::initialize takes {.num_losses = ...})");
  return losses_[static_cast<std::size_t>(loss_id)];
}

// --- State ---------------------------------------------------------------------------------------

inline void Amp::require_between_iterations(const char* call) const {
  const bool is_outstanding =
      std::any_of(given_.begin(), given_.end(), [](const Given& one) { return one.awaits_step; });
  TORCH_CHECK(!is_outstanding, call,
              ": a loss was scaled for an optimizer that has not stepped yet; call it after "
              "amp.step, or amp.zero_grad to give the gradients up");
}

inline Amp::StateDict Amp::state_dict() const {
  require_between_iterations("state_dict");
  StateDict all;
  if (!enabled_) return all;
  for (std::size_t i = 0; i < losses_.size(); ++i) {
    GradScaler::StateDict entry = losses_[i].scaler.state_dict();
    entry["loss_scale"] = entry.at("scale");
    entry["unskipped"] = entry.at("_growth_tracker");
    all[detail::loss_scaler_key(i)] = std::move(entry);
  }
  return all;
}

inline void Amp::check_state_dict(const StateDict& state) const {
  if (!enabled_) return;
  require_between_iterations("load_state_dict");
  TORCH_CHECK(state.size() == losses_.size(), "load_state_dict: state_dict contains ", state.size(),
              " entries, while ", losses_.size(),
              " loss_scalers are used; give mezzo::initialize the num_losses that was saved");
  for (std::size_t i = 0; i < losses_.size(); ++i) {
    const std::string key = detail::loss_scaler_key(i);
    TORCH_CHECK(state.count(key) == 1, "load_state_dict: the state lacks \"", key,
                "\"; it should be what Amp::state_dict or Apex's amp.state_dict returned");
    const GradScaler& scaler = losses_[i].scaler;
    GradScaler(scaler.options())
        .load_state_dict(detail::full_scaler_state(key, state.at(key), scaler.state_dict()));
  }
}

inline void Amp::load_state_dict(const StateDict& state) {
  check_state_dict(state);
  for (std::size_t i = 0; i < losses_.size() && enabled_; ++i) {
    const std::string key = detail::loss_scaler_key(i);
    GradScaler& scaler = losses_[i].scaler;
    scaler.load_state_dict(detail::full_scaler_state(key, state.at(key), scaler.state_dict()));
  }
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
