#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <cstdint>
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

/// Whether two of the tensors lie in the same bytes, or, for tensors with gaps, may do so. Lazy
/// copies do not, until they are written.
inline bool may_overlap(const std::vector<at::Tensor>& tensors) {
  struct Range {
    const c10::StorageImpl* storage;
    int64_t begin;
    int64_t end;
  };
  std::vector<Range> ranges;
  ranges.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0 || !tensor.has_storage()) continue;
    int64_t last = 0;
    for (int64_t dimension = 0; dimension < tensor.dim(); ++dimension) {
      last += (tensor.size(dimension) - 1) * tensor.stride(dimension);
    }
    const auto element_size = static_cast<int64_t>(tensor.element_size());
    const int64_t begin = tensor.storage_offset() * element_size;
    ranges.push_back(
        {tensor.storage().unsafeGetStorageImpl(), begin, begin + (last + 1) * element_size});
  }
  const auto is_before = [](const Range& a, const Range& b) {
    return std::pair(a.storage, a.begin) < std::pair(b.storage, b.begin);
  };
  std::sort(ranges.begin(), ranges.end(), is_before);
  const auto touch = [](const Range& a, const Range& b) {
    return a.storage == b.storage && b.begin < a.end;
  };
  return std::adjacent_find(ranges.begin(), ranges.end(), touch) != ranges.end();
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
