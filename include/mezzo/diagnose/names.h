/// \file
/// What reports call tensors: a parameter by its name and by its memory, and an op by the module
/// whose parameter it reads.
#pragma once

#include <mezzo/autocast/detail/op_arguments.h>
#include <mezzo/base/named_tensors.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/finding.h>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// A model with a name of its own among several.
struct NamedModel {
  std::string name;  ///< in front of the names of its parameters
  std::reference_wrapper<const torch::nn::Module> model;  ///< outlives what it is given to
};

/// Returns all parameters of a floating dtype, as `named_parameters` orders them, each once.
inline NamedTensors name_parameters(const torch::nn::Module& model) {
  return detail::NamedOnce().floating(model.named_parameters());
}

/// Returns all parameters of a floating dtype of `models`, each once: "generator.0.weight".
inline NamedTensors name_parameters(const std::vector<NamedModel>& models) {
  NamedTensors all;
  detail::NamedOnce once;
  for (const auto& [name, model] : models) {
    for (auto& [own, parameter] : once.floating(model.get().named_parameters())) {
      all.emplace_back(name + "." + own, std::move(parameter));
    }
  }
  return all;
}

namespace detail {

/// Returns the memory that a tensor is or is a view of; null where it has none.
inline c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl()
                                                  : nullptr;
}

/// Tensors by their memory, as it is when they are asked for. Finds views of them, and parameters
/// that lie in one flat buffer.
class Names {
 public:
  explicit Names(NamedTensors tensors) : tensors_(std::move(tensors)) {}

  /// Returns the name of the tensor that `tensor` is or is a view of; empty of another one.
  std::string name_of(const at::Tensor& tensor) const {
    const auto* const memory = storage_of(tensor);
    for (const auto& [name, known] : tensors_) {
      if (memory == nullptr || storage_of(known) != memory) continue;
      const std::int64_t offset = tensor.storage_offset() - known.storage_offset();
      if (offset >= 0 && offset < std::max<std::int64_t>(known.numel(), 1)) return name;
    }
    return {};
  }

  /// Returns the module of the first of these tensors among an op's inputs; none if it reads none.
  std::optional<std::string> module_of(OpArguments inputs) const {
    std::string name;
    for_each_tensor(inputs, [&](const at::Tensor& tensor) {
      if (name.empty()) name = name_of(tensor);
    });
    if (name.empty()) return std::nullopt;
    return layer_name(name);
  }

 private:
  NamedTensors tensors_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
