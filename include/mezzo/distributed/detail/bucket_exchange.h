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
/// `begin_pass`, `begin` for each bucket, in the same order on all ranks, `poll` in between, then
/// `finish`.
class BucketExchange {
 public:
  BucketExchange() = default;
  virtual ~BucketExchange() = default;
  BucketExchange(const BucketExchange&) = delete;
  BucketExchange& operator=(const BucketExchange&) = delete;

  /// Whether this pass ends with sums over the ranks that readers are to divide (rank_sum.h).
  virtual bool begin_pass() { return false; }
  /// The bucket is full; its `flat` is not touched by others until `finish` has returned.
  virtual void begin(std::size_t bucket) = 0;
  /// Moves on what is under way, without waiting.
  virtual void poll() = 0;
  /// Returns when every bucket that has begun holds what it is to hold.
  virtual void finish() = 0;
};

/// Every rank gets the sum of every bucket, or the average: divided before the sum, so that half
/// does not overflow, or where a reader divides as it reads, by that.
class AllReduceExchange : public BucketExchange {
 public:
  AllReduceExchange(BucketedGradients& gradients, AnyCommunicator communicator, bool average)
      : gradients_(gradients), communicator_(std::move(communicator)), average_(average) {}

  bool begin_pass() override {
    reader_divides_ = average_ && gradients_.has_dividing_reader();
    return reader_divides_;
  }
  void begin(std::size_t bucket) override {
    const at::Tensor& flat = gradients_.buckets()[bucket].flat;
    if (average_ && !reader_divides_ && communicator_.size() > 1)
      flat.mul_(1. / communicator_.size());
    requests_.add(communicator_.all_reduce(flat, Reduction::sum));
  }
  void poll() override { requests_.poll(); }
  void finish() override { requests_.wait(); }

 private:
  BucketedGradients& gradients_;
  AnyCommunicator communicator_;
  bool average_;
  bool reader_divides_ = false;  // in this pass
  PendingRequests requests_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
