/// \file
/// StepResult: the outcome of one `GradScaler::step`, which may complete later.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <memory>
#include <optional>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

class StepFuture;

/// A handle to the outcome of a step. It shares its future with its copies, may be kept across
/// iterations, and may outlive scaler and optimizer. Use it from one thread at a time.
///
/// With the optimizers of `torch::optim` the host decides whether to step, as in torch.amp: `step`
/// has waited for the device, and the outcome is ready when it returns.
///
/// A step that was captured into a CUDA graph runs at each replay, and its result is that of the
/// last replay. `ready` is then always false, because replays do not notify the host, and each
/// question waits for the device. Questions throw c10::Error before the first replay and during a
/// capture.
class StepResult {
 public:
  /// The outcome of one step, as values.
  struct Values {
    bool applied = false;    ///< whether the step was applied, and not skipped
    bool found_inf = false;  ///< whether a gradient was inf or NaN
    float scale = 1.0F;      ///< the loss scale that this step's gradients carried
    /// The 2-norm of all unscaled gradients before clipping, where a step knows it.
    std::optional<double> grad_norm = std::nullopt;
    /// The largest magnitude of the unscaled gradients before clipping, where a step knows it.
    std::optional<double> grad_max_abs = std::nullopt;
    bool was_unscaled = false;  ///< whether the gradients had lost the scale before the step
    std::optional<at::Tensor> step_return =
        std::nullopt;  ///< what `optimizer.step` returned, if it ran
  };

  /// Makes a result that is known already.
  explicit StepResult(Values values) : known_(std::move(values)) {}

  /// Makes a result whose outcome will arrive in `future`.
  /// \throws c10::Error if `future` is null
  explicit StepResult(std::shared_ptr<StepFuture> future);

  /// Returns whether the functions below can answer without waiting. Never waits. False while the
  /// device is being captured, and for a captured step.
  bool ready() const noexcept;

  /// Returns whether the step was applied, and not skipped. May wait for the device.
  bool applied() const { return values().applied; }

  /// Returns whether an inf or NaN was found. May wait for the device.
  bool found_inf() const { return values().found_inf; }

  /// Returns the loss scale that the gradients carried; 1 from a disabled scaler. May wait for the
  /// device.
  float scale() const { return values().scale; }

  /// Returns the 2-norm of all gradients, unscaled and not yet clipped, if the step computed it:
  /// with an optimizer of mezzo's, a `max_norm`, or after `unscale_`; from a disabled scaler only
  /// with a `max_norm`. Inf or NaN where an inf was found. May wait for the device.
  std::optional<double> grad_norm() const { return values().grad_norm; }

  /// Returns the largest magnitude of all gradients, unscaled and not yet clipped, for each step
  /// that has a `grad_norm()`. Inf or NaN where an inf was found. May wait for the device.
  std::optional<double> grad_max_abs() const { return values().grad_max_abs; }

  /// Returns whether the gradients were unscaled before the step, by `GradScaler::unscale_`.
  /// Otherwise the step itself took `scale()` off. May wait for the device.
  bool was_unscaled() const { return values().was_unscaled; }

  /// Returns a float of one element on the device that decides the step, 0 where it ran, for work
  /// that follows the step there without waiting; undefined where the host knows.
  at::Tensor found_inf_on_device() const;

  /// Returns what `optimizer.step` returned; none if the step was skipped. torch::optim returns an
  /// undefined tensor unless it was given a closure. May wait for the device.
  const std::optional<at::Tensor>& step_return() const { return values().step_return; }

  /// Returns all of these values. May wait for the device.
  const StepResult::Values& values() const;

 private:
  std::shared_ptr<StepFuture> future_;  // null where the outcome is known
  StepResult::Values known_;
};

/// The place where an outcome arrives that the host did not decide. Derived classes answer `ready`
/// without waiting, and `outcome` by waiting.
class StepFuture {
 public:
  StepFuture() = default;
  StepFuture(const StepFuture&) = delete;
  StepFuture& operator=(const StepFuture&) = delete;
  virtual ~StepFuture() = default;
  /// Returns whether the outcome has arrived. Does not wait.
  virtual bool ready() const noexcept = 0;
  /// Returns the outcome, and waits for it.
  virtual const StepResult::Values& values() = 0;
  /// A float of one element on the device that decides the step, 0 where it ran; undefined where
  /// the host knows.
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
  return future_ == nullptr ? known_ : future_->values();
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
