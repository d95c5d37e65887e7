#pragma once

#include <mezzo/base/detail/crc32c.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collectives.h>
#include <mezzo/distributed/detail/rank_agreement.h>
#include <mezzo/distributed/grad_buckets.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Exchanges the gradients of one bucket after another with the other ranks. A backward pass calls
/// `begin` for each bucket, in the same order on all ranks, and then `finish`.
class BucketExchange {
 public:
  BucketExchange() = default;
  virtual ~BucketExchange() = default;
  BucketExchange(const BucketExchange&) = delete;
  BucketExchange& operator=(const BucketExchange&) = delete;

  /// Begins to exchange a full bucket, whose `flat` no other code touches until `finish` has
  /// returned.
  virtual void begin(std::size_t bucket) = 0;
  /// Returns when every bucket that was begun holds its result.
  virtual void finish() = 0;
};

/// Gives every rank the average of every bucket, or the sum. Averages of an earlier pass are the
/// same on all ranks, so that averaging them again with the gradients of this pass leaves them as
/// they are.
class AllReduceExchange : public BucketExchange {
 public:
  AllReduceExchange(BucketedGradients& gradients, GroupPtr group, bool average)
      : gradients_(gradients),
        group_(std::move(group)),
        reduction_(average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM) {}

  void begin(std::size_t bucket) override {
    requests_.add(all_reduce(group_, gradients_.buckets()[bucket].flat, reduction_));
  }
  void finish() override { requests_.wait(); }

 private:
  BucketedGradients& gradients_;
  GroupPtr group_;
  c10d::ReduceOp::RedOpType reduction_;
  PendingRequests requests_;
};

inline constexpr std::size_t kFingerprintBytes = 8;
using Fingerprint = std::array<std::uint8_t, kFingerprintBytes>;

/// Returns a checksum (CRC-32C) of `size` bytes, and its complement: the ranks' largest bytes are
/// each rank's own where all ranks are alike, and not otherwise.
inline Fingerprint fingerprint(const void* data, std::size_t size) {
  const std::uint32_t crc = crc32c(data, size);
  Fingerprint bytes;
  for (unsigned byte = 0; byte < 4; ++byte) {
    bytes[byte] = static_cast<std::uint8_t>(crc >> (8 * byte));
    bytes[4 + byte] = static_cast<std::uint8_t>(~crc >> (8 * byte));
  }
  return bytes;
}

/// Returns which parameters lie in which bucket: a line a bucket.
inline std::string words_of_layout(const std::vector<GradBucket>& buckets) {
  std::string words;
  for (std::size_t number = 0; number < buckets.size(); ++number) {
    const GradBucket& bucket = buckets[number];
    words += "bucket " + std::to_string(number) + ": " + std::to_string(bucket.flat.numel()) +
             " elements of " + std::string(dtype_name(bucket.dtype)) + " for parameters";
    for (const std::size_t parameter : bucket.parameters) words += ' ' + std::to_string(parameter);
    words += '\n';
  }
  return words;
}

/// Returns a line for each parameter: the sum of its bits, read as integers. Waits for the device.
inline std::string words_of_weights(const std::vector<at::Tensor>& parameters) {
  std::string words;
  for (std::size_t number = 0; number < parameters.size(); ++number) {
    const at::Tensor& parameter = parameters[number];
    const auto size = parameter.element_size();
    const at::ScalarType bits = size == 8 ? at::kLong : size == 4 ? at::kInt : at::kShort;
    const at::Tensor sum = parameter.detach().view(bits).sum(at::kLong);
    words += parameter_words(number, parameter) + ": bits that add up to " +
             std::to_string(sum.item<int64_t>()) + '\n';
  }
  return words;
}

/// Calls a BucketExchange during backward passes, on all ranks in the order of the buckets, in
/// whichever order backward fills them.
class GradientReduction {
 public:
  /// All ranks call it together, and compare their buckets and lines of `options`. `caller` is the
  /// name that errors begin with.
  GradientReduction(const char* caller, BucketedGradients& gradients, GroupPtr group,
                    std::shared_ptr<BucketExchange> exchange, const std::string& options = {})
      : caller_(caller),
        gradients_(gradients),
        group_(std::move(group)),
        exchange_(std::move(exchange)),
        passes_(gradients.passes()) {
    if (group_->getSize() > 1 && !gradients_.buckets().empty()) {
      RankAgreement(group_, gradients_.buckets().front().device)
          .check_alike(caller, options + words_of_layout(gradients_.buckets()), kStepAlike);
    }
    gradients_.add_reductions(1);
  }
  ~GradientReduction() { gradients_.add_reductions(-1); }
  GradientReduction(const GradientReduction&) = delete;
  GradientReduction& operator=(const GradientReduction&) = delete;

  /// Called when a bucket is full; autograd's threads for several devices may call it at a time.
  void ready(std::size_t bucket) {
    const std::lock_guard lock(mutex_);
    const c10::NoGradGuard no_grad;
    const std::size_t count = gradients_.buckets().size();
    const bool is_first = next_ == 0 && !is_under_way_;
    if (is_first) {
      check_alone();
      is_ready_.assign(count, false);
      ++passes_;
    }
    TORCH_CHECK(!is_broken_ && passes_ == gradients_.passes() && !is_ready_[bucket], caller_,
                " on rank ", group_->getRank(),
                ": an earlier backward pass did not end, so the ranks are no longer in step; begin "
                "again from a checkpoint on all ranks");
    is_ready_[bucket] = true;
    is_under_way_ = true;
    is_broken_ = true;  // unless this ends well
    while (next_ < count && is_ready_[next_]) exchange_->begin(next_++);
    if (next_ == count) finish();
    is_broken_ = false;
  }

 private:
  /// Throws where another reduction reduces a gradient too. Checked in the first pass: a reduction
  /// may be constructed before the one that it replaces is destroyed.
  void check_alone() {
    if (std::exchange(is_known_alone_, true)) return;
    for (std::size_t number = 0; number < gradients_.parameters().size(); ++number) {
      const bool is_alone = !gradients_.is_reduced_elsewhere(number);
      is_known_alone_ = is_alone;
      TORCH_CHECK(is_alone, caller_, " on rank ", group_->getRank(), ": the gradient of ",
                  parameter_words(number, gradients_.parameters()[number]),
                  " is reduced by another DataParallel, GradAllReduce or ShardedOptimizer too; "
                  "leave it to one of them, and destroy the other");
    }
  }

  /// Returns why a gradient cannot be reduced; empty where it can.
  static std::string refusal_of(const at::Tensor& gradient) {
    if (!gradient.defined()) return {};
    if (gradient.layout() != at::kStrided) {
      return " is sparse, which no bucket holds; make it dense";
    }
    if (!gradient.requires_grad()) return {};
    return " has a history (create_graph), which ends with this process; run that backward pass "
           "without synchronisation (no_sync)";
  }

  /// Ends the pass. A rank that refuses a gradient tells the others, which would wait for it, and
  /// throws then.
  void finish() {
    std::vector<std::uint8_t> has_gradient;
    bool all = true;
    std::string refused;
    for (const at::Tensor& parameter : gradients_.parameters()) {
      const at::Tensor& gradient = parameter.grad();
      const std::string refusal = refusal_of(gradient);
      if (refused.empty() && !refusal.empty()) {
        refused =
            c10::str("the gradient of ", parameter_words(has_gradient.size(), parameter), refusal);
      }
      has_gradient.push_back(gradient.defined() ? 1 : 0);
      all = all && (gradient.defined() || !parameter.requires_grad());
    }
    has_gradient.push_back(refused.empty() ? 0 : 1);
    const bool is_first = std::exchange(is_first_pass_, false);
    std::string words;
    if (is_first && group_->getSize() > 1) words = words_of_weights(gradients_.parameters());
    const Fingerprint own = fingerprint(words.data(), words.size());
    has_gradient.insert(has_gradient.end(), own.begin(), own.end());
    const at::Tensor anywhere = at::tensor(
        has_gradient, at::TensorOptions().dtype(at::kByte).device(gradients_.buckets()[0].device));
    PendingRequests request;
    request.add(all_reduce(group_, anywhere, c10d::ReduceOp::MAX));
    exchange_->finish();
    request.wait();
    TORCH_CHECK(refused.empty(), caller_, " on rank ", group_->getRank(), ": ", refused);
    if (anywhere.is_cpu() || is_first) check_ranks(anywhere, own, words);
    if (!all) adopt(anywhere.cpu());
    next_ = 0;
    is_under_way_ = false;
  }

  /// Throws where a rank refuses a gradient, and where the ranks have different weights in the first
  /// pass. Called in each pass on the CPU, and on a device, for which it waits, in the first pass. A
  /// rank that goes on without knowing waits in its next pass, until a Watchdog ends it.
  void check_ranks(const at::Tensor& anywhere, const Fingerprint& own, const std::string& words) {
    constexpr int64_t kBytes = 1 + kFingerprintBytes;
    const at::Tensor largest = anywhere.narrow(0, anywhere.numel() - kBytes, kBytes).cpu();
    const std::uint8_t* const bytes = largest.const_data_ptr<std::uint8_t>();
    TORCH_CHECK(bytes[0] == 0, caller_, " on rank ", group_->getRank(),
                ": another rank refuses a gradient, which is sparse or has a history, and says "
                "which; begin again from a checkpoint on all ranks");
    if (!std::equal(own.begin(), own.end(), bytes + 1)) {
      RankAgreement(group_, anywhere.device()).check_alike(caller_, words, kStepAlike);
    }
  }

  /// Gives each parameter that has a gradient on any rank its place as gradient.
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

  const char* caller_;
  BucketedGradients& gradients_;
  GroupPtr group_;
  std::shared_ptr<BucketExchange> exchange_;
  std::mutex mutex_;
  std::vector<bool> is_ready_;  ///< a bucket, in this pass
  std::size_t next_ = 0;        ///< ranks reduce in the order of the buckets, however they fill
  int64_t passes_;              ///< passes of the buckets seen here: all, if none threw
  bool is_first_pass_ = true;
  bool is_known_alone_ = false;
  bool is_under_way_ = false;
  bool is_broken_ = false;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
