#pragma once

#include <mezzo/base/detail/capture.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/devices.h>
#include <mezzo/optim/step_result.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#ifdef MEZZO_WITH_CUDA
#include <mezzo/kernels/cuda_launch.h>
#endif

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Carries four doubles about one step to the host: scale, found_inf, sum of squares, largest
/// magnitude. Kernels of mezzo's write the numbers into pinned memory; on devices without them ATen
/// copies the numbers there. An event behind the write tells when the numbers have arrived, and the
/// host reads them no earlier.
///
/// A letter that is made during a capture belongs to the graph, and each replay sends it anew.
/// Replays do not notify the host: a captured letter never becomes ready, and reading it
/// synchronises.
class StepLetter {
 public:
  /// \param device  where the numbers will be; the host's memory for them is allocated here
  explicit StepLetter(at::Device device)
      : device_(device), is_captured_(capture_on(device) != 0), event_(device.type()) {
    const c10::InferenceMode no_inference(false);  // a later step writes it, in any mode
    numbers_ = empty_on_host({kNumbers}, at::kDouble, device);
    numbers_.mutable_data_ptr<double>()[1] = kNoReplay;
  }

  at::Device device() const noexcept { return device_; }
  bool is_captured() const noexcept { return is_captured_; }
  /// Returns the `found_inf` of the last verdict that was sent, on its device.
  const at::Tensor& found_inf() const noexcept { return found_inf_; }

  /// Makes the letter ready for another step.
  void clear() { is_under_way_ = has_arrived_ = false; }

  /// Sends the numbers of a step. No host sync.
  /// \param scale  a float of one element
  /// \param verdict  the totals of all devices; sum_of_squares and max_abs may be undefined
  /// \param was_unscaled  whether the gradients had lost the scale before the step
  void send(const at::Tensor& scale, const Verdict& verdict, bool was_unscaled = false) {
    write(scale, verdict, was_unscaled, /*non_blocking=*/true);
    mark();
  }
  /// Sends the numbers of a step, and waits until they are there.
  /// \throws c10::Error while the device is being captured
  void send_and_wait(const at::Tensor& scale, const Verdict& verdict, bool was_unscaled = false) {
    check_is_no_capture();
    write(scale, verdict, was_unscaled, /*non_blocking=*/false);
    has_arrived_ = true;
  }

  /// Returns whether `outcome` has the numbers that were sent. Never waits. An event may not be
  /// queried during a capture.
  bool is_there() {
    if (is_under_way_ && !has_arrived_ && capture_on(device_) == 0) has_arrived_ = event_.query();
    return has_arrived_;
  }
  /// Returns whether the device may yet write the numbers. Never waits.
  bool is_on_its_way() { return is_captured_ || (is_under_way_ && !is_there()); }

  /// Waits until the numbers are there; of a captured letter, the numbers of the last replay.
  /// \throws c10::Error while the device is being captured
  void wait() {
    if (has_arrived_) return;
    check_is_no_capture();
    if (is_captured_) {
      c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
    } else {
      event_.synchronize();
      has_arrived_ = true;
    }
  }

  /// Returns the outcome of the step, once the numbers are there.
  /// \throws c10::Error for a captured step before the first replay
  StepOutcome outcome() const {
    const double* const numbers = numbers_.const_data_ptr<double>();
    TORCH_CHECK(numbers[1] != kNoReplay,
                "StepResult: this step was captured into a CUDA graph that has not been replayed "
                "yet; replay it, and ask then");
    return StepOutcome::of({numbers[0], numbers[1], numbers[2], numbers[3]}, has_norm_,
                           was_unscaled_);
  }
  double sum_of_squares() const { return numbers_.const_data_ptr<double>()[2]; }

 private:
  static constexpr int64_t kNumbers = 4;
  static constexpr double kNoReplay = -1.0;  // in place of found_inf, which is not negative

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
    const at::Tensor own_scale = on_device(scale, device_);
    const Verdict own = verdict.on(device_);
#ifdef MEZZO_WITH_CUDA
    if (has_cuda_kernels(device_)) {
      cuda::write_letter_(own_scale, own.found_inf, own.sum_of_squares, own.max_abs, numbers_);
      if (!non_blocking) current_stream().synchronize();
      return;
    }
#endif
    numbers_.copy_(packed(own_scale, own), non_blocking);
  }

  /// Returns the four numbers as one tensor on `device_`. It may be freed as soon as its copy to
  /// the host is queued: the allocator gives its memory away again in the order of the stream.
  at::Tensor packed(const at::Tensor& scale, const Verdict& verdict) const {
    const auto wide = device_.is_mps() ? at::kFloat : at::kDouble;
    const at::Tensor none = has_norm_ ? at::Tensor() : at::zeros({}, scale.options().dtype(wide));
    const at::Tensor& sum_of_squares = has_norm_ ? verdict.sum_of_squares : none;
    const at::Tensor& max_abs = has_norm_ ? verdict.max_abs : none;
    std::vector<at::Tensor> all;
    for (const at::Tensor& number : {scale, verdict.found_inf, sum_of_squares, max_abs}) {
      all.push_back(number.to(wide).reshape({}));
    }
    return at::stack(all);
  }

  void mark() {
    has_arrived_ = device_.is_cpu();  // at once
    is_under_way_ = !device_.is_cpu() && !is_captured_;
    if (is_under_way_) event_.record(current_stream());
  }

  c10::Stream current_stream() const {
    return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  }

  at::Device device_;
  bool is_captured_;
  bool has_norm_ = false;
  bool was_unscaled_ = false;
  bool is_under_way_ = false;
  bool has_arrived_ = false;
  c10::Event event_;
  at::Tensor numbers_;
  at::Tensor found_inf_;
};

/// The outcome of a step that a device decides, read from its letter.
class DeviceStepSlot final : public StepSlot {
 public:
  explicit DeviceStepSlot(std::shared_ptr<StepLetter> letter)
      : letter_(std::move(letter)), found_inf_(letter_->found_inf()) {}

  /// Returns false for a device that has failed: `outcome` throws its error.
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

/// The letters of a scaler, which live as long as the scaler. A letter that nothing else holds, and
/// that no device will write, is used again; a captured letter, which its graph keeps writing, is
/// not.
class LetterPool {
 public:
  /// Returns a letter for one step on `device`.
  std::shared_ptr<StepLetter> letter_for(at::Device device) {
    for (const std::shared_ptr<StepLetter>& letter : letters_) {
      const bool is_free = letter.use_count() == 1 && letter->device() == device;
      if (!is_free || capture_on(device) != 0 || letter->is_on_its_way()) continue;
      letter->clear();
      return letter;
    }
    return letters_.emplace_back(std::make_shared<StepLetter>(device));
  }

 private:
  std::vector<std::shared_ptr<StepLetter>> letters_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
