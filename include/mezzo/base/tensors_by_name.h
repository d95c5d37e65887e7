/// \file
/// TensorsByName: tensors with their names in a model.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/StringUtil.h>

#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Parameters or buffers with the names that errors and reports use, such as
/// `model->named_parameters().pairs()`. The tensors share the model's storage.
using TensorsByName = std::vector<std::pair<std::string, at::Tensor>>;

namespace detail {

/// Returns the tensors of a module by their keys in Python's state_dict.
template <class Module>
TensorsByName get_state_dict(const Module& module) {
  TensorsByName tensors = module.named_parameters().pairs();
  const TensorsByName buffers = module.named_buffers().pairs();
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  std::erase_if(tensors, [](const auto& named) { return !named.second.defined(); });
  return tensors;
}

/// Returns equal strings for tied weights: the same elements in memory.
inline std::string memory_key(const at::Tensor& tensor) {
  const void* const memory =
      tensor.numel() == 0 ? tensor.unsafeGetTensorImpl() : tensor.const_data_ptr();
  return c10::str(memory, tensor.scalar_type(), tensor.sizes(), tensor.strides());
}

/// Collects the defined tensors of `named_parameters()` or `named_buffers()` of C++ and TorchScript
/// modules, each once. A tied weight has its first name.
class UniqueTensorCollector {
 public:
  template <class List>
  TensorsByName collect(const List& list) {
    return collect_if(list, [](const at::Tensor&) { return true; });
  }

  /// Collects floating-point tensors only.
  template <class List>
  TensorsByName collect_floating(const List& list) {
    return collect_if(list, [](const at::Tensor& tensor) { return tensor.is_floating_point(); });
  }

 private:
  template <class List, class Predicate>
  TensorsByName collect_if(const List& list, const Predicate& predicate) {
    TensorsByName tensors;
    const auto add = [&](const std::string& name, const at::Tensor& tensor) {
      if (!tensor.defined() || !predicate(tensor)) return;
      if (seen_.insert(tensor.unsafeGetTensorImpl()).second) tensors.emplace_back(name, tensor);
    };
    for (const auto& entry : list) {
      if constexpr (requires { entry.key(); }) {
        add(entry.key(), entry.value());
      } else {
        add(entry.name, entry.value);
      }
    }
    return tensors;
  }

  std::unordered_set<const c10::TensorImpl*> seen_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
