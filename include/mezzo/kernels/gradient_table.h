#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/launch_table.h>

#include <c10/macros/Macros.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

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
