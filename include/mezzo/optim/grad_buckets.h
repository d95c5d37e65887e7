/// \file
/// Gradients as buckets: grouped by device and dtype, checked in one read, and on demand one
/// contiguous buffer a bucket that can be all-reduced whole.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/gradient_statistics.h>
#include <mezzo/kernels/gradient_summary.h>
#include <mezzo/optim/detail/bucketed_gradients.h>
#include <mezzo/optim/grad_bucket.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// The gradients of a set of parameters.
///
/// \code
///   mezzo::GradBuckets buckets(model->parameters(),
///                              mezzo::GradBucketsOptions().storage(mezzo::GradStorage::flat));
///   for (auto& batch : *loader) {
///     buckets.zero_grad();                            // or the model's, or the optimizer's
///     loss(model, batch).backward();
///     buckets.reattach_gradients();
///     for (auto& bucket : buckets.buckets()) all_reduce(bucket.flat);
///     auto summary = buckets.summarize(inv_scale);    // one read; no host sync
///   }
/// \endcode
///
/// Buckets are filled in reverse order of the parameters, which is roughly the order in which
/// backward makes gradients; `rebuild_buckets` takes the order that it really took.
///
/// Nothing has to be told about what happens to gradients in between: one that is undefined (C++'s
/// `zero_grad()` does that), replaced by the user, made by autograd anew, or missing since its
/// parameter is frozen or unused, is noticed at the next call that reads gradients, which moves
/// values back into the buffer and keeps them. Where a parameter has no dense gradient its part of
/// the buffer is zero. A sparse gradient stays where it is, outside of all buckets. With flat
/// storage a gradient's history (`create_graph`) is lost when it is moved.
///
/// Flat storage, `check_during_backward` and `on_ready` put a post-accumulate hook on each
/// parameter, before which a hook that was there goes on being called; the destructor takes it
/// away. One backward pass at a time may run over the parameters then. A GradBuckets is used from
/// one thread at a time; hooks run on autograd's threads.
class GradBuckets {
 public:
  /// `parameters` are leaves of a floating dtype, each once; they need not require grad.
  /// \throws c10::Error naming the parameter or the option
  explicit GradBuckets(const std::vector<at::Tensor>& parameters,
                       const GradBucketsOptions& options = {});
  ~GradBuckets() {
    if (state_ != nullptr) state_->remove_hooks();
  }
  GradBuckets(GradBuckets&&) noexcept = default;
  GradBuckets& operator=(GradBuckets&& other) noexcept {
    if (this == &other) return *this;
    if (state_ != nullptr) state_->remove_hooks();
    state_ = std::move(other.state_);
    return *this;
  }
  GradBuckets(const GradBuckets&) = delete;
  GradBuckets& operator=(const GradBuckets&) = delete;

  /// Further parameters, in buckets of their own: those that there are stay where they lie.
  void add_parameters(const std::vector<at::Tensor>& parameters) {
    state_->add_parameters(parameters);
  }

  const GradBucketsOptions& options() const noexcept { return state_->options(); }
  const std::vector<at::Tensor>& parameters() const noexcept { return state_->parameters(); }
  const std::vector<GradBucket>& buckets() const noexcept { return state_->buckets(); }

  /// Takes stock of the gradients as they are now: see above. All calls below begin with it; call
  /// it before reading `GradBucket::flat`.
  /// \throws c10::Error if a gradient has another shape, dtype or device than its parameter
  void reattach_gradients() { state_->reattach_gradients(); }

  /// The dense gradients that there are, bucket by bucket.
  std::vector<BucketGradient> gradients() { return state_->gradients(); }

  /// The numbers of the parameters that have a sparse gradient now.
  std::vector<std::size_t> sparse_gradients() { return state_->sparse_gradients(); }

  /// One read of all gradients on the device of `inv_scale` (float, one element): is one of them,
  /// times `inv_scale`, inf or NaN; the sum of the products' squares; their largest magnitude.
  /// Sparse gradients are coalesced (`.grad` is replaced) and count too. No host sync, except to
  /// coalesce.
  ///
  /// Under `check_during_backward` what hooks have read already is not read again, unless it has
  /// changed since: an in-place operation on the gradient or on its bucket is noticed; for a write
  /// through a raw pointer, or by a collective of c10d, there is `forget_reads`. The numbers are
  /// the same bits either way. With gradient accumulation each pass reads what it has accumulated,
  /// and only the last pass counts: `no_sync` spares the reads before.
  GradientSummary summarize(const at::Tensor& inv_scale) { return state_->summarize(inv_scale); }

  /// What hooks have read no longer counts: the next `summarize` reads all gradients itself.
  void forget_reads() { state_->forget_reads(); }

  /// The same read with counts; twice the work. `first_bad` holds the parameter's number and the
  /// element in its gradient's memory. Never uses what hooks have read.
  GradientStatistics statistics(const at::Tensor& inv_scale, at::ScalarType low_precision) {
    return state_->statistics(inv_scale, low_precision);
  }

  /// As `Module::zero_grad`: undefines all gradients, or with `false` sets those that there are
  /// to zero (flat: one fill a bucket).
  void zero_grad(bool set_to_none = true) { state_->zero_grad(set_to_none); }

  /// Groups the parameters anew, in the order in which the last backward pass made their gradients
  /// (those that it did not reach come last, in their present order). Values stay; addresses of
  /// flat storage do not. Under a DataParallel or GradAllReduce all ranks call it, after passes
  /// that took the same way on all; if their orders differ, the next pass says so.
  /// \throws c10::Error unless hooks are there to know the order
  void rebuild_buckets() { state_->rebuild_buckets(); }

  /// While one lives, backward passes only accumulate: nothing is checked or reported ready. For
  /// all micro-batches but the last; what DistributedDataParallel calls `no_sync`.
  class NoSync;
  inline NoSync no_sync();

  /// Runs `backward` for one micro-batch of several and adds its gradients to those accumulated,
  /// unless one of them is inf or NaN: then the micro-batch is dropped, and what was accumulated
  /// survives. Should all micro-batches of a step be bad, the last one's gradients stay, so that
  /// the step's own check finds them (begin with `zero_grad()`: gradients of zero count as
  /// accumulated). Flat storage only: the buffer holds what is accumulated, and the micro-batch's
  /// gradients are autograd's own, 4 bytes a float parameter more. If `backward` throws, or leaves
  /// a gradient that cannot be accumulated, what was accumulated is put back. Nobody hears of it by
  /// `on_ready`: with gradients that ranks reduce it is for the micro-batches before the last,
  /// whose `backward()` is called as ever.
  ///
  /// \returns a bool of one element: whether it was dropped. On the CPU if all parameters are
  /// there; otherwise on the first parameter's device, with no host sync (a parameter of which only
  /// dropped micro-batches had a gradient then has one of zeros).
  at::Tensor accumulate_if_finite(const std::function<void()>& backward) {
    return state_->accumulate_if_finite(backward);
  }

  /// `callback` hears, once a backward pass, of each bucket (its number) whose gradients are all
  /// there; of those with unused parameters at the end of the pass. With flat storage the bucket's
  /// `flat` is complete then. It runs on autograd's thread, with the stream of the gradient that
  /// came last. Null: none. A pass that runs inside another, and reaches parameters before the
  /// other does, is one of its own. After a pass that threw, call `zero_grad` or
  /// `reattach_gradients` before the next.
  void on_ready(std::function<void(std::size_t bucket)> callback) {
    state_->on_ready(std::move(callback));
  }

 private:
  friend std::shared_ptr<detail::BucketedGradients> detail::shared(const GradBuckets&) noexcept;

  std::shared_ptr<detail::BucketedGradients> state_;
};

/// See GradBuckets::no_sync. May outlive the buckets that gave it.
class [[nodiscard]] GradBuckets::NoSync {
 public:
  /// As `no_sync()`; for a guard in a std::optional, which is there for some micro-batches only.
  explicit NoSync(GradBuckets& buckets) : NoSync(buckets.state_) {}
  ~NoSync() { buckets_->add_no_sync(-1); }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  friend class GradBuckets;
  explicit NoSync(std::shared_ptr<detail::BucketedGradients> buckets)
      : buckets_(std::move(buckets)) {
    buckets_->add_no_sync(1);
  }

  std::shared_ptr<detail::BucketedGradients> buckets_;
};

inline GradBuckets::NoSync GradBuckets::no_sync() { return NoSync(state_); }

inline GradBuckets::GradBuckets(const std::vector<at::Tensor>& parameters,
                                const GradBucketsOptions& options) {
  TORCH_CHECK(options.bucket_bytes() > 0, "GradBuckets: bucket_bytes is ", options.bucket_bytes(),
              "; it must be greater than 0");
  TORCH_CHECK(options.parts() > 0, "GradBuckets: parts is ", options.parts(),
              "; it must be greater than 0");
  TORCH_CHECK(options.storage() == GradStorage::in_place || options.storage() == GradStorage::flat,
              "GradBuckets: storage is ", static_cast<int>(options.storage()),
              "; it should be GradStorage::in_place or GradStorage::flat");
  state_ = std::make_shared<detail::BucketedGradients>(options);
  state_->add_parameters(parameters);
}

inline std::shared_ptr<detail::BucketedGradients> detail::shared(
    const GradBuckets& buckets) noexcept {
  return buckets.state_;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/optim/detail/bucketed_gradients_backward.h>     // IWYU pragma: export
#include <mezzo/optim/detail/bucketed_gradients_layout.h>       // IWYU pragma: export
#include <mezzo/optim/detail/bucketed_gradients_micro_batch.h>  // IWYU pragma: export
#include <mezzo/optim/detail/bucketed_gradients_summary.h>      // IWYU pragma: export
