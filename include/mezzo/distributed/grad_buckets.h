/// \file
/// Gradients in flat buffers, which ranks reduce one at a time while backward makes the rest.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// 25 MiB, the default of libtorch's DistributedDataParallel.
inline constexpr int64_t kDefaultBucketBytes = int64_t{25} << 20;
/// 64 bytes, a cache line.
inline constexpr int64_t kDefaultAlignment = 64;

/// Options of GradBuckets.
struct GradBucketsOptions {
  /// The most bytes that a bucket holds, except for one parameter that is larger; > 0.
  int64_t bucket_bytes = kDefaultBucketBytes;
  /// The number of equal parts that every buffer can be cut into: the number of ranks for a
  /// reduce-scatter; > 0.
  int64_t parts = 1;
  /// Each gradient, and each of several parts, begins at a multiple of so many bytes: a power of
  /// two, 8 or more.
  int64_t alignment = kDefaultAlignment;
};

/// Parameters whose gradients lie in one buffer. They share a device, a dtype, and a dtype of their
/// gradients.
struct GradBucket {
  /// The device of the parameters and of the buffer.
  at::Device device;
  /// The gradients' dtype: `parameter.grad_dtype()`, which is the parameter's own dtype unless
  /// somebody has called `set_grad_dtype`.
  at::ScalarType dtype;
  /// Indices into GradBuckets::parameters, in the order in which the gradients lie.
  std::vector<std::size_t> parameters;
  /// The buffer, one dimension. Each gradient begins at a multiple of
  /// GradBucketsOptions::alignment; the gaps between gradients are zero.
  at::Tensor flat;
};

class GradBuckets;

namespace detail {

class BucketedGradients;

/// The state that reductions and sharded optimizers keep; it may outlive `buckets`.
std::shared_ptr<BucketedGradients> shared(const GradBuckets& buckets) noexcept;

}  // namespace detail

/// Keeps the gradients of a set of parameters in flat buffers, as libtorch's
/// DistributedDataParallel does with `gradient_as_bucket_view`.
///
/// \code
///   mezzo::GradBuckets buckets(model->parameters());
///   for (auto& batch : *loader) {
///     optimizer.zero_grad();
///     loss(model, batch).backward();                  // hooks copy each gradient to its place
///     buckets.reattach_gradients();
///     for (const auto& bucket : buckets.buckets()) all_reduce(bucket.flat);
///     optimizer.step();                               // of any optimizer: `.grad` are views
///   }
/// \endcode
///
/// Buckets are filled in reverse order of the parameters, roughly as backward makes gradients.
/// Whatever becomes of a gradient meanwhile, the next backward pass or reattach_gradients() copies
/// it into the buffer, converted, and makes `.grad` the view again; but a float gradient of a
/// 16-bit bucket is rounded only by a pass that adds to it, and sparse gradients stay outside.
/// Where a parameter has no dense gradient, its part of the buffer is zero. docs/data-parallel.md
/// ("Gradient buckets") has the details.
///
/// Each parameter gets a post-accumulate hook, which first calls the hook that was there. Only one
/// backward pass may reach the parameters at a time. Use it from one thread at a time.
class GradBuckets {
 public:
  /// \param parameters  leaves of float32, float64, bfloat16 or float16, each once; they need not
  ///   require grad
  /// \throws c10::Error naming the parameter or the option
  explicit GradBuckets(const std::vector<at::Tensor>& parameters,
                       const GradBucketsOptions& options = {});
  /// Removes the hooks. Gradients stay where they are.
  ~GradBuckets();
  /// Takes the buckets; the hooks stay, and the moved-from object is empty.
  GradBuckets(GradBuckets&&) noexcept = default;
  /// Removes the hooks of its own parameters, and takes the other's buckets.
  GradBuckets& operator=(GradBuckets&& other) noexcept;
  GradBuckets(const GradBuckets&) = delete;
  GradBuckets& operator=(const GradBuckets&) = delete;

  /// Returns the parameters, in the order in which they were given.
  const std::vector<at::Tensor>& parameters() const noexcept;
  /// Returns the buckets, in the order in which they are sent.
  const std::vector<GradBucket>& buckets() const noexcept;

  /// Brings every gradient to its place, so that the buffers hold what `.grad` holds now. Call it
  /// before reading `GradBucket::flat`.
  /// \throws c10::Error, before anything is moved, if a gradient has another shape or device than
  ///   its parameter, or no floating dtype, or if it is of float and its bucket of 16 bits
  void reattach_gradients();

  /// Does what `Module::zero_grad` does: undefines all gradients, or with `false` sets those that
  /// are defined to zero, with one fill a bucket.
  void zero_grad(bool set_to_none = true);

  /// A guard under which backward passes only accumulate: gradients are not moved, and no bucket is
  /// reported ready. For all micro-batches but the last, as DistributedDataParallel's `no_sync`.
  class NoSync;
  /// Returns such a guard.
  NoSync no_sync();

  /// Sets the callback that hears, once a backward pass, of each bucket (its index) whose gradients
  /// are all in its buffer; of buckets with unused parameters it hears at the end of the pass. Null
  /// removes the callback.
  ///
  /// The callback runs on autograd's thread, with the stream of the gradient that came last. A
  /// backward pass inside another counts as part of it, unless it reaches the parameters first.
  /// After a pass that threw, call zero_grad() or reattach_gradients() before the next.
  void on_ready(std::function<void(std::size_t bucket)> callback);

 private:
  friend std::shared_ptr<detail::BucketedGradients> detail::shared(const GradBuckets&) noexcept;

  std::shared_ptr<detail::BucketedGradients> state_;
};

/// The guard that GradBuckets::no_sync returns. A guard may outlive its buckets, and may be moved:
/// into a std::optional or out of a function, for example.
class [[nodiscard]] GradBuckets::NoSync {
 public:
  /// Does what `no_sync()` does.
  explicit NoSync(GradBuckets& buckets);
  ~NoSync();
  /// Takes over the other guard, which then guards nothing.
  NoSync(NoSync&&) noexcept = default;
  /// Ends its own guard, and takes over the other one.
  NoSync& operator=(NoSync&& other) noexcept {
    NoSync(std::move(other)).buckets_.swap(buckets_);
    return *this;
  }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::shared_ptr<detail::BucketedGradients> buckets_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/distributed/detail/grad_buckets_impl.h>  // IWYU pragma: export
