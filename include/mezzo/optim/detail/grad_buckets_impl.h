#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/bucketed_gradients.h>
#include <mezzo/optim/detail/bucketed_gradients_backward.h>
#include <mezzo/optim/detail/bucketed_gradients_layout.h>
#include <mezzo/optim/detail/bucketed_gradients_micro_batch.h>
#include <mezzo/optim/detail/bucketed_gradients_summary.h>
#include <mezzo/optim/grad_buckets.h>

#include <c10/util/Exception.h>

#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

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

inline GradBuckets::~GradBuckets() {
  if (state_ != nullptr) state_->remove_hooks();
}

inline GradBuckets::GradBuckets(GradBuckets&&) noexcept = default;

inline GradBuckets& GradBuckets::operator=(GradBuckets&& other) noexcept {
  if (this == &other) return *this;
  if (state_ != nullptr) state_->remove_hooks();
  state_ = std::move(other.state_);
  return *this;
}

inline void GradBuckets::add_parameters(const std::vector<at::Tensor>& parameters) {
  state_->add_parameters(parameters);
}

inline const GradBucketsOptions& GradBuckets::options() const noexcept { return state_->options(); }

inline const std::vector<at::Tensor>& GradBuckets::parameters() const noexcept {
  return state_->parameters();
}

inline const std::vector<GradBucket>& GradBuckets::buckets() const noexcept {
  return state_->buckets();
}

inline void GradBuckets::reattach_gradients() { state_->reattach_gradients(); }

inline std::vector<BucketGradient> GradBuckets::gradients() { return state_->gradients(); }

inline std::vector<std::size_t> GradBuckets::sparse_gradients() {
  return state_->sparse_gradients();
}

inline GradientSummary GradBuckets::summarize(const at::Tensor& inv_scale) {
  return state_->summarize(inv_scale);
}

inline void GradBuckets::forget_reads() { state_->forget_reads(); }

inline GradientStatistics GradBuckets::statistics(const at::Tensor& inv_scale,
                                                  at::ScalarType low_precision) {
  return state_->statistics(inv_scale, low_precision);
}

inline void GradBuckets::zero_grad(bool set_to_none) { state_->zero_grad(set_to_none); }

inline void GradBuckets::rebuild_buckets() { state_->rebuild_buckets(); }

inline at::Tensor GradBuckets::accumulate_if_finite(const std::function<void()>& backward) {
  return state_->accumulate_if_finite(backward);
}

inline void GradBuckets::on_ready(std::function<void(std::size_t bucket)> callback) {
  state_->on_ready(std::move(callback));
}

inline std::shared_ptr<detail::BucketedGradients> detail::shared(
    const GradBuckets& buckets) noexcept {
  return buckets.state_;
}

inline GradBuckets::NoSync GradBuckets::no_sync() { return NoSync(state_); }

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
