/// \file
/// Gradients averaged over the ranks, bucket by bucket, under the rest of the backward pass.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/grad_buckets.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

namespace detail {
class CompressedExchange;
}  // namespace detail

/// How gradients travel.
struct GradAllReduceOptions {
  /// Gradients become averages over the ranks (`c10d::ReduceOp::AVG`). The loss scale is still on
  /// them; in half, where the scaled average fits, no rank overflows. False leaves sums, which
  /// overflow half `ranks` times earlier, and which nobody divides; each pass over gradients that
  /// were not zeroed adds those up again.
  bool average = true;

  /// bfloat16 or half: gradients of float and double travel in it, divided by the number of ranks
  /// and rounded to nearest, so that only an average that the dtype cannot hold overflows. half
  /// needs a loss scale. Keeps 2 bytes an element beside the buffer; gradients of two bytes go as
  /// they are.
  std::optional<at::ScalarType> compress_dtype = std::nullopt;

  /// With `compress_dtype`: what rounding lost is added to the next pass's gradients before they
  /// are rounded (Seide et al., "1-Bit Stochastic Gradient Descent", 2014). Keeps 4 + 8 / ranks
  /// bytes an element beside the buffer. docs/data-parallel.md ("Fewer bytes") says what is sent,
  /// and when what was lost is dropped.
  bool error_feedback = false;

  /// With `error_feedback` and a loss scale that changes: a function that gives the scale which the
  /// gradients carry, as a positive tensor of one element. Called once a pass, on autograd's
  /// thread:
  /// `.loss_scale = [&] { return scaler.scale(torch::ones({}, device)); }`
  std::function<at::Tensor()> loss_scale = nullptr;
};

/// While one lives, every backward pass over the parameters of `buckets` ends with gradients that
/// are averages over the ranks: `.grad` is what one process with the batches of all would have, for
/// whoever reads, clips or steps with it.
///
/// \code
///   mezzo::GradBuckets buckets(model->parameters());
///   mezzo::GradAllReduce all_reduce(buckets, world);
///   mezzo::optim::AdamW optimizer(model->parameters(), 2e-5);
///   for (auto& batch : *part_of_this_rank) {
///     buckets.zero_grad();
///     loss(model, batch).backward();                 // returns when all buckets have been reduced
///     optimizer.step();
///   }
/// \endcode
///
/// A bucket is all-reduced as soon as it and those before it are full, while the backward pass
/// makes the rest. `buckets.no_sync()` keeps the gradients of micro-batches before the last local.
/// A parameter that a pass reaches on some ranks alone gets the average (with zeros from the
/// others) on all; one that it reaches on none keeps its undefined gradient.
///
/// All ranks have the same parameters in the same order, the same loss scale and options, and as
/// many backward passes and steps; a difference throws on all ranks in a later pass. Errors of the
/// group are thrown by `backward()`; then begin again from a checkpoint. docs/data-parallel.md
/// ("Gradient buckets") says what is compared when, and who may reduce a gradient.
class GradAllReduce {
 public:
  /// \throws c10::Error if `group` is null or does not take tensors on the buckets' device, or if an
  ///   option is wrong
  GradAllReduce(GradBuckets& buckets, c10::intrusive_ptr<c10d::Backend> group,
                const GradAllReduceOptions& options = {});
  ~GradAllReduce();
  GradAllReduce(const GradAllReduce&) = delete;
  GradAllReduce& operator=(const GradAllReduce&) = delete;

  /// With `error_feedback`: this rank's part of what rounding lost, two tensors a bucket that is
  /// compressed; they share the memory. To resume a run to the bit a checkpoint holds each rank's
  /// (`TrainingState::add_per_rank`); to forget, zero them. Empty without. Others after the buckets
  /// were laid out anew.
  std::vector<at::Tensor> residuals() const;

 private:
  std::shared_ptr<detail::BucketedGradients> gradients_;
  std::shared_ptr<detail::CompressedExchange> compressed_;  ///< null where nothing is compressed
  int64_t callback_ = 0;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/distributed/detail/grad_all_reduce_impl.h>  // IWYU pragma: export
