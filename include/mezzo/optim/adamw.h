/// \file
/// Fused AdamW and Adam: unscale, clip, skip, update and zero gradients in one pass over memory.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/adam_functor.h>
#include <mezzo/optim/detail/fused_optimizer.h>
#include <mezzo/optim/detail/fused_param_state.h>
#include <mezzo/optim/optimizer_ref.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>

#include <array>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Per-parameter state of Adam and AdamW. `Base` is torch's.
template <class Derived, class Base>
class AdamState : public FusedParamState<Derived, Base> {
 public:
  static constexpr std::array kMoments{"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};

  at::Tensor& moment(int k) noexcept override {
    return k == 0 ? Base::exp_avg() : k == 1 ? Base::exp_avg_sq() : Base::max_exp_avg_sq();
  }
};

/// Traits of Adam, and with kIsDecoupled of AdamW.
template <class Options, class State, bool kIsDecoupled>
struct AdamTraits : OptimizerTraits<Options, State, AdamFunctor<false>, AdamFunctor<true>> {
  static constexpr const char* kName = kIsDecoupled ? "AdamW" : "Adam";
  static constexpr const char* kOptionsName =
      kIsDecoupled ? "mezzo::optim::AdamWOptions" : "mezzo::optim::AdamOptions";

  static void read_hyperparams(const Options& options, GroupHyperParams& hyper_params) {
    check_hyperparams(
        kName,
        {{"lr", options.lr()}, {"eps", options.eps()}, {"weight_decay", options.weight_decay()}},
        options.betas());
    const auto [beta1, beta2] = options.betas();
    hyper_params.lr = options.lr();
    hyper_params.functor_args = AdamHyperParams{beta1, beta2, options.eps(), options.weight_decay(),
                                                /*is_decoupled=*/kIsDecoupled};
    hyper_params.has_extra_moment = options.amsgrad();
  }

  static void aten_step(const GroupHyperParams& hyper_params, const AtenTensorLists& lists,
                        const AtenAmpArgs& amp_args) {
    const auto adam = hyper_params.functor_args.as<AdamHyperParams>();
    const at::Tensor lr = amp_args.lr_factor ? *amp_args.lr_factor * hyper_params.lr
                                             : at::scalar_tensor(hyper_params.lr, at::kDouble);
    const auto& [exp_avgs, exp_avg_sqs, max_exp_avg_sqs] = lists.moments;
    const auto step = [](const auto&... arguments) {
      kIsDecoupled ? at::_fused_adamw_(arguments...) : at::_fused_adam_(arguments...);
    };
    step(lists.parameters, lists.gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs,
         lists.state_steps, lr, adam.beta1, adam.beta2, adam.weight_decay, adam.eps,
         hyper_params.has_extra_moment,
         /*maximize=*/false, amp_args.grad_scale, amp_args.found_inf);
  }
};

}  // namespace detail

namespace optim {

/// torch's options; WeightStorageOptions adds mezzo's. `eps` does not underflow for float16
/// parameters, since arithmetic is in float32.
using AdamWOptions = torch::optim::AdamWOptions;
/// torch's options. `weight_decay` (default 0) adds weight_decay * parameter to the gradient.
using AdamOptions = torch::optim::AdamOptions;

/// Per-parameter state of AdamW: `torch::optim::AdamWParamState`, with `exp_avg()`, `exp_avg_sq()`
/// and, with amsgrad, `max_exp_avg_sq()` of the parameter's shape and dtype, and `step()`. External
/// writes, also through torch's type, take effect at the next step.
///
/// For parameters that are not on the CPU the device counts the steps: `step()` synchronizes, and
/// `step(n)` writes to the device without synchronizing, so that captured graphs follow. `step()`
/// of torch's type, called on a `torch::optim::AdamWParamState&`, then returns -1: copy a state
/// with `clone()`, not by slicing. A count set through torch's type is copied to the device by the
/// next eager step; replays ignore it, and a graph that captures that step writes it at every
/// replay.
struct AdamWParamState : public detail::AdamState<AdamWParamState, torch::optim::AdamWParamState> {
};

/// Per-parameter state of Adam; see AdamWParamState.
struct AdamParamState : public detail::AdamState<AdamParamState, torch::optim::AdamParamState> {};

/// Adam with decoupled weight decay (Loshchilov and Hutter, 2019), equal to `torch::optim::AdamW`
/// within rounding, in one pass over gradient, parameter and moments: `scaler.step(optimizer,
/// {.max_norm = 1.0, .zero_grad = true})`, or `optimizer.step()`.
///
/// **Dtypes.** Parameters are float32, float64, bfloat16 or float16, non-overlapping and dense.
/// Gradients have the same dtype; for float32 parameters also bfloat16 or float16, for all others
/// also float32. Arithmetic is in float32 (float64 for float64), results are rounded once, and
/// moments have the parameter's dtype unless WeightStorage says otherwise. Results are bitwise
/// identical for any number of threads and any CPU.
///
/// **Steps.** A step skips parameters without a gradient, checks everything before the first write,
/// and does not change gradients unless `zero_grad` is set. Groups and options may change between
/// steps. A step may run under c10::InferenceMode.
///
/// **Code and archives of torch::optim::AdamW** work unchanged: casts to its options and states,
/// torch's schedulers, groups with its options, and `torch::save` in both directions. `load` has
/// the strong exception guarantee and drops states that the archive lacks.
///
/// **Devices.** On CUDA with the CMake target `mezzo::cuda` a step is asynchronous, and can be
/// captured in a CUDA graph after a first step has created the state; docs/optimizers.md lists the
/// launches. Without that target, and on other devices, ATen's fused kernels are used, on a copy of
/// scaled gradients.
///
/// Not thread-safe. Uses torch's intra-op threads (`at::set_num_threads`).
class AdamW : public detail::FusedOptimizer<
                  detail::AdamTraits<AdamWOptions, AdamWParamState, /*kIsDecoupled=*/true>> {
 public:
  /// Constructs from param groups or parameters; both options have defaults:
  ///
  ///     AdamW(groups, const AdamWOptions&, const WeightStorageOptions&)
  ///     AdamW(std::vector<at::Tensor> parameters, const AdamWOptions&, const WeightStorageOptions&)
  ///
  /// \throws c10::Error unless lr, eps and weight_decay are at least 0 and the betas in [0, 1), or
  ///   if there is no parameter, a parameter appears twice, or two share memory
  using FusedOptimizer::FusedOptimizer;
};

/// Adam (Kingma and Ba, 2015), equal to `torch::optim::Adam` within rounding, in one pass over
/// gradient, parameter and moments. See AdamW for dtypes, groups, archives, devices and threads.
class Adam : public detail::FusedOptimizer<
                 detail::AdamTraits<AdamOptions, AdamParamState, /*kIsDecoupled=*/false>> {
 public:
  /// AdamW's constructors with AdamOptions.
  using FusedOptimizer::FusedOptimizer;
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifdef MEZZO_COMPILED_LIB
#include <mezzo/optim/compiled.h>  // IWYU pragma: keep
#endif
