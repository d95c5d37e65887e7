#pragma once

#include <mezzo/base/version.h>

#include <c10/macros/Macros.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Index of the first item with `block` < end_block[i]: the item that the block works on. Items
/// without blocks are passed over. At least one item, and `block` below the last one's end.
C10_HOST_DEVICE inline int item_of_block(const int64_t* end_block, int items, int64_t block) {
  int item = 0;  // the first whose end lies beyond the block
  for (int high = items - 1; item < high;) {
    const int middle = (item + high) / 2;
    if (block < end_block[middle]) {
      high = middle;
    } else {
      item = middle + 1;
    }
  }
  return item;
}

/// The work of one block of a kernel: elements [begin, end) of a row.
template <class Row>
struct TableSlice : Row {
  int64_t begin;
  int64_t end;
  int64_t own_block;  ///< number of this block among the row's blocks
};

/// The rows of one kernel launch, cut into blocks. A row is a tensor, or a parameter with its
/// gradient and state, and has `elements()`. The table is passed by value as the kernel's argument,
/// so nothing is copied to the device and a CUDA graph keeps its own copy. More rows take more
/// launches.
template <class Row, int kRows>
class LaunchTable {
 public:
  static constexpr int kCapacity = kRows;
  using Slice = TableSlice<Row>;

  explicit LaunchTable(int elements_per_block) : elements_per_block_(elements_per_block) {}

  bool empty() const { return rows_ == 0; }
  bool full() const { return rows_ == kCapacity; }
  void clear() { rows_ = 0; }
  int64_t blocks() const { return empty() ? 0 : end_block_[rows_ - 1]; }

  static int64_t blocks_of(int64_t elements, int64_t elements_per_block) {
    return (elements + elements_per_block - 1) / elements_per_block;
  }

  /// Adds a row. The table must not be full.
  void push_back(const Row& row) {
    end_block_[rows_] = blocks() + blocks_of(row.elements(), elements_per_block_);
    row_[rows_] = row;
    ++rows_;
  }

  C10_HOST_DEVICE Slice slice_of(int64_t block) const {
    const int row = item_of_block(end_block_, rows_, block);
    const int64_t own_block = block - (row == 0 ? 0 : end_block_[row - 1]);
    const int64_t begin = own_block * elements_per_block_;
    const int64_t end = begin + elements_per_block_;
    const int64_t elements = row_[row].elements();
    return {row_[row], begin, end < elements ? end : elements, own_block};
  }

 private:
  Row row_[kCapacity];
  int64_t end_block_[kCapacity];  // one past the last block that works on this row
  int elements_per_block_;
  int rows_ = 0;
};

/// Sixteen bytes of elements, read and written at once if the tensor is aligned to 16 bytes.
template <class Stored>
struct alignas(16) GradientPack {
  static constexpr int kSize = 16 / sizeof(Stored);
  Stored element[kSize];
};

/// A gradient that a kernel unscales or checks.
struct GradientRow {
  void* data;
  int64_t count;

  C10_HOST_DEVICE int64_t elements() const { return count; }
};

using GradientTable = LaunchTable<GradientRow, 128>;
static_assert(sizeof(GradientTable) < 4000, "a kernel's arguments must fit in 4 KB");

/// A gradient that a kernel sums up.
struct SummaryRow {
  const void* data;
  int64_t count;
  int64_t first_partial;  ///< index of its first block's partial result; later blocks follow

  C10_HOST_DEVICE int64_t elements() const { return count; }
};

using SummaryTable = LaunchTable<SummaryRow, 300>;

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
