/// \file
/// SGD in one pass over memory: `torch::optim::SGD` for dense gradients, together with the rest of
/// a mixed-precision step (unscale, clip, skip, zero the gradients).
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

/// libtorch's options, with its names, defaults and keys in an archive; WeightStorageOptions adds
/// mezzo's. Set `dampening`, with momentum, before the first step; it is 0 where ATen's kernels
/// step.
using SGDOptions = torch::optim::SGDOptions;

/// SGD's state of a parameter: `torch::optim::SGDParamState` with `momentum_buffer()`, of the
/// parameter's shape and dtype. Without momentum there is a state only where weight_storage needs
/// one. Values that you write to the buffer, through libtorch's type too, count from the next step
/// on.
///
/// Beyond libtorch's it has `step()`, the number of applied steps, which waits for the parameter's
/// device.
struct SGDParamState
    : public detail::FusedParamState<SGDParamState,
                                     detail::CountedState<torch::optim::SGDParamState>> {
  /// The keys of the moments in files.
  static constexpr std::array kMoments{"momentum_buffer"};

  /// Returns the momentum buffer.
  at::Tensor& moment(int /*k*/) noexcept override { return momentum_buffer(); }

 private:
  friend FusedParamState;
  /// libtorch's state has no count, and a buffer from the first step on: whether there was a step
  /// is all that matters.
  int64_t step_without_count() const { return momentum_buffer().defined() ? 1 : 0; }
};

}  // namespace optim

namespace detail {

/// SGD's rule.
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
                options.dampening(), "; it needs a positive momentum and a dampening of 0");
    hyper_params.lr = options.lr();
    hyper_params.functor_args = SgdHyperParams{options.momentum(), options.dampening(),
                                               options.weight_decay(), options.nesterov()};
    hyper_params.has_extra_moment = options.momentum() != 0;
    // Without dampening a buffer of zeros becomes the first gradient by itself.
    hyper_params.starts_as_gradient = options.momentum() != 0 && options.dampening() != 0;
    // ATen's kernel is given a buffer of zeros at the first step. Told of a first step, it would
    // not see that the device skipped that step.
    if (hyper_params.starts_as_gradient) {
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

/// Gradient descent with momentum, dampening, weight decay and Nesterov's look ahead, with the
/// results of `torch::optim::SGD` within rounding, in one pass over gradient, parameter and buffer.
/// The comment of AdamW (mezzo/optim/adamw.h) on dtypes, layouts, groups, files, devices and
/// threads holds here too. Sparse gradients need torch::optim::SGD.
///
/// A file of torch::optim::SGD holds no number of steps. `load` warns (TORCH_WARN), and the
/// optimizer counts from 0 until an LrSchedule's file or `set_applied_steps` gives the number.
class SGD : public detail::FusedOptimizer<detail::SgdTraits<SGDOptions, SGDParamState>> {
 public:
  /// Takes what AdamW's constructors take, with SGDOptions, which have no default.
  /// \throws c10::Error unless lr, momentum and weight_decay are at least 0, and, for nesterov,
  ///   momentum is positive and dampening 0; or if there is no parameter, a parameter is given
  ///   twice, or two share memory
  using FusedOptimizer::FusedOptimizer;
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifdef MEZZO_COMPILED_LIB
#include <mezzo/optim/compiled.h>  // IWYU pragma: keep
#endif
