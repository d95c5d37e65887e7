/// \file
/// Floating-point parameters and buffers of one or several models, with their names.
#pragma once

#include <mezzo/base/tensors_by_name.h>
#include <mezzo/base/version.h>

#include <torch/nn/module.h>

#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// One of several models.
struct NamedModel {
  std::string name;                                       ///< prefix of its parameters' names
  std::reference_wrapper<const torch::nn::Module> model;  ///< must outlive the call
};

namespace detail {

/// Returns the floating-point tensors of `list(model)` for all models, each once, as "name.tensor".
template <class List>
TensorsByName collect_with_prefix(const std::vector<NamedModel>& models, const List& list) {
  TensorsByName tensors;
  UniqueTensorCollector once;
  for (const auto& [prefix, model] : models) {
    for (auto& [name, tensor] : once.collect_floating(list(model.get()))) {
      tensors.emplace_back(prefix + "." + name, std::move(tensor));
    }
  }
  return tensors;
}

/// Returns the name of the module that owns a parameter; "(model)" for the root module.
inline std::string layer_name(const std::string& parameter) {
  const std::size_t dot = parameter.rfind('.');
  return dot == std::string::npos ? "(model)" : parameter.substr(0, dot);
}

}  // namespace detail

/// Returns the floating-point parameters in the order of `named_parameters`, tied ones once.
inline TensorsByName named_float_parameters(const torch::nn::Module& model) {
  return detail::UniqueTensorCollector().collect_floating(model.named_parameters());
}

/// Returns the floating-point parameters of `models`, each once: "generator.0.weight".
inline TensorsByName named_float_parameters(const std::vector<NamedModel>& models) {
  return detail::collect_with_prefix(
      models, [](const torch::nn::Module& model) { return model.named_parameters(); });
}

/// Returns the floating-point buffers, each once.
inline TensorsByName named_float_buffers(const torch::nn::Module& model) {
  return detail::UniqueTensorCollector().collect_floating(model.named_buffers());
}

/// Returns the floating-point buffers of `models`, each once: "generator.1.running_mean".
inline TensorsByName named_float_buffers(const std::vector<NamedModel>& models) {
  return detail::collect_with_prefix(
      models, [](const torch::nn::Module& model) { return model.named_buffers(); });
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
