#pragma once

#include <mezzo/detail/optim/dense_memory.h>
#include <mezzo/version.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <vector>

// What would train a weight twice in a step, or with another scale than it has.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Two threads would step the same memory at once; or two masters would be rounded into it.
inline void refuse_duplicates(const std::vector<at::Tensor>& all, const char* optimizer) {
  std::vector<const void*> parameters;
  std::vector<at::Tensor> dense;
  for (const at::Tensor& parameter : all) {
    parameters.push_back(parameter.unsafeGetTensorImpl());
    const bool is_dense = parameter.layout() == at::kStrided;
    if (is_dense && parameter.is_non_overlapping_and_dense()) dense.push_back(parameter);
  }
  std::sort(parameters.begin(), parameters.end());
  TORCH_CHECK(std::adjacent_find(parameters.begin(), parameters.end()) == parameters.end(),
              optimizer, ": a parameter is given twice; give each once, tied ones too");
  TORCH_CHECK(!may_overlap(dense), optimizer,
              ": two parameters share memory; give one tensor for what is tied");
}

/// The parameter's own gradient still carries the loss scale then.
inline void refuse_unscaled_master(const at::Tensor& master, const char* optimizer) {
  TORCH_CHECK(!master.defined() || !master.grad().defined(), optimizer,
              ": step() takes the gradients of the parameters, and a master has one of its own, "
              "which GradScaler::unscale_ writes; step with scaler.step(optimizer), or end the "
              "iteration with scaler.update()");
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
