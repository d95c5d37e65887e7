/// \file
/// LAMB, for large batches, of ATen ops.
#pragma once

#include <mezzo/base/detail/tensor_groups.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/serializable_options.h>
#include <mezzo/optim/detail/torch_optimizer_base.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/arg.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>

#include <array>
#include <cmath>
#include <tuple>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

/// Options of Apex's FusedLAMB, with its defaults. Clipping, which Apex enables by default, is an
/// option of the step: `scaler.step(optimizer, {.max_norm = 1.0})`.
struct LAMBOptions : public detail::SerializableOptions<LAMBOptions> {
  /// The names of the options in archives.
  static constexpr std::array kKeys{"lr",           "betas",           "eps",
                                    "weight_decay", "bias_correction", "use_nvlamb"};
  /// The type of `betas`.
  using betas_t = std::tuple<double, double>;
  /// Sets `lr`.
  LAMBOptions(double lr = 1e-3) : lr_(lr) {}

  /// Learning rate: the 2-norm of a parameter's update is lr times the 2-norm of the parameter.
  TORCH_ARG(double, lr);
  /// Coefficients of the running means of the gradient and its square; in [0, 1).
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  /// Added to the denominator; at least 0.
  TORCH_ARG(double, eps) = 1e-6;
  /// Adds weight_decay * parameter to the update, before the trust ratio.
  TORCH_ARG(double, weight_decay) = 0.01;
  /// Corrects the bias of the running means, as Adam.
  TORCH_ARG(bool, bias_correction) = true;
  /// Applies the trust ratio also to groups without weight decay (biases, norms), which otherwise
  /// get Adam's update.
  TORCH_ARG(bool, use_nvlamb) = false;

 public:
  /// Returns std::tie of the options.
  static auto values(auto& self) {
    return std::tie(self.lr_, self.betas_, self.eps_, self.weight_decay_, self.bias_correction_,
                    self.use_nvlamb_);
  }
};

/// Per-parameter state of LAMB: `step`, `exp_avg` and `exp_avg_sq`.
using LAMBParamState = torch::optim::AdamWParamState;

/// LAMB (You et al., "Large batch optimization for deep learning: training BERT in 76 minutes",
/// 2020), as Apex's FusedLAMB. With AdamW's bias-corrected moments m and v, a parameter tensor p is
/// updated by
///
///   update = m / (sqrt(v) + eps) + weight_decay * p,    p -= lr * (||p|| / ||update||) * update
///
/// The ratio of 2-norms, the trust ratio, is 1 if either norm is 0, and in groups without weight
/// decay (see LAMBOptions::use_nvlamb). A NaN in a gradient therefore makes its whole parameter
/// NaN, unless a GradScaler skips the step.
///
/// A `torch::optim::Optimizer` of ATen's `_foreach` ops, for any device. As with torch's optimizers
/// a GradScaler synchronizes once with a GPU; the step itself does not. Wrap LAMB in a
/// MasterWeights for float32 masters of 16-bit parameters. torch has no LAMB: archives are mezzo's.
class LAMB : public detail::TorchOptimizerBase<LAMB, LAMBOptions, LAMBParamState> {
 public:
  /// Constructs from param groups or parameters, and LAMBOptions, which have defaults.
  /// \throws c10::Error unless lr, eps and weight_decay are at least 0 and the betas in [0, 1), or
  ///   if there is no parameter, a parameter appears twice, or two share memory
  using TorchOptimizerBase::TorchOptimizerBase;

 private:
  friend TorchOptimizerBase;
  static constexpr const char* kName = "LAMB";
  static constexpr const char* kOptionsName = "mezzo::optim::LAMBOptions";
  static void check_options(const LAMBOptions& options) {
    detail::check_hyperparams(
        kName,
        {{"lr", options.lr()}, {"eps", options.eps()}, {"weight_decay", options.weight_decay()}},
        options.betas());
  }
  inline void update();
};

inline void LAMB::update() {
  struct TensorGroup {
    std::vector<at::Tensor> parameters, grads, exp_avgs, exp_avg_sqs;
    std::vector<at::Scalar> bias_corrections1, bias_correction2_sqrts;
  };
  for (const auto& group : param_groups_) {
    const auto& options = static_cast<const LAMBOptions&>(group.options());
    const auto [beta1, beta2] = options.betas();
    detail::TensorGroups<TensorGroup> tensor_groups;
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      LAMBParamState& state = get_or_create_state(parameter);
      if (!state.exp_avg().defined()) {
        state.exp_avg(at::zeros_like(parameter)).exp_avg_sq(at::zeros_like(parameter));
      } else if (state.exp_avg().scalar_type() != parameter.scalar_type()) {
        state.exp_avg(state.exp_avg().to(parameter.scalar_type()));
        state.exp_avg_sq(state.exp_avg_sq().to(parameter.scalar_type()));
      }
      state.step(state.step() + 1);
      const auto step = static_cast<double>(options.bias_correction() ? state.step() : 0);
      const auto bias_correction = [step](double beta) {
        return step == 0 ? 1.0 : 1 - std::pow(beta, step);
      };
      TensorGroup& tensors = tensor_groups.get(parameter);
      tensors.parameters.push_back(parameter);
      tensors.grads.push_back(parameter.grad().to(parameter.scalar_type()));
      tensors.exp_avgs.push_back(state.exp_avg());
      tensors.exp_avg_sqs.push_back(state.exp_avg_sq());
      tensors.bias_corrections1.emplace_back(bias_correction(beta1));
      tensors.bias_correction2_sqrts.emplace_back(std::sqrt(bias_correction(beta2)));
    }
    for (const auto& [device, dtype, tensors] : tensor_groups) {
      at::_foreach_mul_(tensors.exp_avgs, beta1);
      at::_foreach_add_(tensors.exp_avgs, tensors.grads, 1 - beta1);
      at::_foreach_mul_(tensors.exp_avg_sqs, beta2);
      at::_foreach_addcmul_(tensors.exp_avg_sqs, tensors.grads, tensors.grads, 1 - beta2);
      std::vector<at::Tensor> denoms = at::_foreach_sqrt(tensors.exp_avg_sqs);
      at::_foreach_div_(denoms, tensors.bias_correction2_sqrts);
      at::_foreach_add_(denoms, options.eps());
      at::_foreach_mul_(denoms, tensors.bias_corrections1);
      const std::vector<at::Tensor> updates = at::_foreach_div(tensors.exp_avgs, denoms);
      if (options.weight_decay() != 0) {
        at::_foreach_add_(updates, tensors.parameters, options.weight_decay());
      }
      if (options.weight_decay() != 0 || options.use_nvlamb()) {
        const auto accum_dtype = tensors.parameters.front().is_mps() ? at::kFloat : at::kDouble;
        const at::Tensor param_norms =
            at::stack(at::_foreach_norm(tensors.parameters, 2, accum_dtype));
        const at::Tensor update_norms = at::stack(at::_foreach_norm(updates, 2, accum_dtype));
        const at::Tensor trust_ratios =
            at::where((param_norms == 0).logical_or(update_norms == 0), at::ones_like(param_norms),
                      param_norms / update_norms);
        at::_foreach_mul_(updates, trust_ratios.unbind());
      }
      at::_foreach_add_(tensors.parameters, updates, -options.lr());
    }
  }
}

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
