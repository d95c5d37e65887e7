#pragma once

#include <mezzo/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>

#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Whether the elements of both lie in the same order.
inline bool same_layout(const at::Tensor& left, const at::Tensor& right) {
  if (left.strides().equals(right.strides())) return true;
  for (int64_t dimension = 0; dimension < left.dim(); ++dimension) {
    const bool matters = left.size(dimension) > 1;
    if (matters && left.stride(dimension) != right.stride(dimension)) return false;
  }
  return true;
}

/// Whether the values are the memory's: no bit says that they are to be negated or conjugated.
inline bool is_plain(const at::Tensor& tensor) {
  return !tensor.is_neg() && !tensor.is_conj() && !tensor._is_zerotensor();
}

/// `tensor`'s values in memory laid out as `like`'s: `tensor` itself where it already is.
inline at::Tensor in_layout_of(const at::Tensor& like, const at::Tensor& tensor) {
  if (is_plain(tensor) && same_layout(like, tensor)) return tensor;
  at::Tensor copy = at::empty_strided(like.sizes(), like.strides(), tensor.options());
  copy.copy_(tensor);
  return copy;
}

/// A parameter as memory without gaps, whose elements lie in the order that the parameter's,
/// where dense, have: itself where it is dense, else a copy that must be written back.
inline at::Tensor dense_parameter(const at::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense() && is_plain(parameter)) return parameter;
  return parameter.detach().clone(at::MemoryFormat::Contiguous);
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
