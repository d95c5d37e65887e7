/// \file
/// The interface through which GradScaler knows mezzo's optimizers: a step that unscales, clips
/// and skips by itself, from numbers that lie on the parameters' device.
#pragma once

#include <mezzo/version.h>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <limits>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// What `GradScaler::step(optimizer, {.max_norm = 1.0})` does beside stepping.
struct StepOptions {
  /// The gradients, taken as one vector, are scaled down to at most this 2-norm before they are
  /// used, as `clip_grad_norm_` does: by max_norm / (norm + 1e-6). Infinity: no clipping.
  double max_norm = std::numeric_limits<double>::infinity();
  /// Sets the gradients to zero in the same pass, after a skipped step too; they stay defined.
  /// Otherwise a step leaves them as they are, scaled.
  bool zero_grad = false;
};

namespace optim {

/// What a step is told about the gradients on one device, in tensors of one element there.
struct DeviceVerdict {
  at::Tensor inv_scale;       ///< float: gradients are multiplied by it before anything else
  at::Tensor found_inf;       ///< float: unless 0, the step leaves everything as it is
  at::Tensor sum_of_squares;  ///< double: of all gradients, on all devices, times inv_scale
};

/// A step whose gradients still carry the loss scale.
struct FusedStep {
  std::vector<DeviceVerdict> verdicts;  ///< one for each device that has a gradient
  StepOptions options;
};

/// An optimizer that does all of a training step's last part in one pass over its memory: unscale,
/// clip, update, clear. It decides on the device whether to step, so that the host need not know.
///
/// Derived classes keep libtorch's ways: param groups, `state()`, closures, torch::save.
class FusedOptimizer : public torch::optim::Optimizer {
 public:
  using Optimizer::Optimizer;

  /// `step.verdicts` say what to multiply gradients by and whether to step at all. A skipped step
  /// leaves parameters, moments and counts as they were, bit for bit.
  /// Runs on the current streams; waits for a device only where parameters lie on several.
  /// \throws c10::Error if a gradient is sparse, or of a dtype wider than its parameter's
  virtual void fused_step(const FusedStep& step) = 0;
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
