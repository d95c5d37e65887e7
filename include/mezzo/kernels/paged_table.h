#pragma once

#include <mezzo/base/version.h>

#include <c10/macros/Macros.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Whose block it is, where item i has those below `end_block[i]` that no item before it has. Items
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

/// What a kernel takes in a table's place, by value: the table itself, or, for more rows than one
/// holds, where in the device's memory there are several, its pages. One launch for either.
///
/// Numbers of rows and groups in a page's slices are made those of all pages (`renumber`).
template <class Table>
class PagedTable {
 public:
  explicit PagedTable(const Table& table) : only_(table), blocks_(table.blocks()) {}

  /// `memory` has what `bytes_of` returned, and `pages` are what that was made of.
  PagedTable(const std::vector<Table>& pages, const void* memory)
      : only_(pages.front()),
        pages_(static_cast<const Table*>(memory)),
        end_block_(reinterpret_cast<const int64_t*>(pages_ + pages.size())),
        page_count_(static_cast<int>(pages.size())) {
    for (const Table& page : pages) blocks_ += page.blocks();
  }

  /// The pages, and after them where the blocks of each end. Equal pages may differ in padding, and
  /// are then copied once more.
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
    Table::renumber(page, slice);
    return slice;
  }

  C10_HOST_DEVICE const auto& group(int number) const {
    return page_at(number / Table::kGroups).group(number % Table::kGroups);
  }

  /// Of all pages, in which some rows at the end may be none.
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
