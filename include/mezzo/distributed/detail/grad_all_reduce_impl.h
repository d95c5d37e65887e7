#pragma once

#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collectives.h>
#include <mezzo/distributed/detail/gradient_reduction.h>
#include <mezzo/distributed/grad_all_reduce.h>
#include <mezzo/distributed/grad_buckets.h>
#include <mezzo/distributed/reduce_scatter_float.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
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
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Computes to = from * factor, rounded.
inline void narrow_into(at::Tensor to, const at::Tensor& from, double factor) {
  at::mul_out(to, from, at::scalar_tensor(factor, from.scalar_type()));
}

/// Computes to = from * factor + residual * scale, rounded. The rounding error divided by `scale`
/// becomes the new residual. If `from` is 0, 0 is sent and the residual stays; an inf or NaN leaves
/// a residual of 0. `scale` is undefined for 1.
inline void narrow_into(const at::Tensor& to, const at::Tensor& from, const at::Tensor& residual,
                        double factor, const at::Tensor& scale) {
  const at::Tensor by = scale.defined() ? scale : at::scalar_tensor(1., from.scalar_type());
  const at::Tensor waits = from == 0;
  const at::Tensor wanted = at::where(waits, from, from * factor + residual * by);
  to.copy_(wanted);
  const at::Tensor lost = (wanted - to.to(from.scalar_type())) / by;
  residual.copy_(at::where(waits, residual, at::where(at::isfinite(lost), lost, 0.)));
}

/// Computes to = from * factor. Returns whether all results are finite, as a bool on their device.
inline at::Tensor widen_into(const at::Tensor& to, const at::Tensor& from, double factor) {
  to.copy_(from);
  if (factor != 1.) to.mul_(factor);
  return at::isfinite(to).all();
}

/// Sends gradients of float and double in two bytes an element, as this rank's part of the average,
/// so that their sum overflows only where the average does. The result is widened, and multiplied
/// by the number of ranks if sums are wanted.
///
/// With error feedback no rounding error is lost in the long run. There are two roundings: of this
/// rank's gradients, and of the ranks' sum. An all-reduce would hide the second one. Each rank
/// therefore adds up its part of the bucket (a reduce-scatter into float), rounds the part and
/// gives it to all (an all-gather): as many bytes as an all-reduce. The errors of both roundings,
/// divided by the loss scale, are kept for the next pass.
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
        loss_scale_(std::move(loss_scale)) {
    for (const GradBucket& bucket : gradients.buckets()) beside_.push_back(beside_bucket(bucket));
  }

  /// Error-feedback residuals of all compressed buckets, in bucket order.
  std::vector<at::Tensor> residuals() const {
    std::vector<at::Tensor> all;
    for (const Beside& beside : beside_) {
      if (!beside.residual.defined()) continue;
      all.push_back(beside.residual);
      all.push_back(beside.own_sum_residual);
    }
    return all;
  }

  void begin(std::size_t bucket) override {
    const GradBucket& of = gradients_.buckets()[bucket];
    const Beside& beside = beside_[bucket];
    if (!beside.sent.defined()) {
      begun_plain_.push_back(bucket);
      return plain_.begin(bucket);
    }
    if (begun_.empty()) read_loss_scale();
    begun_.push_back(bucket);
    const at::Tensor sent = beside.sent.narrow(0, 0, of.flat.numel());
    const double share = 1. / group_->getSize();
    if (error_feedback_) {
      narrow_into(sent, of.flat, beside.residual, share, scale_like(of.flat));
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
      const at::Tensor& flat = gradients_.buckets()[begun_[i]].flat;
      const at::Tensor sent = beside_[begun_[i]].sent.narrow(0, 0, flat.numel());
      note(finite, widen_into(flat, sent, times_));
    }
    requests_.wait();
    gathers_.wait();
    plain_.finish();
    if (error_feedback_ && !begun_.empty()) {
      for (const std::size_t bucket : begun_plain_) {
        note(finite, at::isfinite(gradients_.buckets()[bucket].flat).all());
      }
      drop_unless(finite);
    }
    begun_.clear();
    begun_plain_.clear();
  }

 private:
  /// Tensors beside a bucket that is compressed, kept from one pass to the next. All are undefined
  /// for a bucket of two bytes, which is sent as it is.
  struct Beside {
    at::Tensor sent = {};      ///< the bucket's elements in two bytes, up to a multiple of ranks
    at::Tensor own_part = {};  ///< of `sent`, this rank's share of the adding up
    at::Tensor residual = {};  ///< what rounding this rank's gradients lost
    at::Tensor own_sum = {};   ///< float
    at::Tensor own_sum_residual = {};  ///< what rounding the sum lost
  };

  Beside beside_bucket(const GradBucket& bucket) const {
    if (bucket.dtype != at::kFloat && bucket.dtype != at::kDouble) return {};
    const at::Tensor& flat = bucket.flat;
    const int64_t ranks = group_->getSize();
    const int64_t part = (flat.numel() + ranks - 1) / ranks;
    Beside beside{.sent = at::zeros({part * ranks}, flat.options().dtype(dtype_))};
    if (!error_feedback_) return beside;
    beside.own_part = beside.sent.narrow(0, group_->getRank() * part, part);
    beside.residual = at::zeros_like(flat);
    beside.own_sum = at::empty({part}, flat.options().dtype(at::kFloat));
    beside.own_sum_residual = at::zeros_like(beside.own_sum);
    return beside;
  }

  /// Starts the second halves when all first halves are done: ranks must start them at one place in
  /// the order of collectives.
  void gather_sums() {
    for (std::size_t i = 0; i < begun_.size(); ++i) {
      requests_.wait_for(i);
      const Beside& beside = beside_[begun_[i]];
      narrow_into(beside.own_part, beside.own_sum, beside.own_sum_residual, 1.,
                  scale_like(beside.own_sum));
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

  /// Drops all rounding errors of a step that will be skipped: beside an inf there may be values so
  /// large that even their rounding errors are out of proportion.
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

/// Returns a line for each option in which ranks must not differ.
inline std::string words_of(const GradAllReduceOptions& options) {
  std::ostringstream words;
  words << "gradients: " << (options.average ? "averages" : "sums") << "\ncompress_dtype: ";
  options.compress_dtype ? words << *options.compress_dtype : words << "none";
  words << "\nerror_feedback: " << (options.error_feedback ? "on\n" : "off\n");
  return words.str();
}

}  // namespace detail

inline GradAllReduce::GradAllReduce(GradBuckets& buckets, c10::intrusive_ptr<c10d::Backend> group,
                                    const GradAllReduceOptions& options)
    : gradients_(detail::shared(buckets)) {
  detail::checked(group, "GradAllReduce");
  for (const GradBucket& bucket : buckets.buckets()) {
    detail::check_device("GradAllReduce", *group, bucket.device);
  }
  detail::check_options(options);
  std::shared_ptr<detail::BucketExchange> exchange;
  if (options.compress_dtype) {
    exchange = compressed_ = std::make_shared<detail::CompressedExchange>(
        *gradients_, group, *options.compress_dtype, options.average, options.error_feedback,
        options.loss_scale);
  } else {
    exchange = std::make_shared<detail::AllReduceExchange>(*gradients_, group, options.average);
  }
  auto reduction =
      std::make_shared<detail::GradientReduction>("GradAllReduce", *gradients_, std::move(group),
                                                  std::move(exchange), detail::words_of(options));
  callback_ = gradients_->on_ready([reduction](std::size_t bucket) { reduction->ready(bucket); });
}

inline std::vector<at::Tensor> GradAllReduce::residuals() const {
  return compressed_ == nullptr ? std::vector<at::Tensor>() : compressed_->residuals();
}

inline GradAllReduce::~GradAllReduce() { gradients_->end_ready(callback_); }

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
