#pragma once

#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collectives.h>
#include <mezzo/distributed/detail/gradient_reduction.h>
#include <mezzo/distributed/grad_all_reduce.h>
#include <mezzo/distributed/grad_buckets.h>
#include <mezzo/distributed/reduce_scatter_float.h>
#include <mezzo/kernels/compress_tensors.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Gradients of float and double go in two bytes an element, as this rank's part of the average, so
/// that their sum overflows only where the average does; what comes back is widened, and multiplied
/// by the number of ranks if the sum is wanted.
///
/// With error feedback nothing is lost in the long run. Two roundings lose something: of this
/// rank's gradients, and of the ranks' sum. An all-reduce would hide the second; so each rank adds
/// up its part of the bucket (a reduce-scatter into float), rounds it and gives it to all (an
/// all-gather), as many bytes as before. Both keep what they lost, divided by the loss scale, for
/// the next pass.
class CompressedExchange final : public BucketExchange {
 public:
  /// `loss_scale` is null where nothing scales.
  CompressedExchange(BucketedGradients& gradients, const GroupPtr& group, at::ScalarType dtype,
                     bool average, bool error_feedback, std::function<at::Tensor()> loss_scale)
      : gradients_(gradients),
        group_(group),
        plain_(gradients, group, average),
        dtype_(dtype),
        times_(average ? 1. : group->getSize()),
        error_feedback_(error_feedback),
        loss_scale_(std::move(loss_scale)) {}

  /// Error-feedback residuals of all compressed buckets, in bucket order.
  std::vector<at::Tensor> residuals() {
    std::vector<at::Tensor> all;
    for (std::size_t bucket = 0; error_feedback_ && bucket < gradients_.buckets().size();
         ++bucket) {
      if (!is_compressed(gradients_.buckets()[bucket])) continue;
      const Beside& beside = beside_bucket(bucket);
      all.push_back(beside.residual);
      all.push_back(beside.own_sum_residual);
    }
    return all;
  }

  void begin(std::size_t bucket) override {
    const GradBucket& of = gradients_.buckets()[bucket];
    if (!is_compressed(of)) {
      begun_plain_.push_back(bucket);
      return plain_.begin(bucket);
    }
    if (begun_.empty()) read_loss_scale();
    begun_.push_back(bucket);
    const Beside& beside = beside_bucket(bucket);
    const at::Tensor sent = beside.sent.narrow(0, 0, of.flat.numel());
    const double share = 1. / group_->getSize();
    if (error_feedback_) {
      narrow_into(sent, of.flat, beside.residual, {share, scale_like(of.flat)});
      requests_.add(
          request(CollectiveCall(c10d::OpType::_REDUCE_SCATTER_BASE, beside.sent), *group_,
                  [&] { return reduce_scatter_float(group_, beside.own_sum, beside.sent); }));
    } else {
      narrow_into(sent, of.flat, share);
      requests_.add(all_reduce(group_, beside.sent, c10d::ReduceOp::SUM));
    }
  }

  void finish() override {
    if (error_feedback_) gather_sums();
    at::Tensor finite;
    for (std::size_t i = 0; i < begun_.size(); ++i) {
      (error_feedback_ ? gathers_ : requests_).wait_for(i);
      const Beside& beside = beside_bucket(begun_[i]);
      const at::Tensor sent = beside.sent.narrow(0, 0, beside.flat.numel());
      note(finite, widen_into(beside.flat, sent, times_));
    }
    requests_.wait();
    gathers_.wait();
    plain_.finish();
    if (error_feedback_ && !begun_.empty()) {
      for (const std::size_t bucket : begun_plain_) {
        note(finite, all_finite(gradients_.buckets()[bucket].flat));
      }
      drop_unless(finite);
    }
    begun_.clear();
    begun_plain_.clear();
  }

 private:
  /// What lies beside a bucket that is compressed, from one pass to the next.
  struct Beside {
    at::Tensor flat = {};      ///< the bucket's own, whose this is
    at::Tensor sent = {};      ///< its elements in two bytes each, made up to a multiple of ranks
    at::Tensor own_part = {};  ///< of `sent`, this rank's share of the adding up
    at::Tensor residual = {};  ///< what rounding this rank's gradients lost
    at::Tensor own_sum = {};   ///< float
    at::Tensor own_sum_residual = {};  ///< what rounding the sum lost
  };

  /// Is a bucket of this dtype sent in another? One of two bytes goes as it is.
  static bool is_compressed(const GradBucket& bucket) {
    return bucket.dtype == at::kFloat || bucket.dtype == at::kDouble;
  }

  /// Buckets may have been added or laid out anew: what was lost of other gradients is dropped.
  const Beside& beside_bucket(std::size_t number) {
    beside_.resize(gradients_.buckets().size());
    Beside& beside = beside_[number];
    const at::Tensor& flat = gradients_.buckets()[number].flat;
    if (beside.flat.is_same(flat)) return beside;
    const int64_t ranks = group_->getSize();
    const int64_t part = (flat.numel() + ranks - 1) / ranks;
    beside = {.flat = flat, .sent = at::zeros({part * ranks}, flat.options().dtype(dtype_))};
    if (!error_feedback_) return beside;
    beside.own_part = beside.sent.narrow(0, group_->getRank() * part, part);
    beside.residual = at::zeros_like(flat);
    beside.own_sum = at::empty({part}, flat.options().dtype(at::kFloat));
    beside.own_sum_residual = at::zeros_like(beside.own_sum);
    return beside;
  }

  /// The second half starts when all first halves are done, for all ranks must do so at one place.
  void gather_sums() {
    for (std::size_t i = 0; i < begun_.size(); ++i) {
      requests_.wait_for(i);
      const Beside& beside = beside_bucket(begun_[i]);
      narrow_into(beside.own_part, beside.own_sum, beside.own_sum_residual,
                  {1., scale_like(beside.own_sum)});
      gathers_.add(all_gather(group_, beside.sent, beside.own_part));
    }
  }

  void read_loss_scale() {
    if (!loss_scale_) return;
    scale_ = loss_scale_();
    TORCH_CHECK(scale_.defined() && scale_.numel() == 1, "GradAllReduce on rank ",
                group_->getRank(),
                ": `loss_scale` must return a tensor of one element, but returned ",
                tensor_words(scale_), "; return scaler.scale(torch::ones({}, device))");
    TORCH_CHECK(!scale_.is_cpu() || scale_.item<double>() > 0., "GradAllReduce on rank ",
                group_->getRank(), ": `loss_scale` must return a positive number, but returned ",
                scale_.item<double>(), "; return scaler.scale(torch::ones({}, device))");
    scale_ = scale_.detach().reshape(at::IntArrayRef());
  }

  at::Tensor scale_like(const at::Tensor& tensor) const {
    return scale_.defined() ? scale_.to(tensor.options()) : scale_;
  }

  static void note(at::Tensor& all, const at::Tensor& finite) {
    all = all.defined() ? all.logical_and(finite.to(all.device())) : finite;
  }

  /// Of a step that will be skipped nothing must reach the next one: beside an inf there may be
  /// values so large that even what rounding them lost is out of proportion.
  void drop_unless(const at::Tensor& finite) {
    for (const at::Tensor& residual : residuals()) {
      if (residual.is_cpu() && finite.is_cpu()) {
        if (!finite.item<bool>()) residual.zero_();
      } else {
        residual.mul_(finite.to(residual.options()));  // no host sync; residuals are finite
      }
    }
  }

  BucketedGradients& gradients_;
  GroupPtr group_;
  AllReduceExchange plain_;
  at::ScalarType dtype_;
  double times_;
  bool error_feedback_;
  std::function<at::Tensor()> loss_scale_;
  at::Tensor scale_;            ///< of this pass, undefined: 1
  std::vector<Beside> beside_;  ///< a bucket
  std::vector<std::size_t> begun_;
  std::vector<std::size_t> begun_plain_;
  PendingRequests requests_;
  PendingRequests gathers_;
};

inline void check_can_be_reduced(const GradBuckets& buckets,
                                 const c10::intrusive_ptr<c10d::Backend>& group) {
  for (const GradBucket& bucket : buckets.buckets()) {
    check_device("GradAllReduce", *group, bucket.device);
  }
}

inline void check_options(const GradAllReduceOptions& options) {
  TORCH_CHECK(!options.compress_dtype || is_low_precision(*options.compress_dtype),
              "GradAllReduce: `compress_dtype` must be bfloat16 or half, but is ",
              options.compress_dtype.value_or(at::kFloat));
  TORCH_CHECK(!options.error_feedback || options.compress_dtype,
              "GradAllReduce: `error_feedback` carries what rounding to `compress_dtype` loses; "
              "set compress_dtype too");
  TORCH_CHECK(!options.loss_scale || options.error_feedback,
              "GradAllReduce: `loss_scale` is for `error_feedback`, which is off; set "
              "error_feedback = true, or "
              "leave loss_scale out");
}

}  // namespace detail

inline GradAllReduce::GradAllReduce(GradBuckets& buckets, c10::intrusive_ptr<c10d::Backend> group,
                                    const GradAllReduceOptions& options)
    : gradients_(detail::shared(buckets)) {
  detail::check_can_be_reduced(buckets, detail::checked(group, "GradAllReduce"));
  detail::check_options(options);
  std::shared_ptr<detail::BucketExchange> exchange;
  if (options.compress_dtype) {
    exchange = compressed_ = std::make_shared<detail::CompressedExchange>(
        *gradients_, group, *options.compress_dtype, options.average, options.error_feedback,
        options.loss_scale);
  } else {
    exchange = std::make_shared<detail::AllReduceExchange>(*gradients_, group, options.average);
  }
  const int group_size = group->getSize();
  auto reduction = std::make_shared<detail::GradientReduction>(
      "GradAllReduce", *gradients_, std::move(group), std::move(exchange));
  if (group_size > 1) gradients_->begin_noting_steps();
  callback_ = gradients_->on_ready([reduction](std::size_t bucket) { reduction->ready(bucket); });
}

inline std::vector<at::Tensor> GradAllReduce::residuals() const {
  return compressed_ == nullptr ? std::vector<at::Tensor>() : compressed_->residuals();
}

inline GradAllReduce::~GradAllReduce() { gradients_->end_ready(callback_); }

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
