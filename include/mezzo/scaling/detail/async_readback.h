#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/step_result.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <cmath>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// One-element tensors of a device on their way to the host, in pinned memory. Copies of a stream
/// arrive in order, and each overwrites a value that no answer has: that the last is there says
/// that all are. So nothing is asked of the device, which a CUDA graph under capture would forbid.
class AsyncReadback {
 public:
  explicit AsyncReadback(at::Device device) : device_(device) {
    const c10::InferenceMode no_inference(false);  // a later step writes it, in any mode
    const auto pinned = at::TensorOptions().device(at::kCPU).pinned_memory(!device.is_cpu());
    scale_ = at::empty({}, pinned.dtype(at::kFloat));
    next_scale_ = at::empty({}, pinned.dtype(at::kFloat));
    sum_of_squares_ = at::empty({}, pinned.dtype(at::kDouble));
    max_abs_ = at::empty({}, pinned.dtype(at::kDouble));
    found_inf_ = at::empty({}, pinned.dtype(at::kFloat));
    clear();
  }

  void clear() {
    *found_inf_.mutable_data_ptr<float>() = kNotThere;
    *next_scale_.mutable_data_ptr<float>() = kNotThere;
  }

  void send(const at::Tensor& scale, const at::Tensor& sum_of_squares,
            const at::Tensor& found_inf) {
    scale_.copy_(scale, /*non_blocking=*/true);
    sum_of_squares_.copy_(sum_of_squares, /*non_blocking=*/true);
    found_inf_.copy_(found_inf, /*non_blocking=*/true);
  }
  /// Not part of the outcome; before `send`, which arrives later.
  void send_max_abs(const at::Tensor& max_abs) { max_abs_.copy_(max_abs, /*non_blocking=*/true); }
  void send_next_scale(const at::Tensor& scale) { next_scale_.copy_(scale, /*non_blocking=*/true); }

  bool has_outcome() noexcept { return is_there(found_inf_); }
  bool has_next_scale() noexcept { return is_there(next_scale_); }
  void wait() const {
    c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
  }

  StepOutcome outcome() const {
    const bool found_inf = *found_inf_.const_data_ptr<float>() != 0.0F;
    StepOutcome outcome{.ran = !found_inf,
                        .found_inf = found_inf,
                        .scale = *scale_.const_data_ptr<float>(),
                        .grad_norm = std::sqrt(*sum_of_squares_.const_data_ptr<double>())};
    if (outcome.ran) outcome.value = at::Tensor();  // what a step without closure returns
    return outcome;
  }
  double max_abs() const { return *max_abs_.const_data_ptr<double>(); }
  float next_scale() const { return *next_scale_.const_data_ptr<float>(); }

 private:
  static constexpr float kNotThere = -1.0F;  // found_inf is a count and a scale is positive

  static bool is_there(at::Tensor& value) noexcept {
    std::atomic_ref<float> memory(*static_cast<float*>(value.data_ptr()));
    return memory.load(std::memory_order_acquire) != kNotThere;
  }

  at::Device device_;
  at::Tensor scale_, next_scale_, sum_of_squares_, max_abs_, found_inf_;
};

/// A step that a device decides.
class DeviceStepSlot final : public StepSlot {
 public:
  explicit DeviceStepSlot(std::shared_ptr<AsyncReadback> readback)
      : readback_(std::move(readback)) {}

  bool ready() const noexcept override { return readback_ == nullptr || readback_->has_outcome(); }

  const StepOutcome& outcome() override {
    if (readback_ != nullptr) {
      if (!readback_->has_outcome()) readback_->wait();
      outcome_ = readback_->outcome();
      readback_ = nullptr;
    }
    return outcome_;
  }

 private:
  std::shared_ptr<AsyncReadback> readback_;
  StepOutcome outcome_;
};

/// The readbacks of a scaler. One that nobody else holds, and that has arrived, is used again; all
/// live as long as the scaler, since a captured graph keeps writing to those it captured.
class ReadbackPool {
 public:
  std::shared_ptr<AsyncReadback> readback_for(at::Device device) {
    for (const std::shared_ptr<AsyncReadback>& readback : readbacks_) {
      if (readback.use_count() > 1 || !readback->has_outcome()) continue;
      readback->clear();
      return readback;
    }
    return readbacks_.emplace_back(std::make_shared<AsyncReadback>(device));
  }

 private:
  std::vector<std::shared_ptr<AsyncReadback>> readbacks_;
};

/// The lines about skipped steps that are still to be written.
class PendingLines {
 public:
  /// The readbacks of one iteration; the last also carries the next scale.
  void add(std::vector<std::shared_ptr<AsyncReadback>> readbacks) {
    iterations_.push_back(std::move(readbacks));
  }

  /// Calls `tell(scale, next scale)` for each skip that is known by now, in order. Never waits.
  template <class Tell>
  void poll(const Tell& tell) {
    while (!iterations_.empty() && is_known(iterations_.front())) {
      const std::vector<std::shared_ptr<AsyncReadback>> readbacks = std::move(iterations_.front());
      iterations_.pop_front();
      for (const auto& readback : readbacks) {
        const StepOutcome outcome = readback->outcome();
        if (!outcome.found_inf) continue;
        tell(outcome.scale, readbacks.back()->next_scale());
        break;  // one line an iteration
      }
    }
  }

 private:
  static bool is_known(const std::vector<std::shared_ptr<AsyncReadback>>& readbacks) {
    return readbacks.back()->has_next_scale();  // which was sent last
  }

  std::deque<std::vector<std::shared_ptr<AsyncReadback>>> iterations_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
