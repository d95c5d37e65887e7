/// \file
/// SGD in one pass: what `torch::optim::SGD` is for dense gradients, with the rest of a
/// mixed-precision step (unscale, clip, skip, clear) done while its memory is read and written
/// once.
#pragma once

#include <mezzo/detail/optim/archive_keys.h>
#include <mezzo/detail/optim/elementwise_optimizer.h>
#include <mezzo/detail/optim/param_state.h>
#include <mezzo/detail/optim/sgd_traits.h>
#include <mezzo/optim/fused_optimizer.h>
#include <mezzo/optim/weight_storage.h>
#include <mezzo/version.h>

#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

/// Those of `torch::optim::SGDOptions`, with its names, defaults and keys in an archive.
struct SGDOptions : public FusedOptions<SGDOptions> {
  SGDOptions(double lr) : lr_(lr) {}  // NOLINT(google-explicit-constructor)

  TORCH_ARG(double, lr);
  /// How much of the running sum of gradients a step keeps; at least 0.
  TORCH_ARG(double, momentum) = 0;
  /// How much of a gradient is kept out of that sum, but for the first, with which it begins; 0
  /// for nesterov, and where ATen's kernels step.
  TORCH_ARG(double, dampening) = 0;
  /// weight_decay * parameter is added to the gradient.
  TORCH_ARG(double, weight_decay) = 0;
  /// Step along the gradient as it would be after the momentum's step (Sutskever et al., 2013).
  TORCH_ARG(bool, nesterov) = false;

 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    lr_ = detail::read_key<double>(archive, "lr");
    momentum_ = detail::read_key<double>(archive, "momentum");
    dampening_ = detail::read_key<double>(archive, "dampening");
    weight_decay_ = detail::read_key<double>(archive, "weight_decay");
    nesterov_ = detail::read_key<bool>(archive, "nesterov");
    read_extras(archive);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("lr", c10::IValue(lr_));
    archive.write("momentum", c10::IValue(momentum_));
    archive.write("dampening", c10::IValue(dampening_));
    archive.write("weight_decay", c10::IValue(weight_decay_));
    archive.write("nesterov", c10::IValue(nesterov_));
    write_extras(archive);
  }
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { this->lr(lr); }
};

/// What SGD with momentum remembers about a parameter (without it, only what weight_storage and
/// ema_decay ask for): `momentum_buffer()`, of the parameter's shape and dtype, and `step()`, how
/// many steps were applied, from the one on that began the buffer. libtorch's does not count them;
/// it waits for the device, if that is not the CPU.
struct SGDParamState : public detail::ParamState<SGDParamState> {
  TORCH_ARG(at::Tensor, momentum_buffer);

 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    detail::read_tensor_if_there(archive, "momentum_buffer", momentum_buffer_);
    // libtorch's has no count, and a buffer from the first step on: whether there was a step is all
    // that matters.
    c10::IValue count;
    const bool is_counted = archive.try_read("step", count);
    step(is_counted ? count.toInt() : momentum_buffer_.defined() ? 1 : 0);
    read_kept(archive);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("step", c10::IValue(step()));
    detail::write_tensor_if_defined(archive, "momentum_buffer", momentum_buffer_);
    write_kept(archive);
  }
};

/// Gradient descent with momentum, dampening, weight decay and Nesterov's look ahead: the answers
/// of `torch::optim::SGD` within rounding, from one pass over gradient, parameter and buffer. All
/// that AdamW's page (mezzo/optim/adamw.h) says of dtypes, layouts, groups, files, devices and
/// threads holds here. Sparse gradients are torch::optim::SGD's.
class SGD : public detail::ElementwiseOptimizer<detail::SgdTraits<SGDOptions, SGDParamState>> {
 public:
  ///     SGD(const std::vector<torch::optim::OptimizerParamGroup>& groups, const SGDOptions&)
  ///     SGD(std::vector<at::Tensor> parameters, const SGDOptions&)
  ///     SGD(GradBuckets& buckets, const SGDOptions&)
  ///
  /// On the parameters of `buckets`: GradScaler's check takes what they have read during backward,
  /// parameters of groups that are added later join them, and gradients of several ranks are
  /// divided by the ranks as they are read (distributed/data_parallel.h).
  /// \throws c10::Error unless lr, momentum and weight_decay are at least 0, and, for nesterov,
  ///   momentum is positive and dampening 0; or where a parameter is given twice or two share
  ///   memory
  using ElementwiseOptimizer::ElementwiseOptimizer;
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifdef MEZZO_COMPILED
#include <mezzo/compiled.h>  // IWYU pragma: keep
#endif
