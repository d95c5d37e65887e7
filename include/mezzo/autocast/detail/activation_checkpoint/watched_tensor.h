/// \file
/// Notices that a tensor was modified, or given other memory, between the first run and the
/// recomputation.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <mezzo/base/detail/write_stamp.h>
#include <mezzo/base/version.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A tensor as it was when this was made, which does not keep it alive: one that is gone is not
/// used again. Tensors of inference mode have no version: only other memory is noticed in them.
class WatchedTensor {
 public:
  WatchedTensor(const at::Tensor& tensor, const char* role)
      : tensor_(tensor.getIntrusivePtr()), role_(role), stamp_(WriteStamp::of(tensor)) {}

  bool is_unmodified() const {
    const at::Tensor tensor(tensor_.lock());
    return !tensor.defined() || stamp_.is_current(tensor);
  }

  /// Throws when the tensor has been modified since.
  void check(const char* when) const {
    const at::Tensor tensor(tensor_.lock());
    if (!tensor.defined()) return;
    TORCH_CHECK(version_of(tensor) == stamp_.version, "checkpoint: ", role_, ", ",
                tensor.scalar_type(), tensor.sizes(), ", was modified in place ", when,
                " (version ", version_of(tensor), ", expected ", stamp_.version,
                "), so that running the function again would compute something else. Clone it "
                "first, or modify it after backward.");
    TORCH_CHECK(stamp_.has_memory_of(tensor), "checkpoint: ", role_, ", ", tensor.scalar_type(),
                tensor.sizes(), ", was given other memory ", when,
                ", as set_data and EmaScope do, so that running the function again would compute "
                "something else. Give it back its own before backward, or do it after backward.");
  }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor_;
  const char* role_;
  WriteStamp stamp_;
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
