#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/bucketed_gradients.h>

#include <memory>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

class GradBuckets;

namespace detail {

/// What GradBuckets::no_sync gives. While one lives, backward passes only accumulate: nothing is
/// checked or reported ready.
class [[nodiscard]] NoSync {
 public:
  explicit NoSync(GradBuckets& buckets);
  explicit NoSync(std::shared_ptr<BucketedGradients> buckets) : buckets_(std::move(buckets)) {
    buckets_->add_no_sync(1);
  }
  ~NoSync() { buckets_->add_no_sync(-1); }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::shared_ptr<BucketedGradients> buckets_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
