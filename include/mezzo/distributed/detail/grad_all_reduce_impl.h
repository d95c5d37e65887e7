#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/compressed_exchange.h>
#include <mezzo/distributed/detail/gradient_reduction.h>
#include <mezzo/distributed/grad_all_reduce.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline void check_can_be_reduced(const char* caller, const GradBuckets& buckets,
                                 const Communicator& communicator) {
  TORCH_CHECK(buckets.options().storage() == GradStorage::flat, caller, " on rank ",
              communicator.rank(),
              ": `buckets` must have flat storage: "
              "GradBucketsOptions().storage(GradStorage::flat)");
  for (const GradBucket& bucket : buckets.buckets()) {
    TORCH_CHECK(communicator.serves(bucket.device.type()), caller, " on rank ", communicator.rank(),
                ": gradients lie on ", bucket.device, ", which `communicator` does not serve");
  }
}

inline void check_options(const char* caller, const GradAllReduceOptions& options) {
  TORCH_CHECK(!options.compress_dtype || is_low_precision(*options.compress_dtype), caller,
              ": `compress_dtype` must be bfloat16 or half, but is ",
              options.compress_dtype.value_or(at::kFloat));
  TORCH_CHECK(
      !options.error_feedback || options.compress_dtype, caller,
      ": `error_feedback` is of what rounding to `compress_dtype` loses; set `compress_dtype`");
  TORCH_CHECK(!options.loss_scale || options.error_feedback, caller,
              ": `loss_scale` is for `error_feedback`, which is off");
}

/// `buffers` is null where nothing is compressed.
inline std::unique_ptr<BucketExchange> make_exchange(const GradAllReduceOptions& options,
                                                     BucketedGradients& gradients,
                                                     const Communicator& communicator,
                                                     std::shared_ptr<CompressBuffers> buffers) {
  if (buffers == nullptr) {
    return std::make_unique<AllReduceExchange>(gradients, communicator, options.average);
  }
  return std::make_unique<CompressedExchange>(gradients, communicator, std::move(buffers),
                                              options.average, options.loss_scale);
}

inline std::shared_ptr<CompressBuffers> make_compress_buffers(const GradAllReduceOptions& options,
                                                              const Communicator& communicator) {
  if (!options.compress_dtype) return nullptr;
  return std::make_shared<CompressBuffers>(communicator, *options.compress_dtype,
                                           options.error_feedback);
}

}  // namespace detail

inline GradAllReduce::GradAllReduce(GradBuckets& buckets, Communicator communicator,
                                    const GradAllReduceOptions& options)
    : gradients_(detail::shared(buckets)),
      compress_buffers_(detail::make_compress_buffers(options, communicator)) {
  detail::check_can_be_reduced("GradAllReduce", buckets, communicator);
  detail::check_options("GradAllReduce", options);
  auto exchange = detail::make_exchange(options, *gradients_, communicator, compress_buffers_);
  auto reduction = std::make_shared<detail::GradientReduction>(
      "GradAllReduce", *gradients_, std::move(communicator), std::move(exchange));
  callback_ = gradients_->on_ready([reduction](std::size_t bucket) { reduction->ready(bucket); });
}

inline std::vector<at::Tensor> GradAllReduce::residuals() const {
  return compress_buffers_ == nullptr ? std::vector<at::Tensor>()
                                      : compress_buffers_->residuals(gradients_->buckets());
}

inline GradAllReduce::~GradAllReduce() { gradients_->end_ready(callback_); }

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
