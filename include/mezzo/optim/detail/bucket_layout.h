#pragma once

#include <mezzo/base/version.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Each gradient begins at a multiple of so many bytes of its bucket.
inline constexpr int64_t kSlotAlignment = 64;

/// What a layout has to know of a parameter.
struct LayoutItem {
  std::size_t group;  ///< parameters of one group may share a bucket
  int64_t count;
  int64_t element_size;
};

struct BucketLayout {
  std::vector<std::size_t> items;
  std::vector<int64_t> offsets;  ///< of each item, in elements
  int64_t count = 0;             ///< elements, those between the items included
};

/// Buckets in the order of their first items, each of one group and of at most `bucket_bytes`, or
/// of one item that is larger.
inline std::vector<BucketLayout> lay_out(const std::vector<LayoutItem>& items,
                                         int64_t bucket_bytes) {
  constexpr auto kNone = static_cast<std::size_t>(-1);
  std::vector<BucketLayout> buckets;
  std::vector<std::size_t> open;  // the bucket that each group fills
  for (std::size_t i = 0; i < items.size(); ++i) {
    const LayoutItem& item = items[i];
    if (item.group >= open.size()) open.resize(item.group + 1, kNone);
    const int64_t aligned = kSlotAlignment / item.element_size;
    int64_t offset = 0;
    if (open[item.group] != kNone) {
      const int64_t end = buckets[open[item.group]].count;
      offset = (end + aligned - 1) / aligned * aligned;
    }
    const bool is_full = (offset + item.count) * item.element_size > bucket_bytes;
    if (open[item.group] == kNone || (is_full && offset > 0)) {
      open[item.group] = buckets.size();
      buckets.emplace_back();
      offset = 0;
    }
    BucketLayout& bucket = buckets[open[item.group]];
    bucket.items.push_back(i);
    bucket.offsets.push_back(offset);
    bucket.count = offset + item.count;
  }
  return buckets;
}

/// The least number of elements, `count` or more, that makes so many equal parts, each of a
/// multiple of kSlotAlignment bytes. One part has no end to align.
inline int64_t padded_count(int64_t count, int64_t element_size, int64_t parts) {
  const int64_t multiple = parts == 1 ? 1 : kSlotAlignment / element_size * parts;
  return (count + multiple - 1) / multiple * multiple;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
