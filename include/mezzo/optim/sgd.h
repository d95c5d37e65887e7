/// \file
/// Fused SGD for dense gradients: unscale, clip, skip, update and zero gradients in one pass over
/// memory.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/sgd_functor.h>
#include <mezzo/optim/detail/fused_optimizer.h>
#include <mezzo/optim/detail/fused_param_state.h>
#include <mezzo/optim/optimizer_ref.h>

#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include <array>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

/// torch's options; WeightStorageOptions adds mezzo's. Set `dampening`, with momentum, before the
/// first step. It must be 0 on devices without mezzo kernels.
using SGDOptions = torch::optim::SGDOptions;

/// Per-parameter state of SGD: `torch::optim::SGDParamState`, with `momentum_buffer()` of the
/// parameter's shape and dtype. Without momentum there is a state only if the weight storage needs
/// one. External writes, also through torch's type, take effect at the next step.
///
/// In addition to torch's it has `step()`, the number of applied steps, which synchronizes for a
/// parameter that is not on the CPU.
struct SGDParamState
    : public detail::FusedParamState<SGDParamState,
                                     detail::StateWithStep<torch::optim::SGDParamState>> {
  /// Archive keys of the moments.
  static constexpr std::array kMoments{"momentum_buffer"};

  /// Returns momentum_buffer.
  at::Tensor& moment(int /*k*/) noexcept override { return momentum_buffer(); }

 private:
  friend FusedParamState;
  /// torch's archives have no step. Only whether a step was applied matters, which is whether there
  /// is a buffer.
  int64_t default_step() const { return momentum_buffer().defined() ? 1 : 0; }
};

}  // namespace optim

namespace detail {

/// Traits of SGD.
template <class OptionsT, class State>
struct SgdTraits : OptimizerTraits<OptionsT, State, SgdFunctor<false>, SgdFunctor<true>> {
  static constexpr const char* kName = "SGD";
  static constexpr const char* kOptionsName = "mezzo::optim::SGDOptions";
  static constexpr bool kTorchStateHasStep = false;

  static void read_hyperparams(const OptionsT& options, GroupHyperParams& hyper_params) {
    check_hyperparams(kName, {{"lr", options.lr()},
                              {"momentum", options.momentum()},
                              {"weight_decay", options.weight_decay()}});
    TORCH_CHECK(!is_nan(options.dampening()), "SGD: dampening is ", options.dampening(),
                "; it should be a number");
    TORCH_CHECK(!options.nesterov() || (options.momentum() > 0 && options.dampening() == 0),
                "SGD: nesterov is set with momentum ", options.momentum(), " and dampening ",
                options.dampening(), "; Nesterov momentum requires a momentum and zero dampening");
    hyper_params.lr = options.lr();
    hyper_params.functor_args = SgdHyperParams{options.momentum(), options.dampening(),
                                               options.weight_decay(), options.nesterov()};
    hyper_params.has_extra_moment = options.momentum() != 0;
    // Without dampening a buffer of zeros becomes the first gradient.
    hyper_params.has_dampening = options.momentum() != 0 && options.dampening() != 0;
    // ATen's kernel gets a buffer of zeros and is_first_step = false, since the device may have
    // skipped the first step.
    if (hyper_params.has_dampening) {
      hyper_params.aten_unsupported_reason =
          "ATen's kernel dampens the first step too, if dampening is not 0";
    }
  }

  static void aten_step(const GroupHyperParams& hyper_params, const AtenTensorLists& lists,
                        const AtenAmpArgs& amp_args) {
    const auto sgd = hyper_params.functor_args.as<SgdHyperParams>();
    const at::Tensor lr = amp_args.lr_factor ? *amp_args.lr_factor * hyper_params.lr
                                             : at::scalar_tensor(hyper_params.lr, at::kDouble);
    at::_fused_sgd_(lists.parameters, lists.gradients, lists.moments[0], sgd.weight_decay,
                    sgd.momentum, lr, sgd.dampening, sgd.nesterov,
                    /*maximize=*/false, /*is_first_step=*/false, amp_args.grad_scale,
                    amp_args.found_inf);
  }
};

}  // namespace detail

namespace optim {

/// SGD with momentum, dampening, weight decay and Nesterov momentum, equal to `torch::optim::SGD`
/// within rounding, in one pass over gradient, parameter and buffer. See AdamW
/// (mezzo/optim/adamw.h) for dtypes, groups, archives, devices and threads. Sparse gradients need
/// torch::optim::SGD.
///
/// An archive of torch::optim::SGD has no step count. `load` then warns (TORCH_WARN) and counts
/// from 0; load an LrSchedule's archive or call `set_applied_steps`.
class SGD : public detail::FusedOptimizer<detail::SgdTraits<SGDOptions, SGDParamState>> {
 public:
  /// AdamW's constructors with SGDOptions, which have no default.
  /// \throws c10::Error unless lr, momentum and weight_decay are at least 0 and, with nesterov,
  ///   momentum is positive and dampening 0; for parameters as AdamW's
  using FusedOptimizer::FusedOptimizer;
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifdef MEZZO_COMPILED_LIB
#include <mezzo/optim/compiled.h>  // IWYU pragma: keep
#endif
