/// \file
/// StepPlan: the parameters that take part in one optimizer step.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/step_args.h>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Hyperparameters of one param group, read from its options at each step.
struct GroupHyperParams {
  double lr = 0;
  bool lr_factor_on_device = false;  ///< the device multiplies `lr` by the schedule's factor
  FunctorArgs functor_args{};        ///< hyperparameters of the update functor
  bool has_extra_moment = false;     ///< selects ExtraMomentFunctor (amsgrad, momentum)
  int num_moments = 0;               ///< 0 for SGD without momentum
  bool has_dampening = false;        ///< SGD's: the first momentum buffer is the first gradient
  const char* aten_unsupported_reason = nullptr;  ///< null if ATen's kernels support the group
};

}  // namespace detail

/// The parameters of one step, with their gradients and states. MixedPrecisionOptimizer::plan makes
/// a plan and checks all of it; `apply` consumes it.
struct StepPlan {
  /// A parameter with a gradient. MasterWeights sets `storage`; mezzo's optimizers also set the
  /// group, the index, the dtypes and the pointers that exist before the step.
  struct Param : detail::ParamArgs {
    const at::Tensor* parameter = nullptr;               ///< in the optimizer's param groups
    at::Tensor gradient{};                               ///< dense if has_dense_gradients
    torch::optim::OptimizerParamState* state = nullptr;  ///< null before the first step
  };

  std::vector<Param> params{};                     ///< grouped by device
  std::vector<detail::GroupHyperParams> groups{};  ///< one for each param group
  bool spans_devices = false;                      ///< gradients are on several devices
  bool has_dense_gradients = false;                ///< no gradient is sparse
  /// A gradient is float16 and its parameter has no master: unscaled, it may underflow.
  bool has_fp16_without_master = false;
  /// Other ranks have gradients. All ranks then run the step, including those without gradients.
  bool other_ranks_have_grads = false;
  /// The plan is part of a step (see StepInBackward); `apply` does not count it as a step.
  bool is_partial = false;

  /// Returns whether this or another rank has a gradient.
  bool any_rank_has_grads() const noexcept { return other_ranks_have_grads || !params.empty(); }
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
