/// \file
/// LAMB, for batches of thousands: Adam's steps, each scaled by the norm of its parameter, together
/// with the rest of a mixed-precision step (unscale, clip, skip, zero the gradients).
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/cpu_isa.h>
#include <mezzo/kernels/lamb_element.h>
#include <mezzo/kernels/lamb_step_cpu.h>
#include <mezzo/optim/detail/member_table.h>
#include <mezzo/optim/detail/optimizer_shell.h>
#include <mezzo/optim/detail/param_slot.h>
#include <mezzo/optim/fused_optimizer.h>
#include <mezzo/optim/fused_options.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <tuple>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

/// The options of Apex's FusedLAMB, with its defaults. Clipping, which Apex has on by default, is
/// an option of the step: `scaler.step(optimizer, {.max_norm = 1.0})`.
struct LAMBOptions : public FusedOptions<LAMBOptions> {
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

  friend struct detail::MemberTable;
  /// The members, as files and comparisons list them.
  static auto members(auto& own) {
    return std::tuple{detail::member("lr", own.lr()),
                      detail::member("betas", own.betas()),
                      detail::member("eps", own.eps()),
                      detail::member("weight_decay", own.weight_decay()),
                      detail::member("bias_correction", own.bias_correction()),
                      detail::member("always_adapt", own.always_adapt())};
  }
};

/// LAMB's state of a parameter: `exp_avg()` and `exp_avg_sq()`, of the parameter's shape and dtype,
/// and `step()`, the number of applied steps, which waits for the parameter's device.
struct LAMBParamState : public detail::ParamState<LAMBParamState, detail::CountedState<>> {
  /// The running mean of gradients.
  TORCH_ARG(at::Tensor, exp_avg);
  /// The running mean of squared gradients.
  TORCH_ARG(at::Tensor, exp_avg_sq);

 public:
  /// Returns exp_avg for 0, otherwise exp_avg_sq.
  at::Tensor& moment(int k) noexcept override { return k == 0 ? exp_avg_ : exp_avg_sq_; }

  friend struct detail::MemberTable;
  /// The members, as files and comparisons list them.
  static auto members(auto& own) {
    return std::tuple{detail::member("exp_avg", own.exp_avg()),
                      detail::member("exp_avg_sq", own.exp_avg_sq())};
  }
};

}  // namespace optim

namespace detail {

/// LAMB's part of OptimizerTraits. It passes over the elements twice, with the norms of the whole
/// parameter in between.
template <class Options, class State>
struct LambTraits : OptimizerTraits<LambTraits<Options, State>, Options, State, LambRule> {
  static constexpr const char* kName = "LAMB";

  static void read(const Options& options, GroupNumbers& numbers) {
    check_numbers(
        kName,
        {{"lr", options.lr()}, {"eps", options.eps()}, {"weight_decay", options.weight_decay()}},
        options.betas());
    const auto [beta1, beta2] = options.betas();
    numbers.lr = options.lr();
    numbers.constants = LambConstants{.beta1 = beta1,
                                      .beta2 = beta2,
                                      .eps = options.eps(),
                                      .weight_decay = options.weight_decay(),
                                      .corrects_bias = options.bias_correction(),
                                      .always_adapts = options.always_adapt()};
  }

  static constexpr bool kIsElementByElement = false;
  static StepLoop loop(bool /*is_variant*/, optim::WeightStorage storage, at::ScalarType kept,
                       CpuIsa isa) {
    return lamb_loop(storage, kept, isa);
  }
  static void run_cpu(const std::vector<StepTask>& tasks) { run_lamb_cpu(tasks); }
};

}  // namespace detail

namespace optim {

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
/// The ratio needs all of a parameter before any of it may move. LAMB takes two passes, and
/// computes the update again in the second in place of storing it: 40 bytes a parameter where AdamW
/// moves 28. On the CPU parameters of up to 16,384 elements take one pass. Norms are sums in double
/// (on CUDA of up to 32 squares in float) in a fixed order, so that bits do not depend on threads
/// or CPU.
///
/// libtorch has no LAMB: files are mezzo's own. ATen has no kernel of it: on CUDA it needs the
/// target mezzo::cuda, and takes two launches more than AdamW. Everything else in the comment of
/// AdamW (mezzo/optim/adamw.h) holds here too.
class LAMB : public detail::OptimizerShell<detail::LambTraits<LAMBOptions, LAMBParamState>> {
 public:
  /// Takes param groups or parameters, and LAMBOptions, as AdamW's constructors do.
  /// \throws c10::Error unless lr, eps and weight_decay are at least 0 and the betas in [0, 1), or
  ///   if there is no parameter, a parameter is given twice, or two share memory
  using OptimizerShell::OptimizerShell;
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifdef MEZZO_COMPILED
#include <mezzo/optim/compiled.h>  // IWYU pragma: keep
#endif
