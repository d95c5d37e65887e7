#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

// Tensors created under InferenceMode are inference tensors: ATen refuses to write to them outside
// of that mode, and they have no version. A step, even the first of many, may run under this mode.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Disables graph recording for a scope, and makes new tensors ordinary ones in any mode. With
/// `true`, new tensors are inference tensors, and existing inference tensors can be written.
class NoGradInferenceGuard {
 public:
  explicit NoGradInferenceGuard(bool inference_tensors = false) : inference_(inference_tensors) {}

 private:
  c10::InferenceMode inference_;  // first, since InferenceMode(false) enables graphs
  c10::NoGradGuard no_grad_;
};

inline void zero_grad_(const at::Tensor& gradient) {
  if (gradient._is_zerotensor()) return;  // a zero tensor has no memory and refuses writes
  const NoGradInferenceGuard no_graph(gradient.is_inference());
  gradient.zero_();
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
