#pragma once

#include <mezzo/base/detail/inference_tensors.h>
#include <mezzo/base/version.h>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// \throws c10::Error if elements of a gradient share memory: no kernel can write them in place
inline void check_writable(const std::vector<at::Tensor>& gradients) {
  for (const at::Tensor& gradient : gradients) at::assert_no_internal_overlap(gradient);
}

/// Whether a tensor's values are exactly its numel() elements from data_ptr on, in whatever order.
inline bool is_dense_memory(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && !tensor.is_neg() && !tensor.is_conj() &&
         !tensor._is_zerotensor();
}

/// In lists of one dtype each, as ATen's kernels for lists take tensors; the order within a dtype
/// stays.
inline std::vector<std::vector<at::Tensor>> by_dtype(const std::vector<at::Tensor>& tensors) {
  std::vector<std::vector<at::Tensor>> lists;
  for (const at::Tensor& tensor : tensors) {
    auto list = lists.begin();
    while (list != lists.end() && list->front().scalar_type() != tensor.scalar_type()) ++list;
    if (list == lists.end()) list = lists.emplace(list);
    list->push_back(tensor);
  }
  return lists;
}

/// Gradients as memory that a kernel can walk: what has gaps or no memory, or is negative by a
/// bit, is copied.
class DenseGradients {
 public:
  explicit DenseGradients(const std::vector<at::Tensor>& gradients) : tensors_(gradients) {
    for (at::Tensor& tensor : tensors_) {
      if (is_dense_memory(tensor)) continue;
      at::Tensor copy = tensor.clone(at::MemoryFormat::Contiguous);
      copies_.emplace_back(std::exchange(tensor, copy), copy);
    }
  }

  const std::vector<at::Tensor>& tensors() const noexcept { return tensors_; }

  /// To be called after a kernel wrote to `tensors`: autograd does not see raw writes, and copies
  /// go back where they came from.
  void written() const {
    for (const at::Tensor& tensor : tensors_) bump_version(*tensor.unsafeGetTensorImpl());
    for (const auto& [gradient, copy] : copies_) {
      const NoGraphGuard no_graph(gradient.is_inference());
      gradient.copy_(copy);
    }
  }

 private:
  std::vector<at::Tensor> tensors_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // (gradient, its dense copy)
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
