#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/maximum.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/communicator.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Received from each rank, a row a rank: added up in float in the order of the ranks, or their
/// maximum.
inline at::Tensor reduce_rows(const at::Tensor& rows, Reduction reduction) {
  at::Tensor reduced = rows[0].to(at::kFloat);
  for (int64_t rank = 1; rank < rows.size(0); ++rank) {
    const at::Tensor row = rows[rank].to(at::kFloat);
    if (reduction == Reduction::sum) {
      reduced.add_(row);
    } else {
      at::maximum_out(reduced, reduced, row);
    }
  }
  return reduced;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
