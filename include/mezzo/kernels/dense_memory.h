#pragma once

#include <mezzo/base/detail/inference_mode.h>
#include <mezzo/base/version.h>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

// Checks and copies for kernels that read a tensor's memory as one contiguous range.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Bumps the autograd version after a raw write. Inference tensors have none.
inline void bump_version(const at::Tensor& written) {
  if (!written.is_inference()) written.unsafeGetTensorImpl()->bump_version();
}

/// Returns whether the tensor has no negation or conjugation bit and is no zero tensor.
inline bool is_resolved(const at::Tensor& tensor) {
  return !tensor.is_neg() && !tensor.is_conj() && !tensor._is_zerotensor();
}

/// Returns whether the numel() elements from data_ptr() on are the tensor's values, in any order.
inline bool is_dense_memory(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && is_resolved(tensor);
}

/// Returns whether two tensors of one shape have equal strides in all dimensions of size > 1.
inline bool same_strides(const at::Tensor& left, const at::Tensor& right) {
  if (left.is_contiguous() && right.is_contiguous()) return true;
  if (left.strides().equals(right.strides())) return true;
  for (int64_t dimension = 0; dimension < left.dim(); ++dimension) {
    if (left.size(dimension) > 1 && left.stride(dimension) != right.stride(dimension)) return false;
  }
  return true;
}

/// Returns `tensor` if it has the strides of `like`, otherwise a copy that has.
inline at::Tensor with_strides_of(const at::Tensor& like, const at::Tensor& tensor) {
  if (is_resolved(tensor) && same_strides(like, tensor)) return tensor;
  at::Tensor copy = at::empty_strided(like.sizes(), like.strides(), tensor.options());
  copy.copy_(tensor);
  return copy;
}

/// Returns whether two tensors, within bytes [begin, end) of their storage, share a byte. Marks the
/// bytes of `left` in a mask.
inline bool share_bytes(const at::Tensor& left, const at::Tensor& right, int64_t begin,
                        int64_t end) {
  const at::Tensor mask = at::zeros({end - begin}, at::kBool);
  const auto byte_view = [&](const at::Tensor& tensor) {
    const auto element_size = static_cast<int64_t>(tensor.element_size());
    std::vector<int64_t> sizes = tensor.sizes().vec(), strides = tensor.strides().vec();
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      if (strides[i] == 0) sizes[i] = 1;  // fill_ throws for expanded tensors
      strides[i] *= element_size;
    }
    sizes.push_back(element_size), strides.push_back(1);
    return mask.as_strided(sizes, strides, tensor.storage_offset() * element_size - begin);
  };
  byte_view(left).fill_(true);
  return byte_view(right).any().item<bool>();
}

/// Returns two of the tensors that share memory. Copy-on-write copies are distinct until written.
inline std::optional<std::pair<at::Tensor, at::Tensor>> find_overlap(
    const std::vector<at::Tensor>& tensors) {
  struct Range {
    const at::Tensor* tensor;
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
    ranges.push_back({&tensor, tensor.storage().unsafeGetStorageImpl(), begin,
                      begin + (last + 1) * element_size});
  }
  const auto is_before = [](const Range& a, const Range& b) {
    return std::pair(a.storage, a.begin) < std::pair(b.storage, b.begin);
  };
  std::sort(ranges.begin(), ranges.end(), is_before);
  for (auto first = ranges.begin(); first != ranges.end(); ++first) {
    for (auto next = std::next(first); next != ranges.end(); ++next) {
      if (next->storage != first->storage || next->begin >= first->end) break;
      const at::Tensor &left = *first->tensor, &right = *next->tensor;
      const bool are_dense =
          left.is_non_overlapping_and_dense() && right.is_non_overlapping_and_dense();
      if (are_dense || share_bytes(left, right, first->begin, std::max(first->end, next->end))) {
        return std::pair(left, right);
      }
    }
  }
  return std::nullopt;
}

/// Returns the tensors in order, without duplicates.
inline std::vector<at::Tensor> unique_tensors(std::vector<at::Tensor> tensors) {
  std::unordered_set<const c10::TensorImpl*> seen;
  std::erase_if(tensors, [&seen](const at::Tensor& tensor) {
    return !seen.insert(tensor.unsafeGetTensorImpl()).second;
  });
  return tensors;
}

/// A contiguous range of elements of one dtype, for kernels.
struct ContiguousRange {
  void* data;
  int64_t numel;
  at::ScalarType dtype;

  /// Returns the address of element `i`.
  void* at(int64_t i) const {
    return static_cast<char*>(data) + i * static_cast<int64_t>(c10::elementSize(dtype));
  }
};

/// The memory of gradients as ranges, in order. Gradients adjacent in one storage, in either
/// direction, are merged: those of GradBuckets become one range per bucket.
class ContiguousRanges {
 public:
  /// Adds a dense tensor whose elements begin at `data`.
  void add(const at::Tensor& tensor, void* data) {
    add(tensor, {data, tensor.numel(), tensor.scalar_type()});
  }
  /// Adds the range of a dense tensor.
  void add(const at::Tensor& tensor, const ContiguousRange& range) {
    if (range.numel == 0) return;
    const c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
    const bool may_merge =
        !ranges_.empty() && storage == storage_ && ranges_.back().dtype == range.dtype;
    storage_ = storage;
    if (may_merge && range.data == ranges_.back().at(ranges_.back().numel)) {
      ranges_.back().numel += range.numel;
    } else if (may_merge && range.at(range.numel) == ranges_.back().data) {
      ranges_.back() = {range.data, range.numel + ranges_.back().numel, range.dtype};
    } else {
      ranges_.push_back(range);
    }
  }
  const std::vector<ContiguousRange>& ranges() const noexcept { return ranges_; }

 private:
  std::vector<ContiguousRange> ranges_;
  const c10::StorageImpl* storage_ = nullptr;  // of the last tensor
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
