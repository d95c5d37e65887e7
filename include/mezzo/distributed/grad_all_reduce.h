/// \file
/// Gradients averaged over the ranks, bucket by bucket, under the rest of the backward pass.
#pragma once

#include <mezzo/distributed/communicator.h>
#include <mezzo/grad_buckets.h>
#include <mezzo/version.h>

#include <memory>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

struct GradAllReduceOptions {
  /// Divide by the number of ranks. Where an optimizer of mezzo's stands on the buckets
  /// (`mezzo::optim::AdamW optimizer(buckets)`) it divides as it reads, in the factor that takes
  /// the loss scale off, and gradients are sums until then (`GradBuckets::average`). Otherwise it
  /// is one pass over each bucket, before the sum, so that half does not overflow. False leaves
  /// plain sums, which nobody divides; each pass over gradients that were not cleared adds those up
  /// again.
  bool average = true;
};

/// While one lives, every backward pass over the parameters of `buckets` ends with gradients that
/// are averages over the ranks, or become that as an optimizer on the buckets reads them:
///
/// \code
///   mezzo::GradBuckets buckets(model->parameters(),
///                              mezzo::GradBucketsOptions().storage(mezzo::GradStorage::flat));
///   mezzo::GradAllReduce all_reduce(buckets, world);
///   for (auto& batch : *part_of_this_rank) {
///     buckets.zero_grad();
///     loss(model, batch).backward();                 // returns when all buckets have been reduced
///     optimizer.step();
///   }
/// \endcode
///
/// A bucket is all-reduced as soon as it and those before it are full, while the backward pass
/// makes the rest; ranks may fill them in different orders. Gradients accumulated before the pass
/// are averaged with it. For micro-batches before the last, `buckets.accumulate_only()` keeps them
/// local.
///
/// All ranks have the same parameters in the same order, begin with the same values, and run the
/// same number of backward passes that reach one of them at least. A parameter that a pass reaches
/// on some ranks alone gets the average (with zeros from the others) on all; one that it reaches on
/// none keeps its undefined gradient. Frozen parameters are left alone.
///
/// It takes the callback of `GradBuckets::on_ready`. Errors of the communicator are thrown by
/// `backward()`; after one, and after a backward pass that threw, the ranks are no longer in step,
/// and the next pass says so. Host syncs: none of its own, unless a parameter went without gradient
/// on this rank.
class GradAllReduce {
 public:
  /// \throws c10::Error if the buckets' storage is not flat, or the communicator does not serve
  /// their device
  GradAllReduce(GradBuckets& buckets, AnyCommunicator communicator,
                const GradAllReduceOptions& options = {});
  ~GradAllReduce();
  GradAllReduce(const GradAllReduce&) = delete;
  GradAllReduce& operator=(const GradAllReduce&) = delete;

 private:
  std::shared_ptr<detail::BucketedGradients> gradients_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/detail/distributed/grad_all_reduce_impl.h>  // IWYU pragma: export
