/// \file
/// What became of one `GradScaler::step`.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <memory>
#include <optional>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// The facts about one step, once they are known.
struct StepOutcome {
  bool ran = false;        ///< whether `optimizer.step` was called
  bool found_inf = false;  ///< whether a gradient was inf or NaN
  float scale = 1.0F;      ///< the loss scale that this step's gradients carried
  /// The 2-norm of all unscaled gradients before clipping, where a step knows it.
  std::optional<double> grad_norm = std::nullopt;
  /// The largest magnitude of the unscaled gradients before clipping, where a step knows it.
  std::optional<double> grad_max_abs = std::nullopt;
  bool was_unscaled = false;  ///< whether the gradients had lost the scale before the step
  std::optional<at::Tensor> value = std::nullopt;  ///< what `optimizer.step` returned, if it ran

  /// Returns what four numbers say: scale, found_inf, sum of squares, largest magnitude.
  static StepOutcome of(const double (&numbers)[4], bool has_norm, bool was_unscaled) {
    StepOutcome outcome{.ran = numbers[1] == 0.0,
                        .found_inf = numbers[1] != 0.0,
                        .scale = static_cast<float>(numbers[0]),
                        .was_unscaled = was_unscaled};
    if (has_norm) outcome.grad_norm = std::sqrt(numbers[2]);
    if (has_norm) outcome.grad_max_abs = numbers[3];
    if (outcome.ran) outcome.value = at::Tensor();  // what a step without closure returns
    return outcome;
  }
};

/// Where an outcome arrives. Who decides a step elsewhere than on the host (a fused kernel) derives
/// from it and answers `ready` without waiting and `outcome` by waiting.
class StepSlot {
 public:
  StepSlot() = default;
  StepSlot(const StepSlot&) = delete;
  StepSlot& operator=(const StepSlot&) = delete;
  virtual ~StepSlot() = default;
  virtual bool ready() const noexcept = 0;
  virtual const StepOutcome& outcome() = 0;
  /// A float of one element on the device that decides the step, 0 where it ran; undefined where
  /// the host knows.
  virtual at::Tensor found_inf_on_device() const { return {}; }
};

/// A handle to the outcome of a step. It owns (shares) its slot, so it may be kept across
/// iterations and outlive scaler and optimizer; copies ask the same slot.
///
/// With the optimizers of `torch::optim` the host itself decides whether to step, as torch.amp
/// does, so that `step` has already waited for the device and the outcome is ready when it returns.
/// Ask from one thread at a time.
///
/// A step that was captured into a CUDA graph runs at each replay, and its result tells of the last
/// one: `ready` is always false, for the host does not hear of replays, and each question waits for
/// the device. It throws c10::Error before the first replay, and during a capture.
class StepResult {
 public:
  /// An outcome that is known already.
  explicit StepResult(StepOutcome outcome) : known_(std::move(outcome)) {}

  /// An outcome that will arrive in `slot`.
  /// \throws c10::Error if `slot` is null
  explicit StepResult(std::shared_ptr<StepSlot> slot);

  /// Whether the questions below can be answered without waiting. Never waits. False while the
  /// device is being captured, and of a captured step.
  bool ready() const noexcept { return slot_ == nullptr || slot_->ready(); }

  /// Whether `optimizer.step` ran. May wait for the device.
  bool ran() const { return outcome().ran; }

  /// Whether an inf or NaN was found. May wait for the device.
  bool found_inf() const { return outcome().found_inf; }

  /// The loss scale that the gradients carried; 1 from a disabled scaler. May wait for the device.
  float scale() const { return outcome().scale; }

  /// The 2-norm of all gradients, unscaled and not yet clipped, from a step that had to know it:
  /// with an optimizer of mezzo's or a `max_norm`; from a disabled scaler only with a `max_norm`,
  /// and not where an optimizer of mezzo's clips on a device. Inf or NaN where an inf was found.
  /// May wait for the device.
  std::optional<double> grad_norm() const { return outcome().grad_norm; }

  /// The largest magnitude of all gradients, unscaled and not yet clipped, from each step that
  /// knows `grad_norm()`. Inf or NaN where an inf was found. May wait for the device.
  std::optional<double> grad_max_abs() const { return outcome().grad_max_abs; }

  /// Whether the gradients had lost the loss scale before the step, by `GradScaler::unscale_` or by
  /// what calls it (`mezzo::clip_grad_norm_(scaler, ...)`). Otherwise `scale()` was still on them,
  /// and the step took it off. May wait for the device.
  bool was_unscaled() const { return outcome().was_unscaled; }

  /// Returns a float of one element on the device that decides the step, 0 where it ran, for work
  /// that follows the step there without waiting; undefined where the host knows.
  at::Tensor found_inf_on_device() const {
    return slot_ == nullptr ? at::Tensor() : slot_->found_inf_on_device();
  }

  /// What `optimizer.step` returned, none when it was skipped. torch::optim returns an undefined
  /// tensor unless it was given a closure. May wait for the device.
  const std::optional<at::Tensor>& value() const { return outcome().value; }

 private:
  const StepOutcome& outcome() const { return slot_ == nullptr ? known_ : slot_->outcome(); }

  std::shared_ptr<StepSlot> slot_;  // null where the outcome is known
  StepOutcome known_;
};

inline StepResult::StepResult(std::shared_ptr<StepSlot> slot) : slot_(std::move(slot)) {
  TORCH_CHECK(slot_ != nullptr, "StepResult: slot is null; pass the slot that the step will fill");
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
