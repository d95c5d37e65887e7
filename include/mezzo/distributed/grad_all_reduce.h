/// \file
/// Gradients averaged over the ranks, bucket by bucket, under the rest of the backward pass.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/grad_buckets.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

namespace detail {
class Reducer;
}  // namespace detail

/// How gradients are reduced. All ranks have the same options; GradAllReduce's constructor compares
/// them.
struct GradAllReduceOptions {
  /// The most bytes of a bucket of gradients; > 0. A bucket is sent as soon as it is complete:
  /// smaller ones are sent earlier, larger ones cost fewer calls.
  int64_t bucket_bytes = kDefaultBucketBytes;
  /// bfloat16 or half: gradients of float and double are sent in this dtype, divided by the number
  /// of ranks and rounded to nearest, so that only an average that the dtype cannot hold overflows.
  /// half needs a loss scale. Takes 2 bytes an element beside the buffer.
  std::optional<at::ScalarType> compress_dtype = std::nullopt;
};

/// A guard under which backward passes only accumulate on this rank: for all micro-batches but the
/// last, as DistributedDataParallel's `no_sync`. May be moved, and may outlive what made it.
class [[nodiscard]] NoSync {
 public:
  /// Begins to guard.
  explicit NoSync(std::shared_ptr<detail::Reducer> reducer);
  ~NoSync();
  /// Takes over the other guard, which then guards nothing.
  NoSync(NoSync&&) noexcept = default;
  /// Ends its own guard, and takes over the other one.
  NoSync& operator=(NoSync&& other) noexcept {
    NoSync(std::move(other)).reducer_.swap(reducer_);
    return *this;
  }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::shared_ptr<detail::Reducer> reducer_;
};

/// Averages gradients over the ranks: while a GradAllReduce lives, every backward pass over its
/// parameters ends with the gradients in `.grad` that one process with the batches of all ranks
/// would have, as views of GradBuckets. Any code may read or clip them, or step with them.
///
/// \code
///   mezzo::GradAllReduce all_reduce(model->parameters(), world);
///   mezzo::optim::AdamW optimizer(model->parameters(), 2e-5);
///   for (auto& batch : *part_of_this_rank) {
///     optimizer.zero_grad();
///     loss(model, batch).backward();                 // returns when all buckets have been reduced
///     optimizer.step();
///   }
/// \endcode
///
/// Each gradient is divided by the number of ranks, so that in half it overflows only where the
/// scaled average does, and buckets are summed in their order while the pass makes the other
/// gradients. Gradients that were accumulated before the pass are averaged with it. A parameter
/// that a pass reaches on some ranks only gets the average on all, with zeros from the other ranks;
/// a parameter that no rank has reached keeps its undefined gradient.
///
/// All ranks have the same parameters in the same order, the same options, and as many backward
/// passes. Each parameter gets a post-accumulate hook, which first calls the hook that was there.
/// Errors, also those of the group, and a second one that reduces a parameter, are thrown by
/// `backward()`; the ranks are then out of step: begin again from a checkpoint. One backward pass
/// at a time may reach the parameters.
class GradAllReduce {
 public:
  /// All ranks call it together, and compare their parameters and options.
  /// \throws c10::Error if `group` is null or an option is wrong; on all ranks, naming the first one
  ///   whose parameters or options differ
  GradAllReduce(const std::vector<at::Tensor>& parameters, c10::intrusive_ptr<c10d::Backend> group,
                const GradAllReduceOptions& options = {});
  /// Removes the hooks. Gradients stay where they are.
  ~GradAllReduce();
  GradAllReduce(const GradAllReduce&) = delete;
  GradAllReduce& operator=(const GradAllReduce&) = delete;

  /// Returns the buckets of the gradients.
  GradBuckets& buckets() noexcept;

  /// Returns a guard under which backward passes only accumulate on this rank.
  NoSync no_sync() { return NoSync(reducer_); }
  /// Returns whether there is such a guard.
  bool is_no_sync() const;

 private:
  std::shared_ptr<detail::Reducer> reducer_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/distributed/detail/reducer.h>  // IWYU pragma: export
