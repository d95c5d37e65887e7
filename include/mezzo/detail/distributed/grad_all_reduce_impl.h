#pragma once

#include <c10/util/Exception.h>
#include <mezzo/detail/distributed/bucket_exchange.h>
#include <mezzo/detail/distributed/gradient_reduction.h>
#include <mezzo/distributed/grad_all_reduce.h>
#include <mezzo/version.h>

#include <cstddef>
#include <memory>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline void check_can_be_reduced(const char* caller, const GradBuckets& buckets,
                                 const AnyCommunicator& communicator) {
  TORCH_CHECK(buckets.options().storage() == GradStorage::flat, caller,
              ": `buckets` must have flat storage: "
              "GradBucketsOptions().storage(GradStorage::flat)");
  for (const GradBucket& bucket : buckets.buckets()) {
    TORCH_CHECK(communicator.serves(bucket.device.type()), caller, ": gradients lie on ",
                bucket.device, ", which `communicator` does not serve");
  }
}

}  // namespace detail

inline GradAllReduce::GradAllReduce(GradBuckets& buckets, AnyCommunicator communicator,
                                    const GradAllReduceOptions& options)
    : gradients_(buckets.share()) {
  detail::check_can_be_reduced("GradAllReduce", buckets, communicator);
  auto exchange =
      std::make_unique<detail::AllReduceExchange>(*gradients_, communicator, options.average);
  auto reduction = std::make_shared<detail::GradientReduction>(
      "GradAllReduce", *gradients_, std::move(communicator), std::move(exchange));
  gradients_->on_ready([reduction](std::size_t bucket) { reduction->ready(bucket); });
}

inline GradAllReduce::~GradAllReduce() { gradients_->on_ready(nullptr); }

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
