/// \file
/// AdamW in one pass over memory: `torch::optim::AdamW` together with the rest of a mixed-precision
/// step (unscale, clip, skip, zero the gradients).
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/adam_traits.h>
#include <mezzo/optim/detail/libtorch_options.h>
#include <mezzo/optim/detail/optimizer_shell.h>
#include <mezzo/optim/fused_optimizer.h>

#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>

#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

/// `torch::optim::AdamWOptions`, with its names, defaults and keys in an archive, and the options
/// that FusedOptions adds. Setters return AdamWOptions, and can be chained in any order.
///
/// - `lr` (1e-3): at least 0.
/// - `betas` (0.9, 0.999): shares of the running means of gradients and of their squares that a
///   step keeps; in [0, 1).
/// - `eps` (1e-8): added to the root of the mean square; at least 0. It does not underflow with
///   half weights, since arithmetic is in float.
/// - `weight_decay` (1e-2): each step shrinks parameters by lr * weight_decay, whatever the
///   gradient.
/// - `amsgrad` (false): divide by the largest mean square so far (Reddi et al., 2018).
struct AdamWOptions : public detail::AdamOptionsOn<AdamWOptions, torch::optim::AdamWOptions> {
  using AdamOptionsOn::AdamOptionsOn;
};

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
  using AdamState::AdamState;
};

/// Adam with decoupled weight decay (Loshchilov and Hutter, 2019), with the results of
/// `torch::optim::AdamW` within rounding, in one pass over gradient, parameter and moments.
///
/// \code
///   mezzo::optim::AdamW optimizer(model->parameters(), mezzo::optim::AdamWOptions(2e-5));
///   scaler.scale(loss).backward();
///   scaler.step(optimizer, {.max_norm = 1.0, .zero_grad = true});  // or optimizer.step()
///   scaler.update();
/// \endcode
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
/// a copy of the gradients unless these are set to zero.
///
/// Use it from one thread at a time; it shares its work among libtorch's (`at::set_num_threads`).
class AdamW : public detail::OptimizerShell<
                  detail::AdamTraits<AdamWOptions, AdamWParamState, /*kIsDecoupled=*/true>> {
 public:
  /// Takes param groups or parameters, and options, which have defaults:
  ///
  ///     AdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups, const AdamWOptions&)
  ///     AdamW(std::vector<at::Tensor> parameters, const AdamWOptions&)
  ///
  /// \throws c10::Error unless lr, eps and weight_decay are at least 0 and the betas in [0, 1), or
  ///   if there is no parameter, a parameter is given twice, or two share memory
  using OptimizerShell::OptimizerShell;
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifdef MEZZO_COMPILED
#include <mezzo/optim/compiled.h>  // IWYU pragma: keep
#endif
