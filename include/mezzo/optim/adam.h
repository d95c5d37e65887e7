/// \file
/// Adam in one pass over memory: `torch::optim::Adam` together with the rest of a mixed-precision
/// step (unscale, clip, skip, zero the gradients).
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/adam_traits.h>
#include <mezzo/optim/detail/libtorch_options.h>
#include <mezzo/optim/detail/optimizer_shell.h>
#include <mezzo/optim/fused_optimizer.h>

#include <torch/optim/adam.h>
#include <torch/optim/optimizer.h>

#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

/// `torch::optim::AdamOptions`, with its names, defaults and keys in an archive, and the options
/// that FusedOptions adds. Setters return AdamOptions, and can be chained in any order.
///
/// - `lr` (1e-3): at least 0.
/// - `betas` (0.9, 0.999): shares of the running means of gradients and of their squares that a
///   step keeps; in [0, 1).
/// - `eps` (1e-8): added to the root of the mean square; at least 0.
/// - `weight_decay` (0): adds weight_decay * parameter to the gradient (an L2 penalty; AdamW
///   decouples it).
/// - `amsgrad` (false): divide by the largest mean square so far (Reddi et al., 2018).
struct AdamOptions : public detail::AdamOptionsOn<AdamOptions, torch::optim::AdamOptions> {
  using AdamOptionsOn::AdamOptionsOn;
};

/// Adam's state of a parameter: `step()`, `exp_avg()`, `exp_avg_sq()` and, with amsgrad,
/// `max_exp_avg_sq()`; see AdamWParamState.
struct AdamParamState : public detail::AdamState<AdamParamState, torch::optim::AdamParamState> {
  using AdamState::AdamState;
};

/// Adam (Kingma and Ba, 2015), with the results of `torch::optim::Adam` within rounding, in one
/// pass over gradient, parameter and moments. The comment of AdamW (mezzo/optim/adamw.h) on dtypes,
/// layouts, groups, files, devices and threads holds here too.
class Adam : public detail::OptimizerShell<
                 detail::AdamTraits<AdamOptions, AdamParamState, /*kIsDecoupled=*/false>> {
 public:
  /// Takes param groups or parameters, and AdamOptions, as AdamW's constructors do.
  /// \throws c10::Error unless lr, eps and weight_decay are at least 0 and the betas in [0, 1), or
  ///   if there is no parameter, a parameter is given twice, or two share memory
  using OptimizerShell::OptimizerShell;
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifdef MEZZO_COMPILED
#include <mezzo/optim/compiled.h>  // IWYU pragma: keep
#endif
