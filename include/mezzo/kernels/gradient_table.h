#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/paged_table.h>

#include <c10/macros/Macros.h>

#include <algorithm>
#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The part of a tensor that one block of a kernel works on: elements [begin, end) of `data`.
struct GradientSlice {
  void* data;
  int64_t begin;
  int64_t end;
};

/// Sixteen bytes of elements, read and written at once where a tensor is so aligned.
template <class Stored>
struct alignas(16) GradientPack {
  static constexpr int kSize = 16 / sizeof(Stored);
  Stored element[kSize];
};

/// The tensors of one kernel launch, of one dtype, cut into blocks. It travels as the kernel's
/// argument, so that nothing has to be copied to the device and a CUDA graph keeps its own.
class GradientTable {
 public:
  static constexpr int kCapacity = 128;

  explicit GradientTable(int64_t elements_per_block) : elements_per_block_(elements_per_block) {}

  bool empty() const { return tensors_ == 0; }
  bool full() const { return tensors_ == kCapacity; }
  void clear() { tensors_ = 0; }
  int64_t blocks() const { return empty() ? 0 : end_block_[tensors_ - 1]; }

  /// Not when full.
  void push_back(void* data, int64_t count) {
    const int64_t own_blocks = (count + elements_per_block_ - 1) / elements_per_block_;
    end_block_[tensors_] = blocks() + own_blocks;
    data_[tensors_] = data;
    count_[tensors_] = count;
    ++tensors_;
  }

  C10_HOST_DEVICE GradientSlice slice_of(int64_t block) const {
    const int tensor = item_of_block(end_block_, tensors_, block);
    const int64_t first_block = tensor == 0 ? 0 : end_block_[tensor - 1];
    const int64_t begin = (block - first_block) * elements_per_block_;
    const int64_t end = begin + elements_per_block_;
    return {data_[tensor], begin, end < count_[tensor] ? end : count_[tensor]};
  }

 private:
  void* data_[kCapacity];
  int64_t count_[kCapacity];
  int64_t end_block_[kCapacity];  // one past the last block that works on this tensor
  int64_t elements_per_block_;
  int tensors_ = 0;
};
static_assert(sizeof(GradientTable) < 4000, "a kernel's arguments must fit in 4 KB");

/// What one block of a kernel reads, and where its partial result goes.
struct SummarySlice {
  const void* data;
  int64_t begin;
  int64_t end;
  int64_t partial;
};

/// Tensors of one kernel launch, of one dtype, cut into blocks. It travels by value as the kernel's
/// argument, so that nothing is copied to the device and a CUDA graph keeps its own; those of more
/// tensors are the pages of a PagedTable.
template <int kTensors>
class SummaryTable {
 public:
  static constexpr int kCapacity = kTensors;

  explicit SummaryTable(int64_t elements_per_block) : elements_per_block_(elements_per_block) {}

  bool empty() const { return tensors_ == 0; }
  bool full() const { return tensors_ == kCapacity; }
  int tensors() const { return tensors_; }
  void clear() { tensors_ = 0; }
  int64_t blocks() const { return empty() ? 0 : end_block_[tensors_ - 1]; }

  static int64_t blocks_of(int64_t count, int64_t elements_per_block) {
    return (count + elements_per_block - 1) / elements_per_block;
  }

  /// Not when full. A tensor's blocks write their partial results from `first_partial` on.
  void push_back(const void* data, int64_t count, int64_t first_partial) {
    end_block_[tensors_] = blocks() + blocks_of(count, elements_per_block_);
    data_[tensors_] = data;
    count_[tensors_] = count;
    first_partial_[tensors_] = first_partial;
    ++tensors_;
  }

  /// Gives what is not used yet a value, so that equal tables have equal bytes.
  void clear_rest() {
    std::fill(data_ + tensors_, data_ + kCapacity, nullptr);
    std::fill(count_ + tensors_, count_ + kCapacity, 0);
    std::fill(first_partial_ + tensors_, first_partial_ + kCapacity, 0);
    std::fill(end_block_ + tensors_, end_block_ + kCapacity, blocks());
  }

  /// A slice's numbers are the caller's, on whichever page of a PagedTable it stands.
  C10_HOST_DEVICE static void renumber(int, SummarySlice&) {}

  C10_HOST_DEVICE SummarySlice slice_of(int64_t block) const {
    const int tensor = item_of_block(end_block_, tensors_, block);
    const int64_t own_block = block - (tensor == 0 ? 0 : end_block_[tensor - 1]);
    const int64_t begin = own_block * elements_per_block_;
    const int64_t end = begin + elements_per_block_;
    return {data_[tensor], begin, end < count_[tensor] ? end : count_[tensor],
            first_partial_[tensor] + own_block};
  }

 private:
  const void* data_[kCapacity];
  int64_t count_[kCapacity];
  int64_t first_partial_[kCapacity];
  int64_t end_block_[kCapacity];  // one past the last block that works on this tensor
  int64_t elements_per_block_;
  int tensors_ = 0;
};

/// For most models, in the 4 KB that every launch can carry cheaply; and for models of many
/// tensors, in the 32,764 bytes that CUDA 12.1 allows from sm_70 on.
using SmallSummaryTable = SummaryTable<108>;
using LargeSummaryTable = SummaryTable<900>;
static_assert(sizeof(SmallSummaryTable) < 4000, "with the pointers beside it within 4 KB");
static_assert(sizeof(PagedTable<LargeSummaryTable>) < 32700,
              "with the pointers beside it within 32,764 bytes");

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
