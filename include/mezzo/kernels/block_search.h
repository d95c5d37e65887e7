#pragma once

#include <mezzo/base/version.h>

#include <c10/macros/Macros.h>

#include <cstdint>

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

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
