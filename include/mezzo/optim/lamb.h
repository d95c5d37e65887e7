/// \file
/// LAMB, for batches of thousands: Adam's steps, each parameter's as long as the parameter is, with
/// the rest of a mixed-precision step (unscale, clip, skip, clear) done on the way.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/archive_keys.h>
#include <mezzo/optim/detail/elementwise_optimizer.h>
#include <mezzo/optim/detail/lamb_traits.h>
#include <mezzo/optim/detail/param_state.h>
#include <mezzo/optim/fused_optimizer.h>
#include <mezzo/optim/fused_options.h>

#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <tuple>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

/// Those of Apex's FusedLAMB with its defaults, but for the clipping, which is the step's affair:
/// Apex's default is `scaler.step(optimizer, {.max_norm = 1.0})`; none is ours.
struct LAMBOptions : public FusedOptions<LAMBOptions> {
  using betas_t = std::tuple<double, double>;

  LAMBOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT(google-explicit-constructor)

  /// A parameter's step is as long as lr times the parameter itself.
  TORCH_ARG(double, lr) = 1e-3;
  /// How much of the running means of gradients and of their squares a step keeps; in [0, 1).
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  /// Added to the root of the mean square; at least 0.
  TORCH_ARG(double, eps) = 1e-6;
  /// What of the parameter joins the direction of its step, before that is given its length.
  TORCH_ARG(double, weight_decay) = 0.01;
  /// Divide the running means by what they lack in early steps.
  TORCH_ARG(bool, bias_correction) = true;
  /// Groups without weight decay (biases, norms) take Adam's steps of lr, unless this is set: then
  /// their lengths follow the parameters' too. Apex's use_nvlamb.
  TORCH_ARG(bool, always_adapt) = false;

 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    lr_ = detail::read_key<double>(archive, "lr");
    betas_ = detail::read_key<betas_t>(archive, "betas");
    eps_ = detail::read_key<double>(archive, "eps");
    weight_decay_ = detail::read_key<double>(archive, "weight_decay");
    bias_correction_ = detail::read_key<bool>(archive, "bias_correction");
    always_adapt_ = detail::read_key<bool>(archive, "always_adapt");
    read_extras(archive);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("lr", c10::IValue(lr_));
    archive.write("betas", c10::IValue(betas_));
    archive.write("eps", c10::IValue(eps_));
    archive.write("weight_decay", c10::IValue(weight_decay_));
    archive.write("bias_correction", c10::IValue(bias_correction_));
    archive.write("always_adapt", c10::IValue(always_adapt_));
    write_extras(archive);
  }
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { this->lr(lr); }
  bool operator==(const LAMBOptions&) const = default;
};

/// What LAMB remembers about a parameter: `exp_avg()` and `exp_avg_sq()`, of its shape and dtype,
/// and `step()`, how many steps were applied, which waits for the device, if that is not the CPU.
struct LAMBParamState : public detail::ParamState<LAMBParamState, detail::CountedState<>> {
  TORCH_ARG(at::Tensor, exp_avg);
  TORCH_ARG(at::Tensor, exp_avg_sq);

 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    step(detail::read_key<int64_t>(archive, "step"));
    detail::read_tensor_if_there(archive, "exp_avg", exp_avg_);
    detail::read_tensor_if_there(archive, "exp_avg_sq", exp_avg_sq_);
    read_kept(archive);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("step", c10::IValue(step()));
    detail::write_tensor_if_defined(archive, "exp_avg", exp_avg_);
    detail::write_tensor_if_defined(archive, "exp_avg_sq", exp_avg_sq_);
    write_kept(archive);
  }
};

/// LAMB (You et al., "Large batch optimization for deep learning: training BERT in 76 minutes",
/// 2020), as Apex's FusedLAMB has it. With AdamW's moments m and v, corrected for early steps, a
/// parameter p, which is one tensor, takes the step
///
///   update = m / (sqrt(v) + eps) + weight_decay * p,    p -= lr * (||p|| / ||update||) * update
///
/// where the ratio of 2-norms, the trust ratio, is 1 if either norm is 0, and in groups without
/// weight decay (LAMBOptions::always_adapt). So a NaN in a gradient makes all of its parameter NaN,
/// unless a GradScaler skips the step.
///
/// The ratio wants all of a parameter before any of it may move: two passes, the second of which
/// computes the update again in place of keeping it. 40 bytes a parameter to AdamW's 28; parameters
/// of up to 16,384 elements are done in one on the CPU. Norms are sums in double in an order that
/// is fixed: the same bits whatever the number of threads and the CPU.
///
/// libtorch has none, so files are mezzo's own; on CUDA it needs the target mezzo::cuda, for ATen
/// has no kernel of it, and two launches more than AdamW. All else that AdamW's page
/// (mezzo/optim/adamw.h) says holds here.
class LAMB : public detail::ElementwiseOptimizer<detail::LambTraits<LAMBOptions, LAMBParamState>> {
 public:
  ///     LAMB(const std::vector<torch::optim::OptimizerParamGroup>& groups, const LAMBOptions&)
  ///     LAMB(std::vector<at::Tensor> parameters, const LAMBOptions&)
  ///     LAMB(GradBuckets& buckets, const LAMBOptions&)
  ///
  /// The options have defaults. On the parameters of `buckets`: GradScaler's check takes what they
  /// have read during backward, parameters of groups that are added later join them, and gradients
  /// of several ranks are divided by the ranks as they are read (distributed/data_parallel.h).
  /// \throws c10::Error unless lr, eps and weight_decay are at least 0 and the betas in [0, 1), or
  ///   where a parameter is given twice or two share memory
  using ElementwiseOptimizer::ElementwiseOptimizer;
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifdef MEZZO_COMPILED
#include <mezzo/optim/compiled.h>  // IWYU pragma: keep
#endif
