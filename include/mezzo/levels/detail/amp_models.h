/// \file
/// The models that were given to `initialize`: checks before anything is changed, and the cast.
#pragma once

#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/model_list.h>
#include <mezzo/base/precision.h>
#include <mezzo/base/version.h>
#include <mezzo/levels/opt_level.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/detail/optimizer_words.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/optimizer.h>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/rnn.h>
#include <torch/optim/adagrad.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

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

/// Flattens the weights of recurrent layers, which cuDNN requires to be contiguous.
template <class... Layers>
void flatten_recurrent_weights(torch::nn::Module& module) {
  const auto flatten = [](auto* layer) {
    if (layer != nullptr) layer->flatten_parameters();
  };
  (flatten(dynamic_cast<Layers*>(&module)), ...);
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
  model.apply([&](torch::nn::Module& module) {
    if (!keep_batchnorm_fp32 || !is_batch_norm(module)) return;
    each_tensor(module, [&](const at::Tensor& one) { kept.insert(one.unsafeGetTensorImpl()); });
  });
  model.apply([&](torch::nn::Module& module) {
    each_tensor(module, [&](const at::Tensor& one) {
      if (kept.count(one.unsafeGetTensorImpl()) == 0) cast_in_place(one, dtype);
    });
    flatten_recurrent_weights<torch::nn::RNNImpl, torch::nn::LSTMImpl, torch::nn::GRUImpl>(module);
  });
}

/// Returns the parameters of all groups.
inline std::vector<at::Tensor> parameters_of(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.param_groups()) {
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  }
  return parameters;
}

/// Refuses an optimizer of another model. It would step parameters that never get a gradient, and
/// nothing else would show the mistake.
inline void check_holds_one_of(const std::unordered_set<const c10::TensorImpl*>& of_models,
                               const torch::optim::Optimizer& optimizer, std::size_t number) {
  const std::vector<at::Tensor> own = parameters_of(optimizer);
  const bool holds_one = std::any_of(own.begin(), own.end(), [&](const at::Tensor& parameter) {
    return of_models.count(parameter.unsafeGetTensorImpl()) != 0;
  });
  TORCH_CHECK(holds_one, "optimizer ", number,
              " holds no parameter of the models that were given; construct it with their "
              "parameters, or give its model too");
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

/// Checks that an optimizer can step after the models are cast, since the cast cannot be undone.
inline void check_is_ready_to_cast(torch::optim::Optimizer& optimizer, std::size_t number,
                                   bool wants_masters) {
  TORCH_CHECK(!has_stepped(optimizer), "optimizer ", number,
              " has stepped already, in float32, and the level casts the model; call "
              "mezzo::initialize before the first step, and load a saved state afterwards");
  const bool is_mezzos = AnyOptimizer(optimizer).mezzos() != nullptr;
  if (!wants_masters || is_mezzos) return;
  (void)MasterWeights(optimizer);  // refuses what it cannot step
  refuse_duplicates(parameters_of(optimizer), {"MasterWeights", optimizer.param_groups()});
}

inline void check_models_and_optimizers(const ModelList& models, const OptimizerList& optimizers,
                                        const OptLevel& level) {
  std::unordered_set<const c10::TensorImpl*> parameters;
  for (const auto& model : models.modules()) {
    check_model(*model);
    for (const at::Tensor& parameter : model->parameters()) {
      parameters.insert(parameter.unsafeGetTensorImpl());
    }
  }
  const bool is_cast = is_low_precision(level.cast_model_type().value_or(at::kFloat));
  for (std::size_t i = 0; i < optimizers.optimizers().size(); ++i) {
    torch::optim::Optimizer& optimizer = *optimizers.optimizers()[i];
    check_holds_one_of(parameters, optimizer, i);
    if (is_cast) check_is_ready_to_cast(optimizer, i, level.master_weights());
  }
}

/// A model that was given to `initialize`, and the types of its devices.
class AmpModel {
 public:
  explicit AmpModel(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {
    for (const at::Tensor& parameter : module_->parameters()) {
      if (!lies_on(parameter.device().type())) placed_.push_back(parameter);
    }
  }

  /// Returns the model or inner module at this address, or null.
  torch::nn::Module* find(const void* wanted) const {
    if (module_.get() == wanted) return module_.get();
    for (const auto& module : module_->modules(/*include_self=*/false)) {
      if (module.get() == wanted) return module.get();
    }
    return nullptr;
  }

  /// Whether a parameter is on this type of device. True for a model without parameters.
  bool lies_on(c10::DeviceType type) const {
    for (const at::Tensor& parameter : placed_) {
      if (parameter.device().type() == type) return true;
    }
    return false;
  }
  bool runs_on(c10::DeviceType type) const { return placed_.empty() || lies_on(type); }

 private:
  std::shared_ptr<torch::nn::Module> module_;
  std::vector<at::Tensor> placed_;  // one parameter for each type of device
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
