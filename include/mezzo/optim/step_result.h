/// \file
/// StepResult: the outcome of one `GradScaler::step`, which may arrive later.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <memory>
#include <optional>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// The outcome of one step, as values.
struct StepOutcome {
  bool ran = false;        ///< whether the step was applied, and not skipped
  bool found_inf = false;  ///< whether a gradient was inf or NaN
  float scale = 1.0F;      ///< the loss scale that this step's gradients carried
  /// The 2-norm of all unscaled gradients before clipping, where a step knows it.
  std::optional<double> grad_norm = std::nullopt;
  /// The largest magnitude of the unscaled gradients before clipping, where a step knows it.
  std::optional<double> grad_max_abs = std::nullopt;
  bool was_unscaled = false;  ///< whether the gradients had lost the scale before the step
  std::optional<at::Tensor> value = std::nullopt;  ///< what `optimizer.step` returned, if it ran
};

/// The place where an outcome arrives that the host did not decide. Derived classes answer `ready`
/// without waiting, and `outcome` by waiting.
class StepSlot {
 public:
  StepSlot() = default;
  StepSlot(const StepSlot&) = delete;
  StepSlot& operator=(const StepSlot&) = delete;
  virtual ~StepSlot() = default;
  /// Returns whether the outcome has arrived. Does not wait.
  virtual bool ready() const noexcept = 0;
  /// Returns the outcome, and waits for it.
  virtual const StepOutcome& outcome() = 0;
  /// A float of one element on the device that decides the step, 0 where it ran; undefined where
  /// the host knows.
  virtual at::Tensor found_inf_on_device() const { return {}; }
};

/// A handle to the outcome of a step. It shares its slot with its copies, may be kept across
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
  /// Makes a result that is known already.
  explicit StepResult(StepOutcome outcome) : known_(std::move(outcome)) {}

  /// Makes a result whose outcome will arrive in `slot`.
  /// \throws c10::Error if `slot` is null
  explicit StepResult(std::shared_ptr<StepSlot> slot);

  /// Returns whether the functions below can answer without waiting. Never waits. False while the
  /// device is being captured, and for a captured step.
  bool ready() const noexcept { return slot_ == nullptr || slot_->ready(); }

  /// Returns whether the step was applied, and not skipped. May wait for the device.
  bool ran() const { return outcome().ran; }

  /// Returns whether an inf or NaN was found. May wait for the device.
  bool found_inf() const { return outcome().found_inf; }

  /// Returns the loss scale that the gradients carried; 1 from a disabled scaler. May wait for the
  /// device.
  float scale() const { return outcome().scale; }

  /// Returns the 2-norm of all gradients, unscaled and not yet clipped, if the step computed it:
  /// with an optimizer of mezzo's, a `max_norm`, or after `unscale_`; from a disabled scaler only
  /// with a `max_norm`. Inf or NaN where an inf was found. May wait for the device.
  std::optional<double> grad_norm() const { return outcome().grad_norm; }

  /// Returns the largest magnitude of all gradients, unscaled and not yet clipped, for each step
  /// that has a `grad_norm()`. Inf or NaN where an inf was found. May wait for the device.
  std::optional<double> grad_max_abs() const { return outcome().grad_max_abs; }

  /// Returns whether the gradients were unscaled before the step, by `GradScaler::unscale_`.
  /// Otherwise the step itself took `scale()` off. May wait for the device.
  bool was_unscaled() const { return outcome().was_unscaled; }

  /// Returns a float of one element on the device that decides the step, 0 where it ran, for work
  /// that follows the step there without waiting; undefined where the host knows.
  at::Tensor found_inf_on_device() const {
    return slot_ == nullptr ? at::Tensor() : slot_->found_inf_on_device();
  }

  /// Returns what `optimizer.step` returned; none if the step was skipped. torch::optim returns an
  /// undefined tensor unless it was given a closure. May wait for the device.
  const std::optional<at::Tensor>& value() const { return outcome().value; }

  /// Returns all of these values. May wait for the device.
  const StepOutcome& outcome() const { return slot_ == nullptr ? known_ : slot_->outcome(); }

 private:
  std::shared_ptr<StepSlot> slot_;  // null where the outcome is known
  StepOutcome known_;
};

inline StepResult::StepResult(std::shared_ptr<StepSlot> slot) : slot_(std::move(slot)) {
  TORCH_CHECK(slot_ != nullptr, "StepResult: slot is null; pass the slot that the step will fill");
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
