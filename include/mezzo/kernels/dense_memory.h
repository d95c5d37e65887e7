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
#include <utility>
#include <vector>

// Decides whether a loop can walk a tensor's memory, and copies tensors for which it cannot.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Call this after a raw write, which autograd does not detect. An inference tensor has no version.
inline void bump_version(const at::Tensor& written) {
  if (!written.is_inference()) written.unsafeGetTensorImpl()->bump_version();
}

/// Returns whether the tensor's memory holds its values: it has no negation or conjugation bit.
inline bool is_resolved(const at::Tensor& tensor) {
  return !tensor.is_neg() && !tensor.is_conj() && !tensor._is_zerotensor();
}

/// Returns whether a tensor's values are the numel() elements from data_ptr on, in any order.
inline bool is_dense_memory(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && is_resolved(tensor);
}

/// Returns whether two tensors of the same shape have their elements in the same order in memory.
inline bool same_strides(const at::Tensor& left, const at::Tensor& right) {
  if (left.is_contiguous() && right.is_contiguous()) return true;
  if (left.strides().equals(right.strides())) return true;
  for (int64_t dimension = 0; dimension < left.dim(); ++dimension) {
    const bool matters = left.size(dimension) > 1;
    if (matters && left.stride(dimension) != right.stride(dimension)) return false;
  }
  return true;
}

/// Returns `tensor` with the memory layout of `like`: itself if it has that layout, else a copy.
inline at::Tensor with_strides_of(const at::Tensor& like, const at::Tensor& tensor) {
  if (is_resolved(tensor) && same_strides(like, tensor)) return tensor;
  at::Tensor copy = at::empty_strided(like.sizes(), like.strides(), tensor.options());
  copy.copy_(tensor);
  return copy;
}

/// Returns whether two tensors of one storage have a byte in common, by marking the bytes of one in
/// a mask of all that both pointers.
inline bool share_bytes(const at::Tensor& left, const at::Tensor& right, int64_t begin,
                        int64_t end) {
  const at::Tensor mask = at::zeros({end - begin}, at::kBool);
  const auto bytes_of = [&](const at::Tensor& tensor) {
    const auto element_size = static_cast<int64_t>(tensor.element_size());
    std::vector<int64_t> sizes = tensor.sizes().vec(), strides = tensor.strides().vec();
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      if (strides[i] == 0) sizes[i] = 1;  // fill_ takes no expanded tensor
      strides[i] *= element_size;
    }
    sizes.push_back(element_size), strides.push_back(1);
    return mask.as_strided(sizes, strides, tensor.storage_offset() * element_size - begin);
  };
  bytes_of(left).fill_(true);
  return bytes_of(right).any().item<bool>();
}

/// Returns two of the tensors that share bytes. Lazy copies share none until they are written.
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

/// Elements of one dtype, one after the other, which a loop or a kernel walks as one row.
struct ContiguousRange {
  void* data;
  int64_t count;
  at::ScalarType dtype;

  /// Returns the address of element `i`.
  void* at(int64_t i) const {
    return static_cast<char*>(data) + i * static_cast<int64_t>(c10::elementSize(dtype));
  }
};

/// The memory of gradients, in their order. Gradients that lie next to each other in one buffer, in
/// either direction, are one stretch: those in GradBuckets are a few long ones.
class ContiguousRanges {
 public:
  /// Adds a dense tensor whose elements begin at `data`.
  void add(const at::Tensor& tensor, void* data) {
    add(tensor, {data, tensor.numel(), tensor.scalar_type()});
  }
  /// Adds a dense tensor of which all is known but its storage.
  void add(const at::Tensor& tensor, const ContiguousRange& own) {
    if (own.count == 0) return;
    const c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
    const bool may_join = !all_.empty() && storage == storage_ && all_.back().dtype == own.dtype;
    storage_ = storage;
    if (may_join && own.data == all_.back().at(all_.back().count)) {
      all_.back().count += own.count;
    } else if (may_join && own.at(own.count) == all_.back().data) {
      all_.back() = {own.data, own.count + all_.back().count, own.dtype};
    } else {
      all_.push_back(own);
    }
  }
  const std::vector<ContiguousRange>& all() const noexcept { return all_; }

 private:
  std::vector<ContiguousRange> all_;
  const c10::StorageImpl* storage_ = nullptr;  // of the last tensor
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
