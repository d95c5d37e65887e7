/// \file
/// Notices that a tensor was modified in place between the first run and the recomputation.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <mezzo/version.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A tensor as it was when this was made. Tensors of inference mode have no version and pass
/// unwatched.
class WatchedTensor {
 public:
  WatchedTensor(at::Tensor tensor, std::string role)
      : tensor_(std::move(tensor)), role_(std::move(role)) {
    if (tensor_.is_inference()) return;
    version_ = tensor_._version();
  }

  /// Throws when the tensor has been modified since.
  void check(const char* when) const {
    TORCH_CHECK(
        tensor_.is_inference() || tensor_._version() == version_, "checkpoint: ", role_, ", ",
        tensor_.scalar_type(), tensor_.sizes(), ", was modified in place ", when, " (version ",
        tensor_._version(), ", expected ", version_,
        "), so that running the function again would compute something else. Clone it first, "
        "or modify it after backward.");
  }

 private:
  at::Tensor tensor_;
  std::string role_;
  int64_t version_ = 0;
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
