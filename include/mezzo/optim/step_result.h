/// \file
/// StepResult: the outcome of one `GradScaler::step`, which may complete asynchronously.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <memory>
#include <optional>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

class StepFuture;

/// Handle to the outcome of a step. Copies share one future. A result may be kept across iterations
/// and may outlive scaler and optimizer. Not thread-safe.
///
/// With torch::optim optimizers the host decides whether to step, as in torch.amp: `step`
/// synchronizes, and the result is ready when it returns.
///
/// A step captured into a CUDA graph has the result of the last replay. `ready` is then always
/// false, because replays do not notify the host, and every other function synchronizes. They throw
/// c10::Error before the first replay and during a capture.
class StepResult {
 public:
  /// The values of a completed step.
  struct Values {
    bool applied = false;                               ///< false if the step was skipped
    bool found_inf = false;                             ///< whether a gradient was inf or NaN
    float scale = 1.0F;                                 ///< the loss scale of this step's gradients
    std::optional<double> grad_norm = std::nullopt;     ///< see StepResult::grad_norm
    std::optional<double> grad_max_abs = std::nullopt;  ///< see StepResult::grad_max_abs
    bool was_unscaled = false;                          ///< `unscale_` was called before the step
    std::optional<at::Tensor> step_return = std::nullopt;  ///< see StepResult::step_return
  };

  /// Constructs a completed result.
  explicit StepResult(Values values) : values_(std::move(values)) {}

  /// Constructs a result with the values of `future`.
  /// \throws c10::Error if `future` is null
  explicit StepResult(std::shared_ptr<StepFuture> future);

  /// Returns whether the functions below return without synchronizing. Never synchronizes. False
  /// during a capture and for a captured step.
  bool ready() const noexcept;

  /// Returns whether the step was applied rather than skipped. May synchronize with the host.
  bool applied() const { return values().applied; }

  /// Returns whether a gradient was inf or NaN. May synchronize with the host.
  bool found_inf() const { return values().found_inf; }

  /// Returns the loss scale of the gradients; 1 from a disabled scaler. May synchronize with the
  /// host.
  float scale() const { return values().scale; }

  /// Returns the 2-norm of all gradients, unscaled and before clipping, if the step computed it:
  /// with a mezzo optimizer, a `max_norm`, or after `unscale_`; from a disabled scaler only with a
  /// `max_norm`. Inf or NaN if found_inf(). May synchronize with the host.
  std::optional<double> grad_norm() const { return values().grad_norm; }

  /// Returns the maximum magnitude of all gradients, unscaled and before clipping, for every step
  /// that has a `grad_norm()`. Inf or NaN if found_inf(). May synchronize with the host.
  std::optional<double> grad_max_abs() const { return values().grad_max_abs; }

  /// Returns whether GradScaler::unscale_ unscaled the gradients before the step. May synchronize
  /// with the host.
  bool was_unscaled() const { return values().was_unscaled; }

  /// Returns a float32 scalar on the device that decided the step, 0 if the step was applied, for
  /// asynchronous work that depends on it; undefined if the host decided.
  at::Tensor found_inf_on_device() const;

  /// Returns what `optimizer.step` returned; nullopt if the step was skipped. Without a closure
  /// torch::optim returns an undefined tensor. May synchronize with the host.
  const std::optional<at::Tensor>& step_return() const { return values().step_return; }

  /// Returns all of these values. May synchronize with the host.
  const Values& values() const;

 private:
  std::shared_ptr<StepFuture> future_;  // null for a completed result
  Values values_;
};

/// The future values of a step that a device decides.
class StepFuture {
 public:
  StepFuture() = default;
  StepFuture(const StepFuture&) = delete;
  StepFuture& operator=(const StepFuture&) = delete;
  virtual ~StepFuture() = default;
  /// Returns whether the step has completed. Does not synchronize.
  virtual bool ready() const noexcept = 0;
  /// Returns the values; blocks until the step has completed.
  virtual const StepResult::Values& values() = 0;
  /// Returns a float32 scalar on the device that decided the step, 0 if the step was applied;
  /// undefined if the host decided.
  virtual at::Tensor found_inf_on_device() const { return {}; }
};

inline StepResult::StepResult(std::shared_ptr<StepFuture> future) : future_(std::move(future)) {
  TORCH_CHECK(future_ != nullptr,
              "StepResult: future is null; pass the StepFuture that the step completes");
}

inline bool StepResult::ready() const noexcept { return future_ == nullptr || future_->ready(); }

inline at::Tensor StepResult::found_inf_on_device() const {
  return future_ == nullptr ? at::Tensor() : future_->found_inf_on_device();
}

inline const StepResult::Values& StepResult::values() const {
  return future_ == nullptr ? values_ : future_->values();
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
