/// \file
/// GradReducer: averages gradients over all ranks, overlapped with the backward pass.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/reducer.h>
#include <mezzo/distributed/no_sync_guard.h>
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

/// Options of GradReducer; equal on all ranks.
struct GradReducerOptions {
  /// Maximum size of a bucket in bytes; > 0. A bucket is all-reduced once it is complete: small
  /// buckets start earlier, large buckets need fewer collectives.
  int64_t bucket_cap_bytes = kDefaultBucketCapBytes;
  /// bfloat16 or float16: float32 and float64 gradients are divided by the world size, rounded to
  /// this dtype and summed in it. Only averages that the dtype cannot represent overflow; float16
  /// needs a loss scale. Allocates 2 bytes per element in addition to the bucket.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
};

/// All-reduces gradients in buckets, overlapped with the backward pass. While a GradReducer exists,
/// every backward pass over its parameters returns with averages over all ranks in `.grad`, which
/// are views of GradBuckets. Read, clip or step with them as usual.
///
/// \code
///   mezzo::GradReducer grad_reducer(model->parameters(), world);
///   mezzo::optim::AdamW optimizer(model->parameters(), 2e-5);
///   for (auto& batch : *rank_loader) {
///     optimizer.zero_grad();
///     loss(model, batch).backward();                 // returns when all buckets are reduced
///     optimizer.step();
///   }
/// \endcode
///
/// Gradients are divided by the world size before or after the sum such that float16 overflows only
/// if the scaled average does. Gradients accumulated before the pass are averaged with it. A
/// parameter that has a gradient on some ranks gets the average on all ranks, with zeros for the
/// others; a parameter without a gradient on any rank keeps its undefined gradient.
///
/// All ranks must pass the same parameters in the same order and the same options, and run the same
/// number of backward passes, one at a time. Each parameter gets a post-accumulate hook, which
/// first calls the existing hook. `backward()` throws backend errors, and if two reducers share a
/// parameter; the ranks are then out of sync and must restart from a checkpoint.
class GradReducer {
 public:
  /// Call it on all ranks, which compare parameters and options.
  /// \throws c10::Error if `backend` is null or an option is invalid; on all ranks, naming the
  ///   first rank that differs, if parameters or options differ
  GradReducer(const std::vector<at::Tensor>& parameters, c10::intrusive_ptr<c10d::Backend> backend,
              const GradReducerOptions& options = {})
      : reducer_(std::make_shared<detail::Reducer>(
            parameters, std::move(backend), options.bucket_cap_bytes, options.reduce_dtype)) {
    reducer_->install_hooks();
  }
  /// Removes the hooks. Gradients remain bucket views.
  ~GradReducer() { reducer_->remove_hooks(); }
  GradReducer(const GradReducer&) = delete;
  GradReducer& operator=(const GradReducer&) = delete;

  GradBuckets& buckets() noexcept { return reducer_->buckets(); }

  /// Returns a guard under which backward passes only accumulate on this rank.
  [[nodiscard]] NoSyncGuard no_sync() { return NoSyncGuard(reducer_); }

  /// Returns whether a NoSyncGuard exists.
  bool is_no_sync() const { return reducer_->is_no_sync(); }

 private:
  std::shared_ptr<detail::Reducer> reducer_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
