#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/grad_stats.h>
#include <mezzo/kernels/graph_capture.h>
#include <mezzo/kernels/kernel_dispatch.h>
#include <mezzo/optim/step_result.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <memory>
#include <mutex>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Loss scale, found_inf, squared norm and largest magnitude of the gradients of a step.
using DeviceStepValues = std::array<double, 4>;

/// Converts the values of a step without closure.
/// \param has_norm  whether norm_sq and max_abs were computed
inline StepResult::Values to_step_values(const DeviceStepValues& device_values, bool has_norm,
                                         bool was_unscaled) {
  const auto [scale, found_inf, norm_sq, max_abs] = device_values;
  StepResult::Values values{.applied = found_inf == 0,
                            .found_inf = found_inf != 0,
                            .scale = static_cast<float>(scale),
                            .was_unscaled = was_unscaled};
  if (has_norm) {
    values.grad_norm = std::sqrt(norm_sq);
    values.grad_max_abs = max_abs;
  }
  if (values.applied) values.step_return = at::Tensor();
  return values;
}

/// Asynchronous device-to-host copy of a step's outcome. A mezzo kernel writes the four values to
/// pinned memory as doubles; on devices without it ATen copies them. An event recorded after the
/// write marks completion.
///
/// A future created during a capture belongs to the graph, and each replay writes it again. Replays
/// do not notify the host: a captured future never becomes ready, and reading it synchronizes.
class DeviceStepFuture final : public StepFuture {
 public:
  /// Allocates the host memory. \param device  the device of the loss scale
  explicit DeviceStepFuture(at::Device device)
      : device_(device), is_captured_(current_capture_id(device) != 0), event_(device.type()) {
    const c10::InferenceMode no_inference(false);  // a later step writes it, in any mode
    host_values_ = empty_host_tensor({4}, at::kDouble, device);
    host_values_.mutable_data_ptr<double>()[1] = kNotReplayed;
  }

  at::Device device() const noexcept { return device_; }

  /// Enqueues the copy of a step's values. No host sync.
  /// \param scale  a float of one element
  /// \param stats  totals of all devices; norm_sq and max_abs may be undefined
  /// \param was_unscaled  whether `unscale_` was called before the step
  void enqueue_copy(const at::Tensor& scale, const GradStats& stats, bool was_unscaled) {
    is_read_ = false;
    has_norm_ = stats.norm_sq.defined();
    was_unscaled_ = was_unscaled;
    found_inf_ = stats.found_inf;
    is_ready_ = false;
    copy_to_host(to_device(scale, device_), stats.to(device_));
    if (!is_captured_)
      event_.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }

  /// Returns whether the copy has completed. False during a capture, in which an event must not be
  /// queried.
  bool ready() const noexcept override {
    try {
      if (!is_ready_ && !is_captured_ && current_capture_id(device_) == 0) {
        const RelaxedCaptureModeGuard relaxed(device_);
        is_ready_ = event_.query();
      }
    } catch (const c10::Error&) {
      return false;  // the device has failed: values() throws
    }
    return is_ready_;
  }

  /// Returns the outcome of the step, for a captured step that of the last replay. Thread-safe,
  /// since the scaler reads it too.
  /// \throws c10::Error while the device is being captured, and for a captured step before the
  ///   first replay
  const StepResult::Values& values() override {
    const std::lock_guard lock(mutex_);
    if (is_read_) return values_;
    if (!is_ready_) {
      TORCH_CHECK(
          current_capture_id(device_) == 0,
          "StepResult: the outcome is not available during a CUDA graph capture, which runs "
          "nothing; read it after the capture, and for a captured step after a replay");
      const RelaxedCaptureModeGuard relaxed(device_);
      if (is_captured_) {
        c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
      } else {
        event_.synchronize();
        is_ready_ = true;
      }
    }
    DeviceStepValues device_values;
    std::copy_n(host_values_.const_data_ptr<double>(), device_values.size(), device_values.begin());
    TORCH_CHECK(device_values[1] != kNotReplayed,
                "StepResult: this step was captured into a CUDA graph that has not been replayed "
                "yet; replay the graph first");
    values_ = to_step_values(device_values, has_norm_, was_unscaled_);
    is_read_ = !is_captured_;
    return values_;
  }
  at::Tensor found_inf_on_device() const override { return found_inf_; }

 private:
  static constexpr double kNotReplayed = -1.0;  // found_inf is not negative

  void copy_to_host(const at::Tensor& scale, const GradStats& stats) {
    if (kernel_backend(device_) == KernelBackend::cuda) {
      return cuda_kernels()->write_step_values_(scale, stats.found_inf, stats.norm_sq,
                                                stats.max_abs, host_values_, device_address_);
    }
    const auto dtype = device_.is_mps() ? at::kFloat : at::kDouble;
    std::vector<at::Tensor> scalars;
    for (const at::Tensor& scalar : {scale, stats.found_inf, stats.norm_sq, stats.max_abs}) {
      scalars.push_back(scalar.defined() ? scalar.to(dtype).reshape({})
                                         : at::zeros({}, scale.options().dtype(dtype)));
    }
    // The stacked tensor may be freed once its copy is enqueued: the caching allocator reuses its
    // memory in stream order.
    host_values_.copy_(at::stack(scalars), /*non_blocking=*/true);
  }

  at::Device device_;
  bool is_captured_;
  bool has_norm_ = false;
  bool was_unscaled_ = false;
  mutable std::atomic<bool> is_ready_ = !is_captured_;  // no copy is enqueued
  std::mutex mutex_;
  bool is_read_ = false;
  mutable c10::Event event_;
  at::Tensor host_values_;
  void* device_address_ = nullptr;  // of host_values_ on the device
  at::Tensor found_inf_;
  StepResult::Values values_;
};

/// Futures of a scaler. Reuses a future that is ready and not referenced elsewhere. A captured
/// future, which its graph keeps writing, is never reused.
class DeviceStepFuturePool {
 public:
  /// Returns the result of a step: its values if the scale is on the CPU, otherwise a future.
  StepResult make_result(const at::Tensor& scale, const GradStats& stats, bool was_unscaled) {
    if (scale.is_cpu()) {
      const auto read = [](const at::Tensor& scalar) {
        return scalar.defined() ? scalar.item<double>() : 0.0;
      };
      return StepResult(to_step_values(
          {read(scale), read(stats.found_inf), read(stats.norm_sq), read(stats.max_abs)},
          stats.norm_sq.defined(), was_unscaled));
    }
    const std::shared_ptr<DeviceStepFuture> future = acquire(scale.device());
    future->enqueue_copy(scale, stats, was_unscaled);
    return StepResult(future);
  }

 private:
  std::shared_ptr<DeviceStepFuture> acquire(at::Device device) {
    for (const std::shared_ptr<DeviceStepFuture>& future : futures_) {
      const bool is_unused =
          future.use_count() == 1 && future->device() == device && future->ready();
      if (!is_unused || current_capture_id(device) != 0) continue;
      std::atomic_thread_fence(std::memory_order_acquire);  // use_count() is a relaxed read
      return future;
    }
    return futures_.emplace_back(std::make_shared<DeviceStepFuture>(device));
  }

  std::vector<std::shared_ptr<DeviceStepFuture>> futures_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
