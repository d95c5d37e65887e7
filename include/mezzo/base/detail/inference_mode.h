#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

// Tensors created under InferenceMode are inference tensors: ATen throws for writes to them outside
// the mode, and they have no version. Any part of a training loop may run under it.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Disables grad mode, and InferenceMode, so that new tensors are normal tensors. With
/// `inference_tensors`, enables InferenceMode, in which inference tensors can be modified.
class NoGradInferenceGuard {
 public:
  explicit NoGradInferenceGuard(bool inference_tensors = false) : inference_(inference_tensors) {}

 private:
  c10::InferenceMode inference_;  // first, since InferenceMode(false) enables grad mode
  c10::NoGradGuard no_grad_;
};

inline void zero_grad_(const at::Tensor& gradient) {
  if (gradient._is_zerotensor()) return;  // a ZeroTensor has no storage to write
  const NoGradInferenceGuard no_grad(gradient.is_inference());
  gradient.zero_();
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
