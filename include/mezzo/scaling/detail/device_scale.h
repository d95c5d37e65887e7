#pragma once

#include <mezzo/base/detail/capture.h>
#include <mezzo/base/loss_scale.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/update_scale.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/reciprocal.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <atomic>
#include <mutex>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A loss scale's state on the device of the losses, with 1 / scale beside it, so that no step has
/// to compute it. Tensors of one element: scale and inverse are float, the counts int32. They are
/// written in place, where a captured graph reads them, and are no inference tensors, which could
/// not be written outside of InferenceMode.
class DeviceScale {
 public:
  /// Makes the tensors, unless they are there. Threads may call it at once, and read `original`
  /// after it, until one of them writes.
  /// \throws c10::Error while `device` is being captured: the scale has to be made before
  void make(const LossScaleState& state, at::Device device) {
    const std::lock_guard lock(making_);
    if (defined()) return;
    check_is_warm(device, "the loss scale");
    const c10::InferenceMode no_inference(false);
    const auto number = at::TensorOptions().device(device).dtype(at::kFloat);
    const auto count = number.dtype(at::kInt);
    scale_ = at::full({}, state.scale, number);
    inverse_ = at::full({}, inverse_scale(state.scale), number);
    growth_tracker_ = at::full({}, state.growth_tracker, count);
    hysteresis_left_ = at::full({}, state.hysteresis_left, count);
    is_made_.store(true, std::memory_order_release);
  }

  bool defined() const noexcept { return is_made_.load(std::memory_order_acquire); }
  const at::Tensor& original() const noexcept { return scale_; }

  /// Returns 1 / scale, on the scale's device.
  const at::Tensor& inverse() const noexcept { return inverse_; }

  /// Returns the state. Waits for the device.
  LossScaleState read() const {
    return {.scale = original().item<float>(),
            .growth_tracker = growth_tracker_.item<int32_t>(),
            .hysteresis_left = hysteresis_left_.item<int32_t>()};
  }

  /// Writes the whole state. No host sync.
  void write(const LossScaleState& state) {
    const c10::NoGradGuard no_grad;
    write_scale(state.scale);
    growth_tracker_.fill_(state.growth_tracker);
    hysteresis_left_.fill_(state.hysteresis_left);
  }

  // The next three move the scale. No host sync on a device.

  /// Writes the scale and its inverse; the counts stay.
  void write_scale(float scale) {
    const c10::NoGradGuard no_grad;
    scale_.fill_(scale);
    inverse_.fill_(inverse_scale(scale));
  }

  /// Writes the scale from a tensor of one element on any device, clamped to [lowest, highest].
  void write_scale(const at::Tensor& scale, double lowest, double highest) {
    const c10::NoGradGuard no_grad;
    scale_.copy_(scale.reshape({}));
    scale_.clamp_(lowest, highest);
    at::reciprocal_out(inverse_, scale_);
  }

  /// Moves the scale by `rule` after an iteration.
  /// \param found_inf  a float of one element on the scale's device, not 0 where an inf was found
  void advance(const LossScale& rule, const at::Tensor& found_inf) {
    const c10::NoGradGuard no_grad;
    update_scale_(rule, {scale_, inverse_, growth_tracker_, hysteresis_left_}, found_inf);
  }

 private:
  at::Tensor scale_;
  at::Tensor inverse_;
  at::Tensor growth_tracker_;
  at::Tensor hysteresis_left_;
  std::mutex making_;
  std::atomic<bool> is_made_ = false;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
