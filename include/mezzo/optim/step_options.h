/// \file
/// StepOptions: the options of one optimizer step.
#pragma once

#include <mezzo/base/version.h>

#include <limits>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Options of one step: `scaler.step(optimizer, {.max_norm = 1.0})`.
///
/// With `zero_grad`, `.grad` is zero after the step, whether it was applied or skipped. Otherwise a
/// mezzo optimizer or MasterWeights leaves `.grad` unchanged (scaled unless `unscale_` was called);
/// any other optimizer's `.grad` is unscaled, and clipped if the step was applied, as after
/// torch.amp's calls.
struct StepOptions {
  /// Maximum 2-norm of all gradients as one vector. Larger gradients are multiplied by
  /// max_norm / (norm + 1e-6) when they are read, as in `clip_grad_norm_`. Infinity: no clipping.
  double max_norm = std::numeric_limits<double>::infinity();
  /// Sets the gradients to zero in the same pass. They stay defined.
  bool zero_grad = false;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
