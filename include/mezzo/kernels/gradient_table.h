#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/launch_table.h>

#include <c10/macros/Macros.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Sixteen bytes of elements, read and written at once where a tensor is so aligned.
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
  int64_t first_partial;  ///< where its first block writes a partial result, and the next after it

  C10_HOST_DEVICE int64_t elements() const { return count; }
};

/// For most models, in the 4 KB that every launch can carry cheaply; and for models of many
/// tensors, in the 32,764 bytes that CUDA 12.1 allows from sm_70 on.
using SmallSummaryTable = LaunchTable<SummaryRow, 108>;
using LargeSummaryTable = LaunchTable<SummaryRow, 900>;
static_assert(sizeof(SmallSummaryTable) < 4000, "with the pointers beside it within 4 KB");
static_assert(sizeof(PagedTable<LargeSummaryTable>) < 32700,
              "with the pointers beside it within 32,764 bytes");

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
