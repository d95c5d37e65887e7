#pragma once

#include <mezzo/base/version.h>

#include <c10/macros/Macros.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

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
  int row;            ///< index of the row in the table
};

/// The rows of one kernel launch, cut into blocks. A row is a tensor, or a parameter with its
/// gradient and state, and has `elements()`. The table is passed by value as the kernel's argument,
/// so nothing is copied to the device and a CUDA graph keeps its own copy. Larger tables are the
/// pages of a PagedTable.
template <class Row, int kRows>
class LaunchTable {
 public:
  static constexpr int kCapacity = kRows;
  using Slice = TableSlice<Row>;
  static_assert(std::has_unique_object_representations_v<Row>, "equal rows have equal bytes");

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

  /// Sets unused bytes, so that equal tables have equal bytes.
  void clear_rest() {
    std::fill(row_ + rows_, row_ + kCapacity, Row{});
    std::fill(end_block_ + rows_, end_block_ + kCapacity, blocks());
  }

  C10_HOST_DEVICE Slice slice_of(int64_t block) const {
    const int row = item_of_block(end_block_, rows_, block);
    const int64_t own_block = block - first_block(row);
    const int64_t begin = own_block * elements_per_block_;
    const int64_t end = begin + elements_per_block_;
    const int64_t elements = row_[row].elements();
    return {row_[row], begin, end < elements ? end : elements, own_block, row};
  }

  C10_HOST_DEVICE int rows() const { return rows_; }
  C10_HOST_DEVICE int64_t first_block(int row) const { return row == 0 ? 0 : end_block_[row - 1]; }
  C10_HOST_DEVICE int64_t end_block(int row) const { return end_block_[row]; }

 private:
  Row row_[kCapacity];
  int64_t end_block_[kCapacity];  // one past the last block that works on this row
  int elements_per_block_;        // beside the other int: a gap would make equal tables differ
  int rows_ = 0;
};

/// A kernel argument, passed by value: one table, or for more rows the device address of several
/// tables, its pages. Both take one launch. Rows are numbered across all pages.
template <class Table>
class PagedTable {
 public:
  explicit PagedTable(const Table& table) : only_(table), blocks_(table.blocks()) {}

  /// Refers to `memory` on the device, which holds `bytes_of(pages)`.
  PagedTable(const std::vector<Table>& pages, const void* memory)
      : only_(pages.front()),
        pages_(static_cast<const Table*>(memory)),
        end_block_(reinterpret_cast<const int64_t*>(pages_ + pages.size())),
        page_count_(static_cast<int>(pages.size())) {
    for (const Table& page : pages) blocks_ += page.blocks();
  }

  /// Returns the bytes of the pages, followed by the end of each page's blocks. Equal pages have
  /// equal bytes, except for gaps in the constants of their groups: if those differ, the pages are
  /// copied again.
  static std::vector<std::byte> bytes_of(std::vector<Table>& pages) {
    static_assert(std::is_trivially_copyable_v<Table> && sizeof(Table) % alignof(int64_t) == 0);
    std::vector<std::byte> bytes(pages.size() * (sizeof(Table) + sizeof(int64_t)));
    std::byte* ends = bytes.data() + pages.size() * sizeof(Table);
    int64_t end_block = 0;
    for (std::size_t i = 0; i < pages.size(); ++i) {
      pages[i].clear_rest();
      std::memcpy(bytes.data() + i * sizeof(Table), &pages[i], sizeof(Table));
      end_block += pages[i].blocks();
      std::memcpy(ends + i * sizeof(int64_t), &end_block, sizeof(int64_t));
    }
    return bytes;
  }

  int64_t blocks() const { return blocks_; }

  C10_HOST_DEVICE auto slice_of(int64_t block) const {
    if (pages_ == nullptr) return only_.slice_of(block);
    const int page = item_of_block(end_block_, page_count_, block);
    auto slice = pages_[page].slice_of(block - first_block_of(page));
    slice.row += page * Table::kCapacity;
    return slice;
  }

  template <class Slice>
  C10_HOST_DEVICE const auto& group_of(const Slice& slice) const {
    return page_at(slice.row / Table::kCapacity).group(slice.group);
  }

  /// Returns the number of rows of all pages, including unused rows at the end.
  C10_HOST_DEVICE int rows() const {
    return pages_ == nullptr ? only_.rows() : page_count_ * Table::kCapacity;
  }
  C10_HOST_DEVICE int64_t first_block(int row) const {
    const int page = row / Table::kCapacity;
    return first_block_of(page) + page_at(page).first_block(row % Table::kCapacity);
  }
  C10_HOST_DEVICE int64_t end_block(int row) const {
    const int page = row / Table::kCapacity;
    return first_block_of(page) + page_at(page).end_block(row % Table::kCapacity);
  }

 private:
  C10_HOST_DEVICE const Table& page_at(int page) const {
    return pages_ == nullptr ? only_ : pages_[page];
  }
  C10_HOST_DEVICE int64_t first_block_of(int page) const {
    return page == 0 ? 0 : end_block_[page - 1];
  }

  Table only_;
  const Table* pages_ = nullptr;
  const int64_t* end_block_ = nullptr;  // one past the last block of each page
  int page_count_ = 0;
  int64_t blocks_ = 0;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
