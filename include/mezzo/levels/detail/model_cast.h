/// \file
/// A model on its way to half or bfloat16: what must hold before, and the cast itself.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/rnn.h>

#include <memory>
#include <string>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline constexpr const char* kCastIsOurs =
    "; when using mezzo::initialize, you do not need to cast your model before passing it, no "
    "matter what optimization level you choose: give it in float32";

/// Apex's check: whoever casts a model first has no float32 weights left for masters to start from.
inline void check_model(const torch::nn::Module& model) {
  for (const auto& item : model.named_parameters()) {
    const at::Tensor& parameter = item.value();
    TORCH_CHECK(
        !at::isFloatingType(parameter.scalar_type()) || parameter.scalar_type() == at::kFloat,
        "Found param ", item.key(), " of ", model.name(), " with type ",
        dtype_name(parameter.scalar_type()), ", expected float32", kCastIsOurs);
    TORCH_CHECK(parameter.is_cpu() || parameter.is_cuda(), "Found param ", item.key(), " of ",
                model.name(), " on ", parameter.device(),
                "; mixed precision is for models on cpu and cuda: move it there first");
  }
  for (const auto& item : model.named_buffers()) {
    TORCH_CHECK(!is_low_precision(item.value().scalar_type()), "Found buffer ", item.key(), " of ",
                model.name(), " with type ", dtype_name(item.value().scalar_type()),
                ", expected float32", kCastIsOurs);
  }
}

inline bool is_batch_norm(const torch::nn::Module& module) {
  return dynamic_cast<const torch::nn::BatchNorm1dImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::BatchNorm2dImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::BatchNorm3dImpl*>(&module) != nullptr;
}

/// The same tensor object in another dtype, so that whoever holds it, an optimizer say, sees that.
inline void cast_in_place(at::Tensor tensor, at::ScalarType dtype) {
  if (!tensor.defined() || !at::isFloatingType(tensor.scalar_type())) return;
  const at::Tensor gradient = tensor.grad();
  tensor.set_data(tensor.detach().to(dtype));
  if (gradient.defined()) tensor.mutable_grad() = gradient.to(dtype);
}

/// cuDNN wants the weights of a recurrent layer in one piece of memory.
template <class... Layers>
void flatten_recurrent_weights(torch::nn::Module& module) {
  const auto flatten = [](auto* layer) {
    if (layer != nullptr) layer->flatten_parameters();
  };
  (flatten(dynamic_cast<Layers*>(&module)), ...);
}

/// Unlike torch::nn::Module::to(dtype), which in libtorch casts integer buffers too (a batch norm's
/// count of batches would end at 2048 in half).
inline void cast_model(torch::nn::Module& model, at::ScalarType dtype, bool keep_batchnorm_fp32) {
  const c10::NoGradGuard no_grad;
  for (const std::shared_ptr<torch::nn::Module>& module : model.modules()) {
    if (keep_batchnorm_fp32 && is_batch_norm(*module)) continue;
    for (const at::Tensor& parameter : module->parameters(/*recurse=*/false)) {
      cast_in_place(parameter, dtype);
    }
    for (const at::Tensor& buffer : module->buffers(/*recurse=*/false)) {
      cast_in_place(buffer, dtype);
    }
    flatten_recurrent_weights<torch::nn::RNNImpl, torch::nn::LSTMImpl, torch::nn::GRUImpl>(*module);
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
