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

/// The values of a step: loss scale, found_inf, sum of squares, largest magnitude.
using StepValues = std::array<double, 4>;

/// Returns the outcome that the values of a step without closure stand for.
/// \param has_norm  whether the last two are known
inline StepResult::Values make_outcome(const StepValues& values, bool has_norm, bool was_unscaled) {
  const auto [scale, found_inf, norm_sq, max_abs] = values;
  StepResult::Values outcome{.applied = found_inf == 0,
                             .found_inf = found_inf != 0,
                             .scale = static_cast<float>(scale),
                             .was_unscaled = was_unscaled};
  if (has_norm) {
    outcome.grad_norm = std::sqrt(norm_sq);
    outcome.grad_max_abs = max_abs;
  }
  if (outcome.applied) outcome.step_return = at::Tensor();
  return outcome;
}

/// Carries the four values of one step from a device to the host, as doubles. Kernels of mezzo's
/// copy_to_host them into pinned memory; on devices without them ATen copies them there. An event
/// behind the copy_to_host tells when the values have arrived, and the host reads them no earlier.
///
/// A future that is made during a capture belongs to the graph, and each replay sends it anew.
/// Replays do not notify the host: a captured future never becomes ready, and reading it
/// synchronises.
class DeviceStepFuture final : public StepFuture {
 public:
  /// \param device  where the values will be; the host's memory for them is allocated here
  explicit DeviceStepFuture(at::Device device)
      : device_(device), is_captured_(current_capture_id(device) != 0), event_(device.type()) {
    const c10::InferenceMode no_inference(false);  // a later step writes it, in any mode
    host_values_ = empty_host_tensor({4}, at::kDouble, device);
    host_values_.mutable_data_ptr<double>()[1] = kNoReplay;
  }

  at::Device device() const noexcept { return device_; }

  /// Sends the values of a step. No host sync.
  /// \param scale  a float of one element
  /// \param stats  the totals of all devices; norm_sq and max_abs may be undefined
  /// \param was_unscaled  whether the gradients had lost the scale before the step
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

  /// Returns whether the device will not copy_to_host the values any more. An event may not be
  /// queried during a capture.
  bool ready() const noexcept override {
    try {
      if (!is_ready_ && !is_captured_ && current_capture_id(device_) == 0) {
        const RelaxedCaptureModeGuard relaxed(device_);
        is_ready_ = event_.query();
      }
    } catch (const c10::Error&) {
      return false;  // of a device that has failed: `outcome` throws it
    }
    return is_ready_;
  }

  /// Returns the outcome of the step; of a captured one, that of the last replay.
  /// Scaler and user may ask at once.
  /// \throws c10::Error while the device is being captured, and for a captured step before the
  ///   first replay
  const StepResult::Values& values() override {
    const std::lock_guard lock(mutex_);
    if (is_read_) return outcome_;
    if (!is_ready_) {
      TORCH_CHECK(current_capture_id(device_) == 0,
                  "StepResult: asked for an outcome while a CUDA graph is being captured, which "
                  "runs nothing; ask after the capture, and after a replay for that of a captured "
                  "step");
      const RelaxedCaptureModeGuard relaxed(device_);
      if (is_captured_) {
        c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
      } else {
        event_.synchronize();
        is_ready_ = true;
      }
    }
    StepValues values;
    std::copy_n(host_values_.const_data_ptr<double>(), values.size(), values.begin());
    TORCH_CHECK(values[1] != kNoReplay,
                "StepResult: this step was captured into a CUDA graph that has not been replayed "
                "yet; replay it, and ask then");
    outcome_ = make_outcome(values, has_norm_, was_unscaled_);
    is_read_ = !is_captured_;
    return outcome_;
  }
  at::Tensor found_inf_on_device() const override { return found_inf_; }

 private:
  static constexpr double kNoReplay = -1.0;  // in place of found_inf, which is not negative

  void copy_to_host(const at::Tensor& scale, const GradStats& stats) {
    if (kernel_backend(device_) == KernelBackend::cuda) {
      return cuda_kernels()->write_step_values_(scale, stats.found_inf, stats.norm_sq,
                                                stats.max_abs, host_values_, device_address_);
    }
    const auto wide = device_.is_mps() ? at::kFloat : at::kDouble;
    std::vector<at::Tensor> all;
    for (const at::Tensor& number : {scale, stats.found_inf, stats.norm_sq, stats.max_abs}) {
      all.push_back(number.defined() ? number.to(wide).reshape({})
                                     : at::zeros({}, scale.options().dtype(wide)));
    }
    // The stack may be freed as soon as its copy is queued: the allocator gives its memory away
    // again in the order of the stream.
    host_values_.copy_(at::stack(all), /*non_blocking=*/true);
  }

  at::Device device_;
  bool is_captured_;
  bool has_norm_ = false;
  bool was_unscaled_ = false;
  mutable std::atomic<bool> is_ready_ = !is_captured_;  // nothing is on its way
  std::mutex mutex_;
  bool is_read_ = false;
  mutable c10::Event event_;
  at::Tensor host_values_;
  void* device_address_ = nullptr;  // of host_values_ on the device
  at::Tensor found_inf_;
  StepResult::Values outcome_;
};

/// The letters of a scaler, which live as long as the scaler. A future that nothing else holds, and
/// that no device will copy_to_host, is used again; a captured future, which its graph keeps
/// writing, is not.
class DeviceStepFuturePool {
 public:
  /// Returns the result of a step: known on the CPU, where the values are read, and otherwise in a
  /// future from the scale's device.
  StepResult make_result(const at::Tensor& scale, const GradStats& stats, bool was_unscaled) {
    if (scale.is_cpu()) {
      const auto read = [](const at::Tensor& number) {
        return number.defined() ? number.item<double>() : 0.0;
      };
      return StepResult(make_outcome(
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
      const bool is_free = future.use_count() == 1 && future->device() == device && future->ready();
      if (!is_free || current_capture_id(device) != 0) continue;
      std::atomic_thread_fence(std::memory_order_acquire);  // use_count alone is a relaxed read
      return future;
    }
    return futures_.emplace_back(std::make_shared<DeviceStepFuture>(device));
  }

  std::vector<std::shared_ptr<DeviceStepFuture>> futures_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
