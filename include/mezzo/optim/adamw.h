/// \file
/// AdamW and Adam in one pass over memory: `torch::optim::AdamW` and `torch::optim::Adam` together
/// with the rest of a mixed-precision step (unscale, clip, skip, zero the gradients).
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

/// The state that Adam and AdamW keep of a parameter. `Base` is libtorch's.
template <class Derived, class Base>
class AdamState : public FusedParamState<Derived, Base> {
 public:
  static constexpr std::array kMoments{"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};

  at::Tensor& moment(int k) noexcept override {
    return k == 0 ? Base::exp_avg() : k == 1 ? Base::exp_avg_sq() : Base::max_exp_avg_sq();
  }
};

/// What Adam, and with kIsDecoupled AdamW, says of itself.
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
    const auto& [means, squares, largest] = lists.moments;
    const auto step = [](const auto&... arguments) {
      kIsDecoupled ? at::_fused_adamw_(arguments...) : at::_fused_adam_(arguments...);
    };
    step(lists.parameters, lists.gradients, means, squares, largest, lists.counts, lr, adam.beta1,
         adam.beta2, adam.weight_decay, adam.eps, hyper_params.has_extra_moment, /*maximize=*/false,
         amp_args.grad_scale, amp_args.found_inf);
  }
};

}  // namespace detail

namespace optim {

/// libtorch's options, with its names, defaults and keys in an archive; WeightStorageOptions adds
/// mezzo's. `eps` does not underflow with half weights, since arithmetic is in float.
using AdamWOptions = torch::optim::AdamWOptions;
/// Adam has the same options; its `weight_decay` (0) adds weight_decay * parameter to the gradient.
using AdamOptions = torch::optim::AdamOptions;

/// AdamW's state of a parameter: `torch::optim::AdamWParamState`, with the tensors `exp_avg()`,
/// `exp_avg_sq()` and, with amsgrad, `max_exp_avg_sq()`, of the parameter's shape and dtype, and
/// the count `step()`. Values that you write to it, through libtorch's type too, count from the
/// next step on.
///
/// For a parameter that is not on the CPU the device counts the steps. `step()` waits for it;
/// `step(n)` writes to the device without waiting, and captured graphs go on from there. libtorch's
/// own `step()`, called on a `torch::optim::AdamWParamState&`, then returns -1: copy a state with
/// `clone()`, not by slicing. A count that is set through libtorch's type is sent to the device by
/// the next step that is called; replays do not see it, and a graph that captures that step writes
/// it in every replay.
struct AdamWParamState : public detail::AdamState<AdamWParamState, torch::optim::AdamWParamState> {
};

/// Adam's state of a parameter; see AdamWParamState.
struct AdamParamState : public detail::AdamState<AdamParamState, torch::optim::AdamParamState> {};

/// Adam with decoupled weight decay (Loshchilov and Hutter, 2019), with the results of
/// `torch::optim::AdamW` within rounding, in one pass over gradient, parameter and moments:
/// `scaler.step(optimizer, {.max_norm = 1.0, .zero_grad = true})`, or `optimizer.step()`.
///
/// **Dtypes.** Parameters are float, double, bfloat16 or half, dense in memory in any order of
/// dimensions. Gradients have the same dtype; float parameters also take gradients of bfloat16 or
/// half, all others also of float.
/// Arithmetic is in float (double for double), results are rounded once, and moments have the
/// parameter's dtype unless WeightStorage says otherwise. Bits do not depend on threads or CPU.
///
/// **Steps.** Parameters without a gradient are left out. A step checks everything before it writes
/// anything, and leaves gradients as they are unless `zero_grad` is asked for. Groups and their
/// options may change between steps. A step may run under InferenceMode.
///
/// **Code and files of torch::optim::AdamW** work as they are: casts to its options and states,
/// libtorch's schedulers, groups with its options, and `torch::save` files in both directions.
/// Loading is all or nothing, and leaves no state that the file lacks.
///
/// **Devices.** On CUDA with the target `mezzo::cuda` nothing waits for the device, and a step can
/// be captured in a CUDA graph once a first step has made the state; docs/optimizers.md counts the
/// launches. Without that target, and on other devices, ATen's fused kernels take the step, beside
/// a copy of gradients that carry a loss scale.
///
/// Use it from one thread at a time; it shares its work among libtorch's (`at::set_num_threads`).
class AdamW : public detail::FusedOptimizer<
                  detail::AdamTraits<AdamWOptions, AdamWParamState, /*kIsDecoupled=*/true>> {
 public:
  /// Takes param groups or parameters, and options, which have defaults:
  ///
  ///     AdamW(groups, const AdamWOptions&, const WeightStorageOptions&)
  ///     AdamW(std::vector<at::Tensor> parameters, const AdamWOptions&, const WeightStorageOptions&)
  ///
  /// \throws c10::Error unless lr, eps and weight_decay are at least 0 and the betas in [0, 1), or
  ///   if there is no parameter, a parameter is given twice, or two share memory
  using FusedOptimizer::FusedOptimizer;
};

/// Adam (Kingma and Ba, 2015), with the results of `torch::optim::Adam` within rounding, in one
/// pass over gradient, parameter and moments. The comment of AdamW on dtypes,
/// layouts, groups, files, devices and threads holds here too.
class Adam : public detail::FusedOptimizer<
                 detail::AdamTraits<AdamOptions, AdamParamState, /*kIsDecoupled=*/false>> {
 public:
  /// Takes what AdamW's constructors take, with AdamOptions.
  /// \throws c10::Error unless lr, eps and weight_decay are at least 0 and the betas in [0, 1), or
  ///   if there is no parameter, a parameter is given twice, or two share memory
  using FusedOptimizer::FusedOptimizer;
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifdef MEZZO_COMPILED_LIB
#include <mezzo/optim/compiled.h>  // IWYU pragma: keep
#endif
