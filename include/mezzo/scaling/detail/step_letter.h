#pragma once

#include <mezzo/base/detail/capture.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/verdict.h>
#include <mezzo/kernels/which_kernels.h>
#include <mezzo/optim/step_result.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#ifdef MEZZO_WITH_CUDA
#include <mezzo/kernels/cuda_launch.h>
#endif

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns the outcome of a step that the CPU decides, where the numbers are there at once.
inline StepOutcome outcome_on_cpu(const at::Tensor& scale, const Verdict& verdict,
                                  bool was_unscaled) {
  const bool has_norm = verdict.sum_of_squares.defined();
  return StepOutcome::of(
      {*scale.const_data_ptr<float>(), *verdict.found_inf.const_data_ptr<float>(),
       has_norm ? *verdict.sum_of_squares.const_data_ptr<double>() : 0.0,
       has_norm ? *verdict.max_abs.const_data_ptr<double>() : 0.0},
      has_norm, was_unscaled);
}

/// Four doubles about one step on their way to the host: scale, found_inf, sum of squares, largest
/// magnitude. From a device they come as one copy into pinned memory with an event behind it, which
/// says that it has arrived; `wait` waits for it.
///
/// A letter that was made during a capture belongs to the graph, each replay of which sends it
/// anew. Replays do not notify the host: such a letter never becomes ready, and reading it
/// synchronises.
class StepLetter {
 public:
  explicit StepLetter(at::Device device)
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
  /// The flag of the last step that was sent, on its device.
  const at::Tensor& found_inf() const noexcept { return found_inf_; }

  /// Before it serves another step.
  void clear() {
    for (Sent* sent : {&numbers_sent_, &next_scale_sent_}) {
      sent->is_under_way = sent->has_arrived = false;
    }
  }

  /// Sends a step's scale, and a verdict that speaks for all devices. `was_unscaled`: the gradients
  /// had lost the scale before the step.
  void send(const at::Tensor& scale, const Verdict& verdict, bool was_unscaled = false) {
    write(scale, verdict, was_unscaled, /*non_blocking=*/true);
    mark(numbers_sent_);
  }
  /// Sends them, and waits until they are there.
  void send_and_wait(const at::Tensor& scale, const Verdict& verdict, bool was_unscaled = false) {
    check_is_no_capture();
    write(scale, verdict, was_unscaled, /*non_blocking=*/false);
    numbers_sent_.has_arrived = true;
  }
  void send_next_scale(const at::Tensor& scale) {
    next_scale_.copy_(scale, /*non_blocking=*/true);
    mark(next_scale_sent_);
  }

  /// Whether `outcome` has the numbers that were sent. Never waits.
  bool is_there() { return has_arrived(numbers_sent_); }
  bool is_next_scale_there() { return has_arrived(next_scale_sent_); }

  /// Waits until the numbers are there; of a captured letter, those of the last replay.
  void wait() {
    if (numbers_sent_.has_arrived) return;
    check_is_no_capture();
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
    return StepOutcome::of({numbers[0], numbers[1], numbers[2], numbers[3]}, has_norm_,
                           was_unscaled_);
  }
  double sum_of_squares() const { return numbers_.const_data_ptr<double>()[2]; }
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

  void check_is_no_capture() const {
    TORCH_CHECK(capture_on(device_) == 0,
                "StepResult: asked for an outcome while a CUDA graph is being captured, which runs "
                "nothing; ask after the capture, and after a replay for that of a captured step");
  }

  void write(const at::Tensor& scale, const Verdict& verdict, bool was_unscaled,
             bool non_blocking) {
    was_unscaled_ = was_unscaled;
    has_norm_ = verdict.sum_of_squares.defined();
    found_inf_ = verdict.found_inf;
    numbers_.copy_(packed(scale, verdict.on(device_)), non_blocking);
  }

  /// Returns the numbers in memory of this letter's stream, that the allocator gives again in the
  /// stream's order.
  at::Tensor packed(const at::Tensor& scale, const Verdict& verdict) const {
    const at::Tensor own_scale = on_device(scale, device_);
    const auto wide = device_.is_mps() ? at::kFloat : at::kDouble;
    const at::Tensor none =
        has_norm_ ? at::Tensor() : at::zeros({}, own_scale.options().dtype(wide));
    const at::Tensor& sum_of_squares = has_norm_ ? verdict.sum_of_squares : none;
    const at::Tensor& max_abs = has_norm_ ? verdict.max_abs : none;
#ifdef MEZZO_WITH_CUDA
    if (has_cuda_kernels(device_)) {
      at::Tensor letter = at::empty({kNumbers}, sum_of_squares.options());
      cuda::pack_letter_(own_scale, verdict.found_inf, sum_of_squares, max_abs, letter);
      return letter;
    }
#endif
    std::vector<at::Tensor> all;
    for (const at::Tensor& number : {own_scale, verdict.found_inf, sum_of_squares, max_abs}) {
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
  bool has_norm_ = false;
  bool was_unscaled_ = false;
  Sent numbers_sent_, next_scale_sent_;
  at::Tensor numbers_, next_scale_;
  at::Tensor found_inf_;
};

/// The outcome of a step that a device decides.
class DeviceStepSlot final : public StepSlot {
 public:
  explicit DeviceStepSlot(std::shared_ptr<StepLetter> letter)
      : letter_(std::move(letter)), found_inf_(letter_->found_inf()) {}

  /// An error of the device is for `outcome` to throw.
  bool ready() const noexcept override {
    try {
      return letter_ == nullptr || letter_->is_there();
    } catch (const c10::Error&) {
      return false;
    }
  }

  const StepOutcome& outcome() override {
    if (letter_ == nullptr) return outcome_;
    letter_->wait();
    outcome_ = letter_->outcome();
    if (!letter_->is_captured()) letter_ = nullptr;  // its memory serves another step
    return outcome_;
  }

  at::Tensor found_inf_on_device() const override { return found_inf_; }

 private:
  std::shared_ptr<StepLetter> letter_;
  at::Tensor found_inf_;
  StepOutcome outcome_;
};

/// The letters of a scaler. One that nobody else holds, and that has arrived, is used again;
/// letters that a graph keeps writing serve no other step. All live as long as the scaler.
class LetterPool {
 public:
  std::shared_ptr<StepLetter> letter_for(at::Device device) {
    if (capture_on(device) == 0) {
      for (const std::shared_ptr<StepLetter>& letter : letters_) {
        const bool is_free = letter.use_count() == 1 && letter->device() == device;
        if (!is_free || !letter->is_there()) continue;
        letter->clear();
        return letter;
      }
    }
    return letters_.emplace_back(std::make_shared<StepLetter>(device));
  }

 private:
  std::vector<std::shared_ptr<StepLetter>> letters_;
};

/// The lines about skipped steps that are still to be written.
class PendingLines {
 public:
  /// Adds the letters of one iteration; the last also carries the next scale.
  void add(std::vector<std::shared_ptr<StepLetter>> letters) {
    iterations_.push_back(std::move(letters));
  }

  bool empty() const noexcept { return iterations_.empty(); }

  /// For each iteration that is known by now, in order: calls `tell(scale, next scale)` where it
  /// skipped a step, and `end_row()` where it did not. Never waits.
  template <class Tell, class EndRow>
  void poll(const Tell& tell, const EndRow& end_row) {
    while (!iterations_.empty() && iterations_.front().back()->is_next_scale_there()) {
      const std::vector<std::shared_ptr<StepLetter>> letters = std::move(iterations_.front());
      iterations_.pop_front();
      std::optional<float> skipped_scale;  // one line an iteration
      for (const auto& letter : letters) {
        const StepOutcome outcome = letter->outcome();
        if (outcome.found_inf && !skipped_scale) skipped_scale = outcome.scale;
      }
      skipped_scale ? tell(*skipped_scale, letters.back()->next_scale()) : end_row();
    }
  }

 private:
  std::list<std::vector<std::shared_ptr<StepLetter>>> iterations_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
