/// \file
/// SyncBatchNorm: batch normalization over the batches of all ranks.
#pragma once

#include <mezzo/autocast/autocast_autograd_function.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collectives.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <algorithm>
#include <cstdint>
#include <iomanip>
#include <ostream>
#include <sstream>
#include <tuple>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

namespace detail {

/// Per-channel statistics over the batches of all ranks, in the accumulation dtype.
struct ChannelStatistics {
  at::Tensor mean, variance;  ///< [C]; biased variance
  at::Tensor count;           ///< [1]: number of values per channel
};

/// Returns all dimensions except the channel dimension.
inline std::vector<int64_t> reduction_dims(const at::Tensor& input) {
  std::vector<int64_t> dims{0};
  for (int64_t dim = 2; dim < input.dim(); ++dim) dims.push_back(dim);
  return dims;
}

/// Views [C] such that it broadcasts over [N, C, ...].
inline at::Tensor expand_per_channel(const at::Tensor& per_channel, const at::Tensor& input) {
  std::vector<int64_t> shape(static_cast<std::size_t>(input.dim()), 1);
  shape[1] = -1;
  return per_channel.view(shape);
}

inline ChannelStatistics gather_channel_statistics(const at::Tensor& wide_input,
                                                   const BackendPtr& backend) {
  const int64_t channels = wide_input.size(1);
  const int64_t local_count = wide_input.numel() / std::max<int64_t>(channels, 1);
  at::Tensor variance = at::zeros({channels}, wide_input.options());
  at::Tensor mean = variance;
  if (local_count > 0) {
    std::tie(variance, mean) =
        at::var_mean(wide_input, reduction_dims(wide_input), /*correction=*/0);
  }
  const at::Tensor local = at::cat(
      {mean, variance, at::full({1}, static_cast<double>(local_count), wide_input.options())});
  const at::Tensor all = at::empty({backend->getSize(), local.numel()}, local.options());
  all_gather(backend, all, local);
  const at::Tensor means = all.narrow(1, 0, channels);
  const at::Tensor variances = all.narrow(1, channels, channels);
  const at::Tensor counts = all.narrow(1, 2 * channels, 1);
  const at::Tensor total = counts.sum(0);
  const bool has_enough_values =
      backend->getSize() == 1 ? local_count > 1 : !total.is_cpu() || total.item<double>() > 1.;
  TORCH_CHECK(
      has_enough_values,
      "SyncBatchNorm: Expected more than 1 value per channel when training, got input size ",
      wide_input.sizes(),
      ". In C++: pass more than one value per channel over all ranks together, or call eval()");
  const at::Tensor global_mean = means.mul(counts).sum(0).div(total);
  const at::Tensor weighted_squares = variances.add(means.sub(global_mean).square()).mul(counts);
  return {global_mean, weighted_squares.sum(0).div(total), total};
}

/// Computes (x - mean) / sqrt(variance + eps) * weight + bias with the statistics of all ranks.
/// Also returns mean, variance and count, without gradient.
struct SyncBatchNormFunction : torch::autograd::Function<SyncBatchNormFunction> {
  using Context = torch::autograd::AutogradContext;

  static torch::autograd::variable_list forward(Context* context, const at::Tensor& input,
                                                const at::Tensor& weight, const at::Tensor& bias,
                                                double eps, const BackendPtr& backend) {
    const AutocastDisabledGuard autocast_off;
    const at::Tensor wide = input.to(accum_dtype(input));
    const ChannelStatistics statistics = gather_channel_statistics(wide, backend);
    const at::Tensor inverse = statistics.variance.add(eps).rsqrt();
    at::Tensor output = wide.sub(expand_per_channel(statistics.mean, input));
    output.mul_(expand_per_channel(inverse.mul(weight), input));
    output.add_(expand_per_channel(bias, input));
    context->save_for_backward({input, weight, statistics.mean, inverse, statistics.count});
    context->saved_data["backend"] = at::IValue::make_capsule(backend);
    context->mark_non_differentiable({statistics.mean, statistics.variance, statistics.count});
    return {output.to(input.scalar_type()), statistics.mean, statistics.variance, statistics.count};
  }

  static torch::autograd::variable_list backward(Context* context,
                                                 torch::autograd::variable_list gradients) {
    TORCH_CHECK(
        !c10::GradMode::is_enabled(),
        "SyncBatchNorm does not support double backward: call backward without create_graph");
    const AutocastDisabledGuard autocast_off;
    const auto saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1], &mean = saved[2], &inverse = saved[3];
    const auto dims = reduction_dims(input);
    const at::Tensor gradient = gradients[0].to(mean.scalar_type());
    const at::Tensor normalized = input.to(mean.scalar_type())
                                      .sub(expand_per_channel(mean, input))
                                      .mul_(expand_per_channel(inverse, input));
    const at::Tensor grad_sum = gradient.sum(dims);
    const at::Tensor grad_dot = gradient.mul(normalized).sum(dims);

    torch::autograd::variable_list results(5);  // autograd casts them to the inputs' dtypes
    if (context->needs_input_grad(0)) {
      const at::Tensor sums = at::cat({grad_sum, grad_dot});
      const auto backend = c10::static_intrusive_pointer_cast<c10d::Backend>(
          context->saved_data["backend"].toCapsule());
      detail::all_reduce(backend, sums)->wait();
      sums.div_(saved[4]);
      const at::Tensor mean_grad = sums.narrow(0, 0, input.size(1));
      const at::Tensor mean_grad_dot = sums.narrow(0, input.size(1), input.size(1));
      at::Tensor result = gradient.sub(expand_per_channel(mean_grad, input));
      result.sub_(normalized.mul(expand_per_channel(mean_grad_dot, input)));
      result.mul_(expand_per_channel(inverse.mul(weight), input));
      results[0] = result;
    }
    if (context->needs_input_grad(1)) results[1] = grad_dot;
    if (context->needs_input_grad(2)) results[2] = grad_sum;
    return results;
  }
};

}  // namespace detail

/// Batch normalization as torch::nn::BatchNorm1d, 2d and 3d, with mean and variance over the
/// batches of all ranks in training, as torch.nn.SyncBatchNorm.
///
/// \code
///   struct NetImpl : torch::nn::Module {
///     explicit NetImpl(const c10::intrusive_ptr<c10d::Backend>& backend)
///         : norm(torch::nn::BatchNormOptions(64), backend) { register_module("norm", norm); }
///     mezzo::SyncBatchNorm norm;
///   };
/// \endcode
///
/// Options, parameters and buffers are BatchNorm's; state dicts are interchangeable. Input: [N, C]
/// or [N, C, ...] of a floating-point dtype, with C = num_features. N and the dimensions after C
/// may differ between ranks; N may be 0 on some. The output has the input's dtype.
///
/// Statistics are in float32 (float64 for float64), also under autocast. Forward calls one
/// all-gather of 2 C + 1 elements, backward one all-reduce of 2 C. The ranks' statistics are
/// combined in rank order (Chan, Golub and LeVeque, 1979), so that all ranks get bitwise identical
/// results. In evaluation with running statistics no collective is called.
///
/// All ranks must call the same SyncBatchNorms in the same order, with a backend that nothing else
/// uses: backward runs between all-reduces of gradient buckets, whose order may differ. Does not
/// synchronize with the host on a GPU, except in forward with `momentum(std::nullopt)`, as torch.
/// \throws c10::Error for an unsupported shape, dtype or device; on all ranks in training on the
///   CPU if they have fewer than two values per channel together; in backward with `create_graph`
class SyncBatchNormImpl
    : public torch::nn::NormImplBase<0, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  /// Collective call of the ranks of `backend`, which share statistics.
  /// \throws c10::Error on all ranks, naming the first rank that differs, if options differ
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& norm_options,
                    c10::intrusive_ptr<c10d::Backend> backend)
      : NormImplBase(norm_options),
        backend_(detail::check_backend(std::move(backend), "SyncBatchNorm")) {
    std::ostringstream description;
    SyncBatchNormImpl::pretty_print(description << std::setprecision(12));
    detail::check_equal_on_all_ranks(backend_, "SyncBatchNorm", description.str(),
                                     "pass the same options on all ranks");
  }

  /// Returns the normalized input. Collective call in training.
  at::Tensor forward(const at::Tensor& input) {
    _check_input_dim(input);
    if (is_training() || !options.track_running_stats()) return normalize(input);
    return at::batch_norm(input, weight, bias, running_mean, running_var, /*training=*/false,
                          /*momentum=*/0.0, options.eps(), /*cudnn_enabled=*/true);
  }

  /// Prints the class name and options.
  void pretty_print(std::ostream& stream) const override {
    stream << std::boolalpha << "mezzo::SyncBatchNorm(" << options.num_features()
           << ", eps=" << options.eps() << ", momentum=";
    if (options.momentum().has_value()) {
      stream << *options.momentum();
    } else {
      stream << "None";
    }
    stream << ", affine=" << options.affine()
           << ", track_running_stats=" << options.track_running_stats() << ')';
  }

 protected:
  /// \throws c10::Error for an unsupported input
  void _check_input_dim(const at::Tensor& input) override {
    TORCH_CHECK(input.dim() >= 2, "SyncBatchNorm on rank ", backend_->getRank(),
                ": `input` must be [N, C] or [N, C, ...], but has ", input.dim(),
                " dimensions; add a batch dimension");
    TORCH_CHECK(input.size(1) == options.num_features(), "SyncBatchNorm on rank ",
                backend_->getRank(), ": `input` has ", input.size(1),
                " channels, and num_features is ", options.num_features(),
                "; construct it with the number of channels");
    TORCH_CHECK(input.is_floating_point(), "SyncBatchNorm on rank ", backend_->getRank(),
                ": `input` is ", input.scalar_type(), "; it must have a floating-point dtype");
  }

 private:
  at::Tensor normalize(const at::Tensor& input) {
    const bool affine = options.affine();
    const auto results = detail::SyncBatchNormFunction::apply(
        input, affine ? weight : at::ones({input.size(1)}, input.options()),
        affine ? bias : at::zeros({input.size(1)}, input.options()), options.eps(), backend_);
    if (is_training() && options.track_running_stats()) {
      const c10::NoGradGuard no_grad;
      const at::Tensor &mean = results[1], &variance = results[2], &count = results[3];
      num_batches_tracked.add_(1);
      const double momentum =
          options.momentum() ? *options.momentum() : 1.0 / num_batches_tracked.item<double>();
      const at::Tensor unbiased = variance.mul(count.div(count.sub(1).clamp_min_(1)));
      running_mean.lerp_(mean.to(running_mean.scalar_type()), momentum);
      running_var.lerp_(unbiased.to(running_var.scalar_type()), momentum);
    }
    return results[0];
  }

  c10::intrusive_ptr<c10d::Backend> backend_;
};
/// Module holder of SyncBatchNormImpl.
TORCH_MODULE(SyncBatchNorm);

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
