#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/communicator.h>
#include <mezzo/distributed/detail/gradient_reduction.h>
#include <mezzo/optim/detail/bucketed_gradients.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// What is this rank's of `flat`, one of `size()` equal parts.
inline at::Tensor own_part(const at::Tensor& flat, const Communicator& communicator) {
  const int64_t length = flat.numel() / communicator.size();
  return flat.narrow(0, communicator.rank() * length, length);
}

/// Every rank gets the sum of its own part of every bucket. The other parts become zero: gradients
/// that a further pass adds to them are summed then, and what was summed is not summed again.
class ShardExchange : public BucketExchange {
 public:
  ShardExchange(BucketedGradients& gradients, Communicator communicator)
      : gradients_(gradients), communicator_(std::move(communicator)) {}

  ~ShardExchange() override {
    for (Scatter& scatter : under_way_) scatter.request.abandon();
  }

  void begin(std::size_t bucket) override {
    if (communicator_.size() == 1) return;
    const at::Tensor& flat = gradients_.buckets()[bucket].flat;
    under_way_.push_back(
        {flat, communicator_.reduce_scatter(own_part(flat, communicator_), flat, Reduction::sum)});
  }
  /// Ends what is done, so that the transport can let go of the memory that it took for it.
  void poll() override {
    while (!under_way_.empty() && under_way_.front().request.ready()) end_first();
  }
  void finish() override {
    while (!under_way_.empty()) end_first();
    has_summed_ = true;
  }

  /// Whether a backward pass has ended with sums since this was last set to false.
  bool has_summed() const noexcept { return has_summed_; }
  void set_has_summed(bool has_summed) noexcept { has_summed_ = has_summed; }

 private:
  struct Scatter {
    at::Tensor flat;
    Work request;
  };

  void end_first() {
    Scatter& first = under_way_.front();
    first.request.wait();
    const int64_t length = first.flat.numel() / communicator_.size();
    const int64_t begin = communicator_.rank() * length;
    first.flat.narrow(0, 0, begin).zero_();
    first.flat.narrow(0, begin + length, first.flat.numel() - begin - length).zero_();
    under_way_.pop_front();
  }

  BucketedGradients& gradients_;
  Communicator communicator_;
  std::deque<Scatter> under_way_;
  bool has_summed_ = false;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
