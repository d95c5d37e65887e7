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

/// Two capacities: for most models a table within the 4 KB that a launch carries cheaply; for
/// models of many tensors one within the 32,764 bytes that CUDA 12.1 allows from sm_70 on.
using SmallSummaryTable = LaunchTable<SummaryRow, 108>;
using LargeSummaryTable = LaunchTable<SummaryRow, 900>;
static_assert(sizeof(SmallSummaryTable) < 4000, "with the pointers beside it within 4 KB");
static_assert(sizeof(PagedTable<LargeSummaryTable>) < 32700,
              "with the pointers beside it within 32,764 bytes");

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
