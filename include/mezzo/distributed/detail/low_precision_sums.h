#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/maximum.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/communicator.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Received from each rank, a row a rank: added up in float in the order of the ranks, the average
/// of that, or their maximum.
inline at::Tensor reduce_rows(const at::Tensor& rows, Reduction reduction) {
  at::Tensor reduced = rows[0].to(at::kFloat);
  for (int64_t rank = 1; rank < rows.size(0); ++rank) {
    const at::Tensor row = rows[rank].to(at::kFloat);
    if (reduction == Reduction::max) {
      at::maximum_out(reduced, reduced, row);
    } else {
      reduced.add_(row);
    }
  }
  if (reduction == Reduction::average) reduced.mul_(1. / static_cast<double>(rows.size(0)));
  return reduced;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
