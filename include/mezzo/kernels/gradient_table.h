#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/block_search.h>

#include <c10/macros/Macros.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The part of a tensor that one block of a kernel works on: elements [begin, end) of `data`.
struct GradientSlice {
  void* data;
  int64_t begin;
  int64_t end;
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

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
