/// \file
/// Gradients averaged over the ranks, bucket by bucket, under the rest of the backward pass.
#pragma once

#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collectives.h>
#include <mezzo/distributed/detail/compressed_exchange.h>
#include <mezzo/distributed/detail/gradient_reduction.h>
#include <mezzo/distributed/grad_buckets.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// How gradients travel.
struct GradAllReduceOptions {
  /// Gradients become averages over the ranks (`c10d::ReduceOp::AVG`): NCCL divides as it reads,
  /// and so does `compress_dtype`; gradients of float and double cost MPI one more pass over the
  /// bucket, 8 bytes an element of float. The loss scale is still on them: in half, where the
  /// scaled average fits no rank overflows, for each divides before it adds, or all add in float.
  /// False leaves sums, which overflow half `ranks` times earlier, and which nobody divides; each
  /// pass over gradients that were not zeroed adds those up again.
  bool average = true;

  /// bfloat16 or half: gradients of float and double travel in it, half of float's bytes. Each rank
  /// sends its gradients divided by the number of ranks, rounded to nearest (one pass over the
  /// bucket reads 4 bytes and writes 2); sums are rounded as the backend does it (MPI: once);
  /// another pass writes the result back to the buffer (reads 2, writes 4), times the number of
  /// ranks where the sum is wanted. So only an average that the dtype cannot hold overflows, to an
  /// inf that the scaler's check then finds; inf and NaN arrive as what they are. half has more
  /// digits but needs a loss scale; bfloat16 does not. Keeps 2 bytes an element beside the buffer.
  /// Gradients of two bytes go as they are.
  std::optional<at::ScalarType> compress_dtype = std::nullopt;

  /// With `compress_dtype`: what rounding lost is added to the next pass's gradients before they
  /// are rounded, so that over many steps the sum of what arrives is the sum of what was to be
  /// sent, but for the last step's rounding. (Seide et al., "1-Bit Stochastic Gradient Descent",
  /// 2014.) It covers both roundings, of a rank's gradients and of their sum, by a reduce-scatter
  /// and an all-gather in place of the all-reduce: as many bytes, but the second half of them
  /// travels after the backward pass. Keeps 4 + 8 / ranks bytes an element beside the buffer.
  ///
  /// A gradient of exactly 0 is sent as 0, and what was lost of it before waits: unused parameters
  /// and unused rows of an embedding stay unused. After a pass whose result holds an inf or NaN on
  /// any rank, whose step a scaler skips, all that was lost so far is dropped, and so it is of
  /// buckets that are laid out anew.
  bool error_feedback = false;

  /// With `error_feedback` and a loss scale that changes: a function that gives the scale which the
  /// gradients carry, as a positive tensor of one element; what was lost is kept without it. Called
  /// once a pass, on autograd's thread, with no host sync if the tensor is on the gradients'
  /// device:
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
/// makes the rest; ranks may fill them in different orders. Gradients accumulated before the pass
/// are averaged with it; what was averaged before is the same on all ranks, and stays what it is
/// under what the pass adds. For micro-batches before the last, `buckets.no_sync()` keeps them
/// local.
///
/// All ranks have the same parameters in the same order, begin with the same values, and run the
/// same number of backward passes that reach one of them at least. A parameter that a pass reaches
/// on some ranks alone gets the average (with zeros from the others) on all; one that it reaches on
/// none keeps its undefined gradient. Frozen parameters are left alone.
///
/// It takes the callback of `GradBuckets::on_ready`, and gives it back unless another has taken it
/// since. A parameter's gradient is reduced by one alone: the first pass throws where another
/// GradAllReduce, DataParallel or ShardedOptimizer is there for it too. Several whose parameters
/// one `backward()` reaches want a group each, for ranks may come to them in different
/// orders.
///
/// Loss scale, options and number of steps are the same on all ranks. mezzo's optimizers and
/// GradScaler::step note them, and the next pass compares them, in a collective that it makes
/// anyway: after each step on the CPU, and on a GPU, where reading them waits for the device, after
/// the first and then each hundredth. A difference throws on all ranks, naming rank and option.
///
/// Errors of the group are thrown by `backward()`; after one, and after a backward pass that
/// threw, the ranks are no longer in step, and the next pass says so. What one rank alone throws, for
/// a gradient that it refuses, say, the others do not hear of: they wait for it in their next
/// collective, until a Watchdog (or NCCL's timeout) ends them. Host syncs: none of its own, unless
/// a parameter went without gradient on this rank.
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

namespace detail {

inline void check_can_be_reduced(const GradBuckets& buckets,
                                 const c10::intrusive_ptr<c10d::Backend>& group) {
  for (const GradBucket& bucket : buckets.buckets()) {
    check_device("GradAllReduce", *group, bucket.device);
  }
}

inline void check_options(const GradAllReduceOptions& options) {
  TORCH_CHECK(!options.compress_dtype || is_low_precision(*options.compress_dtype),
              "GradAllReduce: `compress_dtype` must be bfloat16 or half, but is ",
              options.compress_dtype.value_or(at::kFloat));
  TORCH_CHECK(!options.error_feedback || options.compress_dtype,
              "GradAllReduce: `error_feedback` carries what rounding to `compress_dtype` loses; "
              "set compress_dtype too");
  TORCH_CHECK(!options.loss_scale || options.error_feedback,
              "GradAllReduce: `loss_scale` is for `error_feedback`, which is off; set "
              "error_feedback = true, or "
              "leave loss_scale out");
}

}  // namespace detail

inline GradAllReduce::GradAllReduce(GradBuckets& buckets, c10::intrusive_ptr<c10d::Backend> group,
                                    const GradAllReduceOptions& options)
    : gradients_(detail::shared(buckets)) {
  detail::check_can_be_reduced(buckets, detail::checked(group, "GradAllReduce"));
  detail::check_options(options);
  std::shared_ptr<detail::BucketExchange> exchange;
  if (options.compress_dtype) {
    exchange = compressed_ = std::make_shared<detail::CompressedExchange>(
        *gradients_, group, *options.compress_dtype, options.average, options.error_feedback,
        options.loss_scale);
  } else {
    exchange = std::make_shared<detail::AllReduceExchange>(*gradients_, group, options.average);
  }
  const int group_size = group->getSize();
  auto reduction = std::make_shared<detail::GradientReduction>(
      "GradAllReduce", *gradients_, std::move(group), std::move(exchange));
  if (group_size > 1) gradients_->begin_noting_steps();
  callback_ = gradients_->on_ready([reduction](std::size_t bucket) { reduction->ready(bucket); });
}

inline std::vector<at::Tensor> GradAllReduce::residuals() const {
  return compressed_ == nullptr ? std::vector<at::Tensor>() : compressed_->residuals();
}

inline GradAllReduce::~GradAllReduce() { gradients_->end_ready(callback_); }

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
