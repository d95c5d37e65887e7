/// \file
/// Notices that a tensor was modified in place between the first run and the recomputation.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <mezzo/base/version.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A tensor as it was when this was made, which does not keep it alive: one that is gone is not
/// used again. Tensors of inference mode have no version and pass unwatched.
class WatchedTensor {
 public:
  WatchedTensor(const at::Tensor& tensor, const char* role)
      : tensor_(tensor.getIntrusivePtr()), role_(role), version_(version_of(tensor)) {}

  bool is_unmodified() const {
    const at::Tensor tensor(tensor_.lock());
    return !tensor.defined() || version_of(tensor) == version_;
  }

  /// Throws when the tensor has been modified since.
  void check(const char* when) const {
    const at::Tensor tensor(tensor_.lock());
    TORCH_CHECK(
        !tensor.defined() || version_of(tensor) == version_, "checkpoint: ", role_, ", ",
        tensor.scalar_type(), tensor.sizes(), ", was modified in place ", when, " (version ",
        version_of(tensor), ", expected ", version_,
        "), so that running the function again would compute something else. Clone it first, "
        "or modify it after backward.");
  }

 private:
  static int64_t version_of(const at::Tensor& tensor) {
    return tensor.is_inference() ? 0 : tensor._version();
  }

  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor_;
  const char* role_;
  int64_t version_;
};

/// The leaves among the tensors that `edges` lead to: parameters, as a rule.
inline void watch_leaves(const torch::autograd::edge_list& edges,
                         std::vector<WatchedTensor>& watched) {
  for (const auto& edge : edges) {
    const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get());
    if (leaf != nullptr) watched.emplace_back(leaf->variable, "a parameter");
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
