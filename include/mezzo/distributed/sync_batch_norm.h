/// \file
/// Batch normalisation over the batches of all ranks.
#pragma once

#include <mezzo/autocast/detail/libtorch_state.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/ranks.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/var_mean.h>
#include <c10/core/GradMode.h>
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

/// Normalises as `torch::nn::BatchNorm1d`, 2d and 3d do, in training with mean and variance of the
/// batches of all ranks together, as `torch.nn.SyncBatchNorm`: for parts of a batch that are too
/// small for a variance of their own.
///
/// \code
///   struct NetImpl : torch::nn::Module {
///     explicit NetImpl(const c10::intrusive_ptr<c10d::Backend>& statistics)
///         : norm(torch::nn::BatchNormOptions(64), statistics) { register_module("norm", norm); }
///     mezzo::SyncBatchNorm norm;
///   };
/// \endcode
///
/// Options, parameters and buffers are BatchNorm's, with its names, so that state dicts can be
/// exchanged. The input is [N, C] or [N, C, ...], of a floating dtype, with C `num_features`. N and
/// the dimensions after C may differ between ranks, and N may be 0 on some. The output has the
/// input's dtype.
///
/// Statistics are in float (double for double), under autocast too. Forward makes one all-gather of
/// 2 C + 1 numbers a rank, backward one all-reduce of all of these. The ranks' means and variances
/// are combined as by Chan, Golub and LeVeque (1979), in the order of the ranks, so that all ranks
/// get the same bits. In evaluation, with running statistics, no collective is called.
///
/// All ranks run the same SyncBatchNorms in the same order, with the same options, in a group that
/// nothing else uses: backward calls the group between buckets of gradients, which ranks may fill
/// in different orders. On a GPU the host does not wait, except in forward with
/// `momentum(std::nullopt)`, as in torch.
/// \throws c10::Error for an input of another shape or device; in training on the CPU, on all ranks,
///   if they have fewer than two values for a channel together; in backward with `create_graph`
class SyncBatchNormImpl
    : public torch::nn::NormImplBase<0, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  /// `group` has the ranks whose batches are normalised together. All ranks call it together, and
  /// compare their options. \throws c10::Error, on all ranks, naming the first one that differs
  inline SyncBatchNormImpl(const torch::nn::BatchNormOptions& norm_options,
                           c10::intrusive_ptr<c10d::Backend> group);

  /// Returns the normalised input. All ranks of the group call it together.
  at::Tensor forward(const at::Tensor& input);

  /// Writes the class's name and its options.
  // Declared inline, or every unit would hold the class's vtable.
  inline void pretty_print(std::ostream& stream) const override;

 protected:
  /// Throws c10::Error for an input that cannot be normalised.
  inline void _check_input_dim(const at::Tensor& input) override;

 private:
  c10::intrusive_ptr<c10d::Backend> group_;
};
/// The holder of a SyncBatchNormImpl.
TORCH_MODULE(SyncBatchNorm);

namespace detail {

/// The ranks' rows as one matrix. Its gradient is summed over the ranks, and each takes its row.
struct GatheredRows : torch::autograd::Function<GatheredRows> {
  using Context = torch::autograd::AutogradContext;

  static at::Tensor forward(Context* context, const at::Tensor& row, GroupPtr group) {
    const at::Tensor rows = at::empty({group->getSize(), row.numel()}, row.options());
    all_gather(group, rows, row);
    context->saved_data["group"] = at::IValue::make_capsule(group);
    return rows.clone();  // the collective's work keeps `rows`, and must not keep the group
  }

  static torch::autograd::variable_list backward(Context* context,
                                                 torch::autograd::variable_list gradients) {
    TORCH_CHECK(
        !c10::GradMode::is_enabled(),
        "SyncBatchNorm has no gradient of its gradient: call backward without create_graph");
    const auto group =
        c10::static_intrusive_pointer_cast<c10d::Backend>(context->saved_data["group"].toCapsule());
    const at::Tensor sums = gradients[0].clone(at::MemoryFormat::Contiguous);
    all_reduce(group, sums)->wait();
    return {sums[group->getRank()], at::Tensor()};
  }
};

}  // namespace detail

inline SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& norm_options,
                                            c10::intrusive_ptr<c10d::Backend> group)
    : NormImplBase(norm_options), group_(detail::checked(std::move(group), "SyncBatchNorm")) {
  std::ostringstream words;
  SyncBatchNormImpl::pretty_print(words << std::setprecision(12));
  detail::check_alike(group_, "SyncBatchNorm", words.str(), "give all ranks the same options");
}

inline void SyncBatchNormImpl::_check_input_dim(const at::Tensor& input) {
  TORCH_CHECK(input.dim() >= 2, "SyncBatchNorm on rank ", group_->getRank(),
              ": `input` must be [N, C] or [N, C, ...], but has ", input.dim(),
              " dimensions; give it a batch dimension");
  TORCH_CHECK(input.size(1) == options.num_features(), "SyncBatchNorm on rank ", group_->getRank(),
              ": `input` has ", input.size(1), " channels, and num_features is ",
              options.num_features(), "; make it with the number of channels");
  TORCH_CHECK(input.is_floating_point(), "SyncBatchNorm on rank ", group_->getRank(),
              ": `input` is ", input.scalar_type(), "; it must be of a floating dtype");
}

inline at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  _check_input_dim(input);
  if (!is_training() && options.track_running_stats()) {
    return at::batch_norm(input, weight, bias, running_mean, running_var, /*training=*/false,
                          /*momentum=*/0.0, options.eps(), /*cudnn_enabled=*/true);
  }
  const detail::AutocastOff autocast_off;
  const at::Tensor wide = input.to(detail::wide_dtype(input));
  const int64_t channels = wide.size(1), count = wide.numel() / std::max<int64_t>(channels, 1);
  std::vector<int64_t> within{0}, of_channel(static_cast<std::size_t>(wide.dim()), 1);
  for (int64_t dim = 2; dim < wide.dim(); ++dim) within.push_back(dim);
  of_channel[1] = -1;  // a shape that broadcasts over [N, C, ...]

  at::Tensor variance = wide.sum(within), mean = variance;  // 0 of no values, with their graph
  if (count > 0) std::tie(variance, mean) = at::var_mean(wide, within, /*correction=*/0);
  const at::Tensor own =
      at::cat({mean, variance, at::full({1}, static_cast<double>(count), wide.options())});
  const at::Tensor all = detail::GatheredRows::apply(own, group_);
  const at::Tensor means = all.narrow(1, 0, channels);
  const at::Tensor counts = all.narrow(1, 2 * channels, 1).detach();
  const at::Tensor total = counts.sum(0);
  const bool is_enough =
      group_->getSize() == 1 ? count > 1 : !total.is_cpu() || total.item<double>() > 1.;
  TORCH_CHECK(
      is_enough,
      "SyncBatchNorm: Expected more than 1 value per channel when training, got input size ",
      input.sizes(),
      ". In C++: give all ranks together more than one value per channel, or call eval()");
  mean = means.mul(counts).sum(0).div(total);
  const at::Tensor squares = all.narrow(1, channels, channels).add(means.sub(mean).square());
  variance = squares.mul(counts).sum(0).div(total);

  at::Tensor scale = variance.add(options.eps()).rsqrt();
  if (options.affine()) scale = scale.mul(weight);
  at::Tensor output = wide.sub(mean.view(of_channel)).mul(scale.view(of_channel));
  if (options.affine()) output = output.add(bias.to(wide.scalar_type()).view(of_channel));
  if (is_training() && options.track_running_stats()) {
    const c10::NoGradGuard no_grad;
    num_batches_tracked.add_(1);
    const double momentum =
        options.momentum() ? *options.momentum() : 1.0 / num_batches_tracked.item<double>();
    const at::Tensor unbiased = variance.mul(total.div(total.sub(1).clamp_min_(1)));
    running_mean.lerp_(mean.to(running_mean.scalar_type()), momentum);
    running_var.lerp_(unbiased.to(running_var.scalar_type()), momentum);
  }
  return output.to(input.scalar_type());
}

inline void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
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

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
