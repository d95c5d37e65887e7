#pragma once

#include <mezzo/base/detail/capture.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/which_kernels.h>
#include <mezzo/optim/step_result.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <cstdint>
#include <list>
#include <memory>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// What a device knows of a step: tensors of one element there.
struct StepNumbers {
  at::Tensor scale;           ///< float
  at::Tensor found_inf;       ///< float
  at::Tensor sum_of_squares;  ///< double
  at::Tensor max_abs;         ///< double
};

/// The numbers of a step on their way to the host: one copy into pinned memory, and behind it an
/// event, which says that it has arrived.
///
/// Made during a capture, it belongs to the graph, each replay of which sends it anew. Of replays
/// the host hears nothing: such a letter is never known to be there, and who reads it waits for the
/// device.
class AsyncReadback {
 public:
  explicit AsyncReadback(at::Device device)
      : device_(device),
        is_captured_(capture_on(device) != 0),
        numbers_sent_(device),
        next_scale_sent_(device) {
    const c10::InferenceMode no_inference(false);  // a later step writes it, in any mode
    const auto pinned = at::TensorOptions().device(at::kCPU).pinned_memory(!device.is_cpu());
    numbers_ = at::empty({kNumbers}, pinned.dtype(at::kDouble));
    next_scale_ = at::empty({}, pinned.dtype(at::kFloat));
    numbers_.mutable_data_ptr<double>()[1] = kNoReplay;
  }

  at::Device device() const noexcept { return device_; }
  bool is_captured() const noexcept { return is_captured_; }

  /// Before it serves another step.
  void clear() {
    for (Sent* sent : {&numbers_sent_, &next_scale_sent_}) {
      sent->is_under_way = sent->has_arrived = false;
    }
  }

  /// `was_unscaled` as in StepOutcome, which the host knows already.
  void send(const StepNumbers& numbers, bool was_unscaled = false) {
    was_unscaled_ = was_unscaled;
    numbers_.copy_(packed(numbers), /*non_blocking=*/true);
    mark(numbers_sent_);
  }
  void send_next_scale(const at::Tensor& scale) {
    next_scale_.copy_(scale, /*non_blocking=*/true);
    mark(next_scale_sent_);
  }

  /// Whether `outcome` has the numbers that were sent. Never waits.
  bool is_there() { return has_arrived(numbers_sent_); }
  bool is_next_scale_there() { return has_arrived(next_scale_sent_); }

  /// Until the numbers are there; of a captured letter, those of the last replay.
  void wait() {
    if (numbers_sent_.has_arrived) return;
    TORCH_CHECK(capture_on(device_) == 0,
                "StepResult: asked for an outcome while a CUDA graph is being captured, which runs "
                "nothing; ask after the capture, and after a replay for that of a captured step");
    if (is_captured_) {
      c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
    } else {
      numbers_sent_.event.synchronize();
      numbers_sent_.has_arrived = true;
    }
  }

  StepOutcome outcome() const {
    const double* const numbers = numbers_.const_data_ptr<double>();
    TORCH_CHECK(numbers[1] != kNoReplay,
                "StepResult: this step was captured into a CUDA graph that has not been replayed "
                "yet; replay it, and ask then");
    const bool found_inf = numbers[1] != 0.0;
    StepOutcome outcome{.ran = !found_inf,
                        .found_inf = found_inf,
                        .scale = static_cast<float>(numbers[0]),
                        .grad_norm = std::sqrt(numbers[2]),
                        .grad_max_abs = numbers[3],
                        .was_unscaled = was_unscaled_};
    if (outcome.ran) outcome.value = at::Tensor();  // what a step without closure returns
    return outcome;
  }
  float next_scale() const { return *next_scale_.const_data_ptr<float>(); }

 private:
  struct Sent {
    explicit Sent(at::Device device) : event(device.type()) {}
    c10::Event event;
    bool is_under_way = false;
    bool has_arrived = false;
  };

  static constexpr int64_t kNumbers = 4;
  static constexpr double kNoReplay = -1.0;  // found_inf is a count

  /// In memory of this letter's stream, that the allocator gives again in the stream's order.
  at::Tensor packed(const StepNumbers& numbers) const {
    const auto& [scale, found_inf, sum_of_squares, max_abs] = numbers;
#ifdef MEZZO_WITH_CUDA
    if (has_cuda_kernels(device_)) {
      at::Tensor letter = at::empty({kNumbers}, sum_of_squares.options());
      cuda::pack_letter_(scale, found_inf, sum_of_squares, max_abs, letter);
      return letter;
    }
#endif
    const auto wide = device_.is_mps() ? at::kFloat : at::kDouble;
    std::vector<at::Tensor> all;
    for (const at::Tensor& number : {scale, found_inf, sum_of_squares, max_abs}) {
      all.push_back(number.to(wide).reshape({}));
    }
    return at::stack(all);
  }

  void mark(Sent& sent) {
    sent.has_arrived = device_.is_cpu();  // at once
    sent.is_under_way = !device_.is_cpu() && !is_captured_;
    if (!sent.is_under_way) return;
    sent.event.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }

  /// An event may not be asked for while its device is being captured.
  bool has_arrived(Sent& sent) {
    if (sent.is_under_way && !sent.has_arrived && capture_on(device_) == 0) {
      sent.has_arrived = sent.event.query();
    }
    return sent.has_arrived;
  }

  at::Device device_;
  bool is_captured_;
  bool was_unscaled_ = false;
  Sent numbers_sent_, next_scale_sent_;
  at::Tensor numbers_, next_scale_;
};

/// A step that a device decides.
class DeviceStepSlot final : public StepSlot {
 public:
  explicit DeviceStepSlot(std::shared_ptr<AsyncReadback> readback)
      : readback_(std::move(readback)) {}

  /// An error of the device is for `outcome` to throw.
  bool ready() const noexcept override {
    try {
      return readback_ == nullptr || readback_->is_there();
    } catch (const c10::Error&) {
      return false;
    }
  }

  const StepOutcome& outcome() override {
    if (readback_ == nullptr) return outcome_;
    readback_->wait();
    outcome_ = readback_->outcome();
    if (!readback_->is_captured()) readback_ = nullptr;  // its memory serves another step
    return outcome_;
  }

 private:
  std::shared_ptr<AsyncReadback> readback_;
  StepOutcome outcome_;
};

/// The readbacks of a scaler. One that nobody else holds, and that has arrived, is used again;
/// those that a graph keeps writing serve no other step. All live as long as the scaler.
class ReadbackPool {
 public:
  std::shared_ptr<AsyncReadback> readback_for(at::Device device) {
    if (capture_on(device) == 0) {
      for (const std::shared_ptr<AsyncReadback>& readback : readbacks_) {
        const bool is_free = readback.use_count() == 1 && readback->device() == device;
        if (!is_free || !readback->is_there()) continue;
        readback->clear();
        return readback;
      }
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
    return readbacks.back()->is_next_scale_there();  // which was sent last
  }

  std::list<std::vector<std::shared_ptr<AsyncReadback>>> iterations_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
