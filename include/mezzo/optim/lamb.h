/// \file
/// LAMB, for batches of thousands: Adam's steps, each scaled by the norm of its parameter. An
/// ordinary optimizer of ATen's ops.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/ordinary_optimizer.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <tuple>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

/// The options of Apex's FusedLAMB, with its defaults. Clipping, which Apex has on by default, is
/// an option of the step: `scaler.step(optimizer, {.max_norm = 1.0})`.
struct LAMBOptions : public torch::optim::OptimizerCloneableOptions<LAMBOptions> {
  /// The type of `betas`.
  using betas_t = std::tuple<double, double>;

  /// A template, so that a unit that only sees the class compiles no virtual functions.
  template <std::convertible_to<double> Lr = double>
  LAMBOptions(Lr lr = 1e-3) : lr_(lr) {}

  /// The 2-norm of a parameter's step is lr times that of the parameter.
  TORCH_ARG(double, lr) = 1e-3;
  /// Shares of the running means of gradients and of their squares that a step keeps; in [0, 1).
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  /// Added to the root of the mean square; at least 0.
  TORCH_ARG(double, eps) = 1e-6;
  /// Adds weight_decay * parameter to the update before the trust ratio is applied.
  TORCH_ARG(double, weight_decay) = 0.01;
  /// Corrects the running means in early steps, as Adam does.
  TORCH_ARG(bool, bias_correction) = true;
  /// Applies the trust ratio also in groups without weight decay (biases, norms), which otherwise
  /// take Adam's steps. Apex's use_nvlamb.
  TORCH_ARG(bool, always_adapt) = false;

 public:
  /// Reads the options of a file.
  MEZZO_INLINE void serialize(torch::serialize::InputArchive& archive) override;
  /// Writes the options.
  MEZZO_INLINE void serialize(torch::serialize::OutputArchive& archive) const override;
  /// Returns the learning rate, as libtorch's schedulers read it.
  double get_lr() const override { return lr_; }
  /// Sets the learning rate, as libtorch's schedulers do.
  void set_lr(const double lr) override { lr_ = lr; }
  /// Compares every option.
  friend bool operator==(const LAMBOptions& left, const LAMBOptions& right) {
    const auto all = [](const LAMBOptions& own) {
      return std::tie(own.lr_, own.betas_, own.eps_, own.weight_decay_, own.bias_correction_,
                      own.always_adapt_);
    };
    return all(left) == all(right);
  }
};

/// LAMB's state of a parameter: its `step`, and the running means `exp_avg` and `exp_avg_sq`.
using LAMBParamState = torch::optim::AdamWParamState;

/// LAMB (You et al., "Large batch optimization for deep learning: training BERT in 76 minutes",
/// 2020), as Apex's FusedLAMB has it. With AdamW's moments m and v, corrected for early steps, a
/// parameter p, which is one tensor, takes the step
///
///   update = m / (sqrt(v) + eps) + weight_decay * p,    p -= lr * (||p|| / ||update||) * update
///
/// where the ratio of 2-norms, the trust ratio, is 1 if either norm is 0, and in groups without
/// weight decay (see LAMBOptions::always_adapt). A NaN in a gradient therefore makes all of its
/// parameter NaN, unless a GradScaler skips the step.
///
/// An ordinary `torch::optim::Optimizer` of ATen's `_foreach` ops, on any device: a GradScaler
/// waits once for a GPU, as for torch's optimizers, and the step itself never does. Weights of 16
/// bits are trained as they are; wrap LAMB in a MasterWeights to train them as floats. libtorch has
/// no LAMB: files are mezzo's own.
class LAMB : public detail::OrdinaryOptimizer<LAMB, LAMBOptions, LAMBParamState> {
 public:
  /// Takes param groups or parameters, and LAMBOptions, which have defaults.
  /// \throws c10::Error unless lr, eps and weight_decay are at least 0 and the betas in [0, 1), or
  ///   if there is no parameter, a parameter is given twice, or two share memory
  using OrdinaryOptimizer::OrdinaryOptimizer;

 private:
  friend OrdinaryOptimizer;
  static constexpr const char* kName = "LAMB";
  static constexpr const char* kOptions = "mezzo::optim::LAMBOptions";
  MEZZO_INLINE static void check_options(const LAMBOptions& options);
  MEZZO_INLINE void update();
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifndef MEZZO_LEFT_TO_LIBRARY
#include <mezzo/optim/detail/lamb_impl.h>  // IWYU pragma: export
#endif
