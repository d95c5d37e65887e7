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

#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A tensor and its copies on other devices, made when first asked for and dropped when the
/// original changes.
struct DeviceCopies {
  at::Tensor original{};
  std::vector<at::Tensor> copies{};

  /// Call it whenever the original's value has changed.
  void drop_copies() noexcept { copies.clear(); }

  const at::Tensor& on(at::Device device) {
    if (device == original.device()) return original;
    for (const at::Tensor& copy : copies) {
      if (copy.device() == device) return copy;
    }
    const bool non_blocking = !device.is_cpu();  // the host reads at once, the device in order
    return copies.emplace_back(
        original.to(device, original.scalar_type(), non_blocking, /*copy=*/true));
  }
};

/// A loss scale's state on the device of the losses, with 1 / scale beside it: whoever writes the
/// scale writes that too, in the same launch where mezzo has a kernel, so that no step has to
/// compute it. All is written in place, where a captured graph will read it; so none of it is an
/// inference tensor, which nobody could write outside of InferenceMode.
class DeviceScale {
 public:
  DeviceScale() = default;

  DeviceScale(const LossScaleState& state, at::Device device) {
    check_is_warm(device, "the loss scale");
    const c10::InferenceMode no_inference(false);
    const auto number = at::TensorOptions().device(device).dtype(at::kFloat);
    const auto count = number.dtype(at::kInt);
    scale_.original = at::full({}, state.scale, number);
    inverse_ = at::full({}, inverse_scale(state.scale), number);
    growth_tracker_ = at::full({}, state.growth_tracker, count);
    hysteresis_left_ = at::full({}, state.hysteresis_left, count);
  }

  bool defined() const noexcept { return inverse_.defined(); }
  const at::Tensor& original() const noexcept { return scale_.original; }
  const at::Tensor& on(at::Device device) { return scale_.on(device); }

  /// 1 / scale.
  const at::Tensor& inverse() const noexcept { return inverse_; }

  /// Waits for the device.
  LossScaleState read() const {
    return {.scale = original().item<float>(),
            .growth_tracker = growth_tracker_.item<int32_t>(),
            .hysteresis_left = hysteresis_left_.item<int32_t>()};
  }

  void write(const LossScaleState& state) {
    const c10::NoGradGuard no_grad;
    write_scale(state.scale);
    growth_tracker_.fill_(state.growth_tracker);
    hysteresis_left_.fill_(state.hysteresis_left);
  }

  void write_scale(float scale) {
    const c10::NoGradGuard no_grad;
    at::Tensor own = original();
    own.fill_(scale);
    inverse_.fill_(inverse_scale(scale));
    scale_.drop_copies();
  }

  /// From a tensor of one element on any device, clamped; does not look at it.
  void write_scale(const at::Tensor& scale, float lowest, float highest) {
    const c10::NoGradGuard no_grad;
    at::Tensor own = original();
    own.copy_(scale.reshape({}));
    own.clamp_(lowest, highest);
    at::reciprocal_out(inverse_, own);
    scale_.drop_copies();
  }

  /// As `rule` says after an iteration, of which `found_inf`, a float there, knows whether an inf
  /// was found.
  void advance(const LossScale& rule, const at::Tensor& found_inf) {
    const c10::NoGradGuard no_grad;
    update_scale_(rule, {original(), inverse_, growth_tracker_, hysteresis_left_}, found_inf);
    scale_.drop_copies();
  }

 private:
  DeviceCopies scale_;
  at::Tensor inverse_;
  at::Tensor growth_tracker_;
  at::Tensor hysteresis_left_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
