/// \file
/// A reduce-scatter of bfloat16 or half whose sums are not rounded.
#pragma once

#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collectives.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

namespace detail {

/// An all-to-all under way, whose rows `wait` adds up.
class SumOfRows final : public c10d::Work {
 public:
  SumOfRows(int rank, Request request, at::Tensor rows, at::Tensor sum)
      : Work(rank, c10d::OpType::_REDUCE_SCATTER_BASE),
        request_(std::move(request)),
        rows_(std::move(rows)),
        sum_(std::move(sum)) {}

  bool wait(std::chrono::milliseconds /*timeout*/ = kNoTimeout) override {
    if (!rows_.defined()) return true;
    request_.wait();
    const c10::NoGradGuard no_grad;
    sum_.copy_(reduce_rows(rows_, c10d::ReduceOp::SUM).view(sum_.sizes()));
    rows_.reset();
    finish();
    return true;
  }

 private:
  Request request_;
  at::Tensor rows_;  ///< undefined once they are added up
  at::Tensor sum_;
};

}  // namespace detail

/// Begins a reduce-scatter whose sums are in float: bfloat16 or half is sent, and each rank adds up
/// its part in float, in the order of the ranks. No backend reduces into another dtype, so this is
/// an all-to-all of as many bytes, and `wait` adds up. \param input contiguous bfloat16 or half, a
/// part for each rank \param output float, one part: the sum of the ranks' part number `rank`. The
/// caller keeps both
///   tensors alive until it has called `wait`, which it must call
/// \throws c10::Error naming the rank, for other dtypes or sizes
inline c10::intrusive_ptr<c10d::Work> reduce_scatter_float(
    const c10::intrusive_ptr<c10d::Backend>& group, const at::Tensor& output,
    const at::Tensor& input) {
  const int rank = detail::checked(group, "reduce_scatter_float")->getRank();
  const int64_t ranks = group->getSize();
  TORCH_CHECK(detail::is_low_precision(input) && output.scalar_type() == at::kFloat,
              "reduce_scatter_float on rank ", rank, ": `input` must be bfloat16 or half, and ",
              "`output` float, but they are ", input.scalar_type(), " and ", output.scalar_type(),
              "; of other dtypes call the group's own reduce-scatter");
  TORCH_CHECK(input.is_contiguous() && input.numel() == output.numel() * ranks,
              "reduce_scatter_float on rank ", rank, ": `input` must be contiguous and have ",
              ranks, " times the ", output.numel(), " elements of `output`, but has ",
              input.numel(), "; size it by group->getSize()");
  const at::Tensor rows = at::empty({ranks, output.numel()}, input.options().requires_grad(false));
  detail::note_write(output);
  return c10::make_intrusive<detail::SumOfRows>(
      rank, detail::all_to_all(group, rows, input.detach()), rows, output.detach());
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
