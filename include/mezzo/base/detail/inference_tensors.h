#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>

// What is made under InferenceMode is an inference tensor: outside of it ATen does not write it,
// and it has no version that could be bumped. A step may run under it, and be the first of many.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Until it ends no graph is recorded and new tensors are plain, in any mode. With `true` they are
/// inference tensors, and existing ones can be written.
class NoGraphGuard {
 public:
  explicit NoGraphGuard(bool inference_tensors = false) : inference_(inference_tensors) {}

 private:
  c10::InferenceMode inference_;  // turns graphs on where it is off, so that it comes first
  c10::NoGradGuard no_grad_;
};

inline void clear_gradient(const at::Tensor& gradient) {
  if (gradient._is_zerotensor()) return;  // it has no memory, and refuses writes
  const NoGraphGuard no_graph(gradient.is_inference());
  gradient.zero_();
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
