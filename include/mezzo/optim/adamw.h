/// \file
/// AdamW in one pass: what `torch::optim::AdamW` is, with the rest of a mixed-precision step
/// (unscale, clip, skip, zero the gradients) done while its memory is read and written once.
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

/// `torch::optim::AdamWOptions`, with its names, defaults and keys in an archive, and what
/// FusedOptions adds; setters return AdamWOptions, and can be chained in any order.
///
/// - `lr` (1e-3): at least 0.
/// - `betas` (0.9, 0.999): how much of the running means of gradients and of their squares a step
///   keeps; in [0, 1).
/// - `eps` (1e-8): added to the root of the mean square; at least 0. In half 1e-8 is no obstacle:
///   arithmetic is in float.
/// - `weight_decay` (1e-2): parameters shrink by lr * weight_decay a step, whatever the gradient.
/// - `amsgrad` (false): divide by the largest mean square so far (Reddi et al., 2018).
struct AdamWOptions : public detail::AdamOptionsOn<AdamWOptions, torch::optim::AdamWOptions> {
  using AdamOptionsOn::AdamOptionsOn;
};

/// What AdamW remembers about a parameter: `torch::optim::AdamWParamState`, with tensors of the
/// parameter's shape and dtype `exp_avg()`, `exp_avg_sq()` and, with amsgrad, `max_exp_avg_sq()`,
/// and `step()`. What is written to it, through libtorch's type too, counts from the next step on.
///
/// Of a parameter that is not on the CPU the device counts the steps. `step()` waits for it, and
/// libtorch's, called on a `torch::optim::AdamWParamState&`, then is -1: do not copy a state by
/// slicing then, copy it with `clone()`. `step(n)` writes to the device, and captured graphs go on
/// from there. What is set through libtorch's type is sent there by the next step that is called:
/// replays pass it by, and a graph that captures that step writes it in every replay.
struct AdamWParamState : public detail::AdamState<AdamWParamState, torch::optim::AdamWParamState> {
  using AdamState::AdamState;
};

/// Adam with decoupled weight decay (Loshchilov and Hutter, 2019): the answers of
/// `torch::optim::AdamW` within rounding, from one pass over gradient, parameter and moments.
///
/// \code
///   mezzo::optim::AdamW optimizer(model->parameters(), mezzo::optim::AdamWOptions(2e-5));
///   scaler.scale(loss).backward();
///   scaler.step(optimizer, {.max_norm = 1.0, .zero_grad = true});  // or optimizer.step()
///   scaler.update();
/// \endcode
///
/// Parameters are float, double, bfloat16 or half, of any strides; gradients of the same dtype, or
/// for float of bfloat16 or half, for all others of float. Arithmetic is in float (double for
/// double), each result rounded once to the parameter's dtype, and the same bits whatever the
/// number of threads and the CPU. Moments have the parameter's dtype; how parameters of bfloat16
/// and half are kept otherwise is for the options to say (mezzo/optim/fused_options.h).
///
/// Parameters without a gradient are passed over, and do not count the step; gradients are dense,
/// and stay as they are unless `zero_grad` is asked for. Param groups, their options and their
/// parameters may be added and changed between steps. A step checks everything before it writes
/// anything: where it throws for a gradient or an option, nothing has changed. It may run under InferenceMode:
/// what it makes are plain tensors, for steps in any mode.
///
/// Code written for torch::optim::AdamW works as it stands: a cast of a group's options to
/// `torch::optim::AdamWOptions&` or of a state to `torch::optim::AdamWParamState&`, libtorch's
/// schedulers, and groups with libtorch's own options, for which `defaults()` say what mezzo adds.
///
/// Files: `torch::save` and `torch::load` read and write what torch::optim::AdamW does: either
/// optimizer goes on where the other stopped. Loading is all or nothing, and leaves no state that
/// the file lacks.
///
/// On CUDA with the target `mezzo::cuda`, `optimizer.step()` is two launches for one dtype, and a
/// whole `scaler.step(...)` with `scaler.update()` six, and one copy to the host, whatever the
/// number of tensors: a read of the gradients and its end, the update, the counts, what the host is
/// to hear, and the next scale. Each further dtype takes two more. Nothing waits for the device, so
/// that all can be captured in a CUDA graph, once a step has made the state. Without that target,
/// and on other devices, ATen's fused kernels do it, in more launches, beside a copy of the
/// gradients unless these are set to zero.
///
/// Threads: one at a time; the work is shared among libtorch's own (`at::set_num_threads`).
class AdamW : public detail::OptimizerShell<
                  detail::AdamTraits<AdamWOptions, AdamWParamState, /*kIsDecoupled=*/true>> {
 public:
  ///     AdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups, const AdamWOptions&)
  ///     AdamW(std::vector<at::Tensor> parameters, const AdamWOptions&)
  ///
  /// The options have defaults.
  /// \throws c10::Error unless lr, eps and weight_decay are at least 0 and the betas in [0, 1), or
  ///   where there is no parameter, one is given twice or two share memory
  using OptimizerShell::OptimizerShell;
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifdef MEZZO_COMPILED
#include <mezzo/optim/compiled.h>  // IWYU pragma: keep
#endif
