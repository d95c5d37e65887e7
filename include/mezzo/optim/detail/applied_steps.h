#pragma once

#include <mezzo/base/detail/inference_mode.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/graph_capture.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

// Step counts of parameters and optimizers, on the host or on a device.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Host value of a step count that is on a device. Real counts are never negative.
inline constexpr int64_t kCountedOnDevice = -1;

inline void check_steps(int64_t steps) {
  TORCH_CHECK(steps >= 0, "The state of an optimizer has step ", steps,
              "; it should be at least 0");
}

/// Step count on a device; undefined without one. Copies clone the tensor.
struct DeviceStepCount {
  DeviceStepCount() = default;
  DeviceStepCount(const DeviceStepCount& other) : tensor(copy_of(other.tensor)) {}
  DeviceStepCount(DeviceStepCount&&) noexcept = default;
  DeviceStepCount& operator=(DeviceStepCount other) noexcept {
    tensor = std::move(other.tensor);
    return *this;
  }
  ~DeviceStepCount() = default;

  at::Tensor tensor{};

 private:
  static at::Tensor copy_of(const at::Tensor& count) {
    const NoGradInferenceGuard no_grad;
    return count.defined() ? count.clone() : count;
  }
};

/// Returns a step count. Synchronizes if it is on a device.
inline int64_t read_step_count(int64_t on_host, const at::Tensor& on_device) {
  if (on_host == kCountedOnDevice && on_device.defined()) {
    return static_cast<int64_t>(on_device.item<float>());
  }
  check_steps(on_host);  // torch's state class accepts any number
  return on_host;
}

/// Reference to the step count of a parameter or an optimizer, which is on the host for CPU
/// parameters and otherwise on the device that decides whether a step is applied. A device counts
/// in float32, as ATen's kernels require, up to 2^24: long after bias correction has any effect.
class StepCountRef {
 public:
  StepCountRef(int64_t& on_host, at::Tensor& on_device) noexcept
      : on_host_(&on_host), on_device_(&on_device) {}

  /// Checks a count on the host, without synchronizing.
  /// \throws c10::Error if it is negative, which torch's `step` setter allows
  void check() const {
    if (*on_host_ != kCountedOnDevice || !on_device_->defined()) check_steps(*on_host_);
  }

  /// Returns whether the count is on the host and 0. Does not synchronize.
  bool is_zero_on_host() const noexcept { return *on_host_ == 0; }

  int64_t value() const { return read_step_count(*on_host_, *on_device_); }

  /// Sets the count on the host.
  void set_on_host(int64_t value) const {
    *on_host_ = value;
    *on_device_ = at::Tensor();
  }

  /// Sets the count in place, on the host or in the device's memory.
  void set_in_place(int64_t value) const {
    check_steps(value);
    *on_host_ = value;
    (void)on_device();
  }

  /// Moves the count to a device: `on_device` is a float32 scalar with the current value.
  void move_to(at::Tensor on_device) const {
    *on_host_ = kCountedOnDevice;
    *on_device_ = std::move(on_device);
  }

  /// Returns the count on the device; undefined if it is on the host. First copies a value that was
  /// written through torch's `step` setter to the device.
  const at::Tensor& on_device() const {
    if (on_device_->defined() && *on_host_ != kCountedOnDevice) {
      check_steps(*on_host_);
      check_not_capturing(on_device_->device(), "a step count");
      const c10::NoGradGuard no_grad;
      on_device_->fill_(*on_host_);
      *on_host_ = kCountedOnDevice;
    }
    return *on_device_;
  }

 private:
  int64_t* on_host_;
  at::Tensor* on_device_;
};

/// Returns the counts as float32 scalars on `device`. Moves counts on the host in one copy.
inline std::vector<at::Tensor> get_step_tensors(at::Device device,
                                                const std::vector<StepCountRef>& counts) {
  std::vector<StepCountRef> moved;
  std::vector<float> values;
  for (const StepCountRef& count : counts) {
    if (count.on_device().defined() && count.on_device().device() == device) continue;
    moved.push_back(count);
    values.push_back(static_cast<float>(count.value()));
  }
  if (!moved.empty()) {
    check_not_capturing(device, "a step count");
    const NoGradInferenceGuard no_grad;  // no inference tensors
    const at::Tensor packed = at::tensor(values).to(device);
    for (std::size_t i = 0; i < moved.size(); ++i) {
      moved[i].move_to(packed.select(0, static_cast<int64_t>(i)));
    }
  }
  std::vector<at::Tensor> tensors;
  tensors.reserve(counts.size());
  for (const StepCountRef& count : counts) tensors.push_back(count.on_device());
  return tensors;
}

/// Adds 1 unless `found_inf` (float32 on `device`, or undefined) is nonzero.
inline void increment_step(const StepCountRef& count, at::Device device,
                           const at::Tensor& found_inf) {
  if (device.is_cpu()) {
    const bool is_applied = !found_inf.defined() || *found_inf.const_data_ptr<float>() == 0.0F;
    if (is_applied) count.set_on_host(count.value() + 1);
    return;
  }
  at::Tensor on_device = get_step_tensors(device, {count}).front();
  if (found_inf.defined()) {
    on_device.add_(found_inf.eq(0));
  } else {
    on_device.add_(1);
  }
}

/// Step count of an optimizer.
class AppliedSteps {
 public:
  /// Returns whether the count is on the host.
  bool on_host() const noexcept { return on_host_ != kCountedOnDevice; }
  /// Returns the count on the device; undefined if it is on the host.
  const at::Tensor& on_device() const noexcept { return on_device_; }
  /// Returns the count. Synchronizes if it is on a device.
  int64_t value() const { return read_step_count(on_host_, on_device_); }
  /// Returns a reference to the count.
  StepCountRef step_count() noexcept { return {on_host_, on_device_}; }

 private:
  int64_t on_host_ = 0;
  at::Tensor on_device_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
