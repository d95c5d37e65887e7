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

// Counts of applied steps, of a parameter and of an optimizer, on the host or on a device.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The host's number while a device counts. A real count is never negative.
inline constexpr int64_t kCountedOnDevice = -1;

inline void check_steps(int64_t steps) {
  TORCH_CHECK(steps >= 0, "The state of an optimizer has step ", steps,
              "; it should be at least 0");
}

/// A device's count, or none. Each copy has a tensor of its own.
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
    const NoGradInferenceGuard no_graph;
    return count.defined() ? count.clone() : count;
  }
};

/// Returns a count. Waits for the device if the device counts.
inline int64_t read_step_count(int64_t on_host, const at::Tensor& on_device) {
  if (on_host == kCountedOnDevice && on_device.defined()) {
    return static_cast<int64_t>(on_device.item<float>());
  }
  check_steps(on_host);  // libtorch's class takes any number
  return on_host;
}

/// The number of steps applied to a parameter: a view of the two places that may hold it. For a
/// parameter on the CPU the host counts; elsewhere the device counts, which decides whether a step
/// is applied. It counts in a float, as libtorch's kernels require, and so to 2^24 at most, long
/// after the corrections for early steps have ended.
class StepCount {
 public:
  StepCount(int64_t& on_host, at::Tensor& on_device) noexcept
      : on_host_(&on_host), on_device_(&on_device) {}

  /// Checks the host's number, without waiting.
  /// \throws c10::Error if it is negative, as a number written to libtorch's `step` may be
  void check() const {
    if (*on_host_ != kCountedOnDevice || !on_device_->defined()) check_steps(*on_host_);
  }

  /// Returns whether the host counts, and has counted no step. Does not wait.
  bool is_new() const noexcept { return *on_host_ == 0; }

  int64_t value() const { return read_step_count(*on_host_, *on_device_); }

  /// Sets the count. The host counts from here on, until `move_to`.
  void set(int64_t value) const {
    *on_host_ = value;
    *on_device_ = at::Tensor();
  }

  /// Sets the count where it is counted, at the same place in memory.
  void overwrite(int64_t value) const {
    check_steps(value);
    *on_host_ = value;
    (void)on_device();
  }

  /// Lets a device count from here on, in a float of one element that holds the value already.
  void move_to(at::Tensor on_device) const {
    *on_host_ = kCountedOnDevice;
    *on_device_ = std::move(on_device);
  }

  /// Returns the device's count; undefined if the host counts. A number that was written to
  /// libtorch's `step` meanwhile is sent to the device first.
  const at::Tensor& on_device() const {
    if (on_device_->defined() && *on_host_ != kCountedOnDevice) {
      check_steps(*on_host_);
      check_not_capturing(on_device_->device(), "a number of steps");
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

/// Returns the counts as tensors on `device`. Counts that the host kept are sent there in one copy.
inline std::vector<at::Tensor> get_step_tensors(at::Device device,
                                                const std::vector<StepCount>& counts) {
  std::vector<StepCount> newcomers;
  std::vector<float> values;
  for (const StepCount& count : counts) {
    if (count.on_device().defined() && count.on_device().device() == device) continue;
    newcomers.push_back(count);
    values.push_back(static_cast<float>(count.value()));
  }
  if (!newcomers.empty()) {
    check_not_capturing(device, "a number of steps");
    const NoGradInferenceGuard no_graph;  // plain tensors, also in a step of inference tensors
    const at::Tensor together = at::tensor(values).to(device);
    for (std::size_t i = 0; i < newcomers.size(); ++i) {
      newcomers[i].move_to(together.select(0, static_cast<int64_t>(i)));
    }
  }
  std::vector<at::Tensor> tensors;
  tensors.reserve(counts.size());
  for (const StepCount& count : counts) tensors.push_back(count.on_device());
  return tensors;
}

/// Adds one, unless `found_inf`, a float on `device` or undefined, says that the step was skipped.
inline void increment_step(const StepCount& count, at::Device device, const at::Tensor& found_inf) {
  if (device.is_cpu()) {
    const bool ran = !found_inf.defined() || *found_inf.const_data_ptr<float>() == 0.0F;
    if (ran) count.set(count.value() + 1);
    return;
  }
  at::Tensor on_device = get_step_tensors(device, {count}).front();
  if (found_inf.defined()) {
    on_device.add_(found_inf.eq(0));
  } else {
    on_device.add_(1);
  }
}

/// The number of steps that an optimizer has applied.
class AppliedSteps {
 public:
  /// Returns whether the host counts.
  bool on_host() const noexcept { return on_host_ != kCountedOnDevice; }
  /// Returns the device's count; undefined where the host counts.
  const at::Tensor& on_device() const noexcept { return on_device_; }
  /// Returns the number. Waits for the device if that counts.
  int64_t value() const { return read_step_count(on_host_, on_device_); }
  /// Returns the number where it is counted, to be written.
  StepCount step_count() noexcept { return {on_host_, on_device_}; }

 private:
  int64_t on_host_ = 0;
  at::Tensor on_device_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
