#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/communicator.h>
#include <mezzo/kernels/gradient_summary.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Of the ranks' numbers, a row a rank, in the order of the ranks: the same bits on all of them,
/// whatever a library's sum makes of another instruction set.
inline at::Tensor sum_of_rows(const at::Tensor& numbers) {
  if (!numbers.is_cpu()) return numbers.sum();
  at::Tensor sum = numbers[0].clone();
  for (int64_t rank = 1; rank < numbers.size(0); ++rank) sum.add_(numbers[rank]);
  return sum;
}

/// What the ranks have found in their parts of the gradients, as one: an inf of one of them, the
/// sum of all squares, the largest magnitude. One collective; waits for no device.
inline GradientSummary agreed(const GradientSummary& own, Communicator& communicator) {
  if (communicator.size() == 1) return own;
  const auto wide = own.sum_of_squares.scalar_type();
  const at::Tensor row = at::stack({own.found_inf.to(wide), own.sum_of_squares, own.max_abs});
  const at::Tensor rows = at::empty({communicator.size(), row.numel()}, row.options());
  communicator.all_gather(rows, row).wait();
  return {rows.select(1, 0).amax().to(own.found_inf.scalar_type()), sum_of_rows(rows.select(1, 1)),
          rows.select(1, 2).amax()};
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
