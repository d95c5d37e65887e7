#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/communicator.h>
#include <mezzo/distributed/detail/pending_requests.h>
#include <mezzo/optim/detail/bucketed_gradients.h>

#include <cstddef>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// How the gradients of one bucket after another become those of all ranks. One backward pass:
/// `begin` for each bucket, in the same order on all ranks, `poll` in between, then `finish`.
class BucketExchange {
 public:
  BucketExchange() = default;
  virtual ~BucketExchange() = default;
  BucketExchange(const BucketExchange&) = delete;
  BucketExchange& operator=(const BucketExchange&) = delete;

  /// The bucket is full; its `flat` is not touched by others until `finish` has returned.
  virtual void begin(std::size_t bucket) = 0;
  /// Moves on what is under way, without waiting.
  virtual void poll() = 0;
  /// Returns when every bucket that has begun holds what it is to hold.
  virtual void finish() = 0;
};

/// Every rank gets the average of every bucket, or the sum. What an earlier pass has averaged is
/// the same on all ranks, so the average of it and of what was added to it counts it once.
class AllReduceExchange : public BucketExchange {
 public:
  AllReduceExchange(BucketedGradients& gradients, AnyCommunicator communicator, bool average)
      : gradients_(gradients),
        communicator_(std::move(communicator)),
        reduction_(average ? Reduction::average : Reduction::sum) {}

  void begin(std::size_t bucket) override {
    requests_.add(communicator_.all_reduce(gradients_.buckets()[bucket].flat, reduction_));
  }
  void poll() override { requests_.poll(); }
  void finish() override { requests_.wait(); }

 private:
  BucketedGradients& gradients_;
  AnyCommunicator communicator_;
  Reduction reduction_;
  PendingRequests requests_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
