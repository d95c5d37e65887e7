#pragma once

#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <mezzo/distributed/grad_all_reduce.h>
#include <mezzo/version.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The all-reduces of one backward pass after another.
class GradientReduction {
 public:
  GradientReduction(BucketedGradients& gradients, AnyCommunicator communicator,
                    const GradAllReduceOptions& options)
      : gradients_(gradients), communicator_(std::move(communicator)), options_(options) {}

  ~GradientReduction() {  // some are left where a pass threw
    for (CollectiveRequest& request : requests_) request.abandon();
  }
  GradientReduction(const GradientReduction&) = delete;
  GradientReduction& operator=(const GradientReduction&) = delete;

  /// Autograd's threads for several devices may come at a time.
  void ready(std::size_t bucket) {
    const std::lock_guard lock(mutex_);
    const c10::NoGradGuard no_grad;
    const std::size_t count = gradients_.buckets().size();
    if (next_ == 0 && !is_under_way_) is_ready_.assign(count, false);
    TORCH_CHECK(!is_broken_ && !is_ready_[bucket], "GradAllReduce on rank ", communicator_.rank(),
                ": an earlier backward pass did not end, so the ranks are no longer in step; begin "
                "again from a checkpoint on all ranks");
    is_ready_[bucket] = true;
    is_under_way_ = true;
    is_broken_ = true;                                             // unless this ends well
    for (CollectiveRequest& request : requests_) request.ready();  // moves it on
    while (next_ < count && is_ready_[next_]) reduce(next_++);
    if (next_ == count) finish();
    is_broken_ = false;
  }

 private:
  void reduce(std::size_t bucket) {
    const at::Tensor& flat = gradients_.buckets()[bucket].flat;
    if (options_.average) flat.mul_(1. / communicator_.size());
    requests_.push_back(communicator_.all_reduce(flat, Reduction::sum));
  }

  void finish() {
    std::vector<std::uint8_t> has_gradient;
    bool all = true;
    for (const at::Tensor& parameter : gradients_.parameters()) {
      const at::Tensor& gradient = parameter.grad();
      TORCH_CHECK(!gradient.defined() || gradient.layout() == at::kStrided,
                  "GradAllReduce on rank ", communicator_.rank(), ": the gradient of parameter ",
                  has_gradient.size(), " is sparse, which no bucket holds; make it dense");
      has_gradient.push_back(gradient.defined() ? 1 : 0);
      all = all && (gradient.defined() || !parameter.requires_grad());
    }
    const at::Tensor anywhere = at::tensor(
        has_gradient, at::TensorOptions().dtype(at::kByte).device(gradients_.buckets()[0].device));
    requests_.push_back(communicator_.all_reduce(anywhere, Reduction::max));
    for (CollectiveRequest& request : requests_) request.wait();
    if (!all) adopt(anywhere.cpu());
    requests_.clear();
    next_ = 0;
    is_under_way_ = false;
  }

  /// What other ranks had a gradient of, this one has too.
  void adopt(const at::Tensor& anywhere) {
    const std::uint8_t* const has_gradient = anywhere.const_data_ptr<std::uint8_t>();
    for (std::size_t number = 0; number < gradients_.parameters().size(); ++number) {
      const at::Tensor& parameter = gradients_.parameters()[number];
      if (has_gradient[number] == 0 || !parameter.requires_grad() || parameter.grad().defined()) {
        continue;
      }
      gradients_.adopt_place(number);
    }
  }

  BucketedGradients& gradients_;
  AnyCommunicator communicator_;
  GradAllReduceOptions options_;
  std::mutex mutex_;
  std::vector<CollectiveRequest> requests_;
  std::vector<bool> is_ready_;  ///< a bucket, in this pass
  std::size_t next_ = 0;        ///< ranks reduce in the order of the buckets, however they fill
  bool is_under_way_ = false;
  bool is_broken_ = false;
};

}  // namespace detail

inline GradAllReduce::GradAllReduce(GradBuckets& buckets, AnyCommunicator communicator,
                                    const GradAllReduceOptions& options)
    : gradients_(buckets.share()) {
  TORCH_CHECK(buckets.options().storage() == GradStorage::flat,
              "GradAllReduce: `buckets` must have flat storage: "
              "GradBucketsOptions().storage(GradStorage::flat)");
  for (const GradBucket& bucket : buckets.buckets()) {
    TORCH_CHECK(communicator.serves(bucket.device.type()), "GradAllReduce: gradients lie on ",
                bucket.device, ", which `communicator` does not serve");
  }
  auto reduction =
      std::make_shared<detail::GradientReduction>(*gradients_, std::move(communicator), options);
  gradients_->on_ready([reduction](std::size_t bucket) { reduction->ready(bucket); });
}

inline GradAllReduce::~GradAllReduce() { gradients_->on_ready(nullptr); }

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
