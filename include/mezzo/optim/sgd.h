/// \file
/// SGD in one pass: what `torch::optim::SGD` is for dense gradients, with the rest of a
/// mixed-precision step (unscale, clip, skip, clear) done while its memory is read and written
/// once.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/archive_keys.h>
#include <mezzo/optim/detail/elementwise_optimizer.h>
#include <mezzo/optim/detail/libtorch_options.h>
#include <mezzo/optim/detail/param_state.h>
#include <mezzo/optim/detail/sgd_traits.h>
#include <mezzo/optim/fused_optimizer.h>

#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

/// `torch::optim::SGDOptions`, with its names, defaults and keys in an archive, and what
/// FusedOptions adds; setters return SGDOptions, and can be chained in any order.
///
/// - `lr`: at least 0.
/// - `momentum` (0): how much of the running sum of gradients a step keeps; at least 0.
/// - `dampening` (0): how much of a gradient is kept out of that sum, but for the first, with which
///   it begins; 0 for nesterov, and where ATen's kernels step.
/// - `weight_decay` (0): weight_decay * parameter is added to the gradient.
/// - `nesterov` (false): step along the gradient as it would be after the momentum's step
///   (Sutskever et al., 2013).
struct SGDOptions : public detail::SgdOptionsOn<SGDOptions, torch::optim::SGDOptions> {
  SGDOptions(double lr)  // NOLINT(google-explicit-constructor)
      : SGDOptions(torch::optim::SGDOptions(lr)) {}
  SGDOptions(const torch::optim::SGDOptions& options)  // NOLINT(google-explicit-constructor)
      : SgdOptionsOn(options) {}
};

/// What SGD with momentum remembers about a parameter (without it, only what weight_storage and
/// ema_decay ask for): `torch::optim::SGDParamState`, with `momentum_buffer()`, of the parameter's
/// shape and dtype, and beyond libtorch's `step()`, how many steps were applied, from the one on
/// that began the buffer; it waits for the device, if that is not the CPU. What is written to the
/// buffer, through libtorch's type too, counts from the next step on.
struct SGDParamState
    : public detail::ParamState<SGDParamState, detail::CountedState<torch::optim::SGDParamState>> {
  using LibtorchState = torch::optim::SGDParamState;

  SGDParamState() = default;
  explicit SGDParamState(const torch::optim::SGDParamState& state) {
    momentum_buffer(state.momentum_buffer());
    step(applied_at_least());
  }

  void serialize(torch::serialize::InputArchive& archive) override {
    detail::read_tensor_if_there(archive, "momentum_buffer", momentum_buffer());
    c10::IValue count;
    step(archive.try_read("step", count) ? count.toInt() : applied_at_least());
    read_kept(archive);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("step", c10::IValue(step()));
    detail::write_tensor_if_defined(archive, "momentum_buffer", momentum_buffer());
    write_kept(archive);
  }

 private:
  /// libtorch's state has no count, and a buffer from the first step on: whether there was a step
  /// is all that matters.
  int64_t applied_at_least() const { return momentum_buffer().defined() ? 1 : 0; }
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
#include <mezzo/optim/compiled.h>  // IWYU pragma: keep
#endif
