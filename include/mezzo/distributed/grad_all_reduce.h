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

/// How gradients are reduced. All ranks have the same options; GradAllReduce's constructor compares
/// them.
struct GradAllReduceOptions {
  /// True: gradients become averages over the ranks (`c10d::ReduceOp::AVG`), which still carry the
  /// loss scale; in half they overflow only where the scaled average does. False: gradients become
  /// sums, which overflow half `ranks` times earlier and which nobody divides; a pass over
  /// gradients that were not zeroed sums the earlier ones again.
  bool average = true;

  /// bfloat16 or half: gradients of float and double are sent in this dtype, divided by the number
  /// of ranks and rounded to nearest, so that only an average that the dtype cannot hold overflows.
  /// half needs a loss scale. Takes 2 bytes an element beside the buffer. Gradients of two bytes
  /// are sent as they are.
  std::optional<at::ScalarType> compress_dtype = std::nullopt;

  /// With `compress_dtype`: rounding errors are added to the next pass's gradients before these are
  /// rounded (Seide et al., "1-Bit Stochastic Gradient Descent", 2014). Takes 4 + 8 / ranks bytes
  /// an element beside the buffer. docs/data-parallel.md ("Fewer bytes") says what is sent, and
  /// when the errors are dropped.
  bool error_feedback = false;

  /// With `error_feedback` and a loss scale that changes: a function that gives the scale which the
  /// gradients carry, as a positive tensor of one element. Called once a pass, on autograd's
  /// thread:
  /// `.loss_scale = [&] { return scaler.scale(torch::ones({}, device)); }`
  std::function<at::Tensor()> loss_scale = nullptr;
};

/// Averages gradients over the ranks: while a GradAllReduce lives, every backward pass over the
/// parameters of `buckets` ends with the gradients in `.grad` that one process with the batches of
/// all ranks would have. Any code may read or clip them, or step with them.
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
/// A bucket is all-reduced as soon as it and the buckets before it are full, while the backward
/// pass makes the other gradients. `buckets.no_sync()` keeps the gradients of micro-batches before
/// the last one local. A parameter that a pass reaches on some ranks only gets the average on all,
/// with zeros from the other ranks; a parameter that the pass reaches on no rank keeps its
/// undefined gradient.
///
/// All ranks have the same parameters in the same order, the same loss scale and options, and as
/// many backward passes and steps. Different buckets or options throw in the constructor, other
/// differences in a later pass, on all ranks. Errors of the group are thrown by `backward()`; begin
/// again from a checkpoint then. docs/data-parallel.md ("Gradient buckets") says what is compared
/// when, and what else may reduce a gradient.
class GradAllReduce {
 public:
  /// All ranks call it together, and compare their buckets and options.
  /// \throws c10::Error if `group` is null or does not take tensors on the buckets' device, or if an
  ///   option is wrong; on all ranks, naming the first one whose buckets or options differ
  GradAllReduce(GradBuckets& buckets, c10::intrusive_ptr<c10d::Backend> group,
                const GradAllReduceOptions& options = {});
  ~GradAllReduce();
  GradAllReduce(const GradAllReduce&) = delete;
  GradAllReduce& operator=(const GradAllReduce&) = delete;

  /// Returns this rank's rounding errors, which `error_feedback` keeps: two tensors for each bucket
  /// that is compressed, sharing its memory, and none without `error_feedback`. A checkpoint that
  /// resumes a run with equal bits holds those of each rank (`TrainingState::add_per_rank`). Set
  /// the tensors to zero to forget the errors.
  std::vector<at::Tensor> residuals() const;

 private:
  std::shared_ptr<detail::BucketedGradients> gradients_;
  std::shared_ptr<detail::CompressedExchange> compressed_;  ///< null where nothing is compressed
  int64_t callback_ = 0;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/distributed/detail/grad_all_reduce_impl.h>  // IWYU pragma: export
