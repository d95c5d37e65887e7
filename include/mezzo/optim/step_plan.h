/// \file
/// StepOptions and StepPlan: what a training step is asked to do, and the parameters that take
/// part.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/step_args.h>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <limits>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The numbers that a step takes from the options of a param group.
struct GroupHyperParams {
  double lr = 0;
  bool lr_factor_on_device = false;  ///< the device multiplies `lr` by a schedule's factor
  FunctorArgs functor_args{};        ///< the rule's own numbers
  bool has_extra_moment = false;     ///< takes the rule's other loop: amsgrad, momentum
  int num_moments = 0;               ///< how many; none for SGD without momentum
  bool starts_as_gradient = false;   ///< with dampening, the first buffer is the first gradient
  const char* aten_unsupported_reason = nullptr;  ///< why ATen's kernels cannot step this group
};

}  // namespace detail

/// Options of one step: `scaler.step(optimizer, {.max_norm = 1.0})`.
///
/// Afterwards, whether the step ran or was skipped, `.grad` is zero with `zero_grad`. Otherwise an
/// optimizer of mezzo's or a MasterWeights leaves `.grad` as it was, with the loss scale unless
/// `unscale_` took it off; any other optimizer's `.grad` is unscaled, and clipped where it stepped,
/// as after torch.amp's calls.
struct StepOptions {
  /// Largest 2-norm of all gradients, taken as one vector. Larger ones are multiplied by
  /// max_norm / (norm + 1e-6) as they are used, as `clip_grad_norm_` does. Infinity: no clipping.
  double max_norm = std::numeric_limits<double>::infinity();
  /// Sets the gradients to zero in the same pass. They stay defined.
  bool zero_grad = false;
};

/// The parameters that take part in one step, with their gradients and state. One walk over the
/// parameters makes a plan and checks all of it; `apply` consumes it. No plan is kept for another
/// step.
struct StepPlan {
  /// A parameter with a gradient. Every optimizer sets `storage` (`fp32_master` in a
  /// MasterWeights); mezzo's own also set group, number and the addresses that there are before the
  /// step. Between `plan` and `apply` they stay as they are.
  struct Param : detail::ParamArgs {
    const at::Tensor* parameter = nullptr;  ///< in the groups of the optimizer
    at::Tensor gradient{};                  ///< of the parameter, dense
    /// The optimizer's state of the parameter; null where there is none yet.
    torch::optim::OptimizerParamState* state = nullptr;
  };

  std::vector<Param> params{};                     ///< device by device
  std::vector<detail::GroupHyperParams> groups{};  ///< what the options of each group say
  bool spans_devices = false;                      ///< gradients lie on several devices
  bool is_checked = false;  ///< gradients are dense, of our dtypes, on their parameters' devices
  /// A gradient is of half and its parameter keeps no master: unscaled, it would underflow.
  bool has_fp16_without_master = false;
  /// Other ranks have rows, even if this one has none: all ranks go through the step together.
  bool other_ranks_have_grads = false;

  /// Whether a rank has a gradient.
  bool has_params() const noexcept { return other_ranks_have_grads || !params.empty(); }
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
