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

#include <cmath>
#include <memory>
#include <vector>

#ifdef MEZZO_WITH_CUDA
#include <mezzo/kernels/cuda_launch.h>
#endif

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Carries four doubles about one step to the host: scale, found_inf, sum of squares, largest
/// magnitude. Kernels of mezzo's write the numbers into pinned memory; on devices without them ATen
/// copies the numbers there. An event behind the write tells when the numbers have arrived, and the
/// host reads them no earlier. On the CPU they are there at once.
///
/// A letter that is made during a capture belongs to the graph, and each replay sends it anew.
/// Replays do not notify the host: a captured letter never becomes ready, and reading it
/// synchronises.
class StepLetter final : public StepSlot {
 public:
  /// \param device  where the numbers will be; the host's memory for them is allocated here
  explicit StepLetter(at::Device device)
      : device_(device), is_captured_(capture_on(device) != 0), event_(device.type()) {
    const c10::InferenceMode no_inference(false);  // a later step writes it, in any mode
    numbers_ = empty_on_host({4}, at::kDouble, device);
    numbers_.mutable_data_ptr<double>()[1] = kNoReplay;
  }

  at::Device device() const noexcept { return device_; }
  bool is_captured() const noexcept { return is_captured_; }

  /// Sends the numbers of a step. No host sync from a device.
  /// \param scale  a float of one element
  /// \param verdict  the totals of all devices; sum_of_squares and max_abs may be undefined
  /// \param was_unscaled  whether the gradients had lost the scale before the step
  void send(const at::Tensor& scale, const Verdict& verdict, bool was_unscaled = false) {
    has_norm_ = verdict.sum_of_squares.defined();
    was_unscaled_ = was_unscaled;
    found_inf_ = verdict.found_inf;
    if (device_.is_cpu()) {
      double* to = numbers_.mutable_data_ptr<double>();
      for (const at::Tensor& number :
           {scale, verdict.found_inf, verdict.sum_of_squares, verdict.max_abs}) {
        *to++ = number.defined() ? number.item<double>() : 0.0;
      }
      return;
    }
    has_arrived_ = false;
    write(on_device(scale, device_), verdict.on(device_));
    if (!is_captured_)
      event_.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }

  /// Returns whether the device will not write the numbers any more. An event may not be queried
  /// during a capture.
  /// \throws c10::Error for a device that has failed
  bool has_arrived() const {
    if (!has_arrived_ && !is_captured_ && capture_on(device_) == 0) has_arrived_ = event_.query();
    return has_arrived_;
  }
  bool ready() const noexcept override {
    try {
      return has_arrived();
    } catch (const c10::Error&) {
      return false;  // `outcome` throws it
    }
  }

  /// Returns the outcome of the step; of a captured one, that of the last replay.
  /// \throws c10::Error while the device is being captured, and for a captured step before the
  ///   first replay
  const StepOutcome& outcome() override {
    if (!has_arrived_) {
      TORCH_CHECK(capture_on(device_) == 0,
                  "StepResult: asked for an outcome while a CUDA graph is being captured, which "
                  "runs nothing; ask after the capture, and after a replay for that of a captured "
                  "step");
      if (is_captured_) {
        c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
      } else {
        event_.synchronize();
        has_arrived_ = true;
      }
    }
    outcome_ = read();
    return outcome_;
  }
  /// Returns the outcome by the numbers that have arrived.
  StepOutcome read() const {
    const double* const numbers = numbers_.const_data_ptr<double>();
    TORCH_CHECK(numbers[1] != kNoReplay,
                "StepResult: this step was captured into a CUDA graph that has not been replayed "
                "yet; replay it, and ask then");
    StepOutcome outcome{.ran = numbers[1] == 0.0,
                        .found_inf = numbers[1] != 0.0,
                        .scale = static_cast<float>(numbers[0]),
                        .was_unscaled = was_unscaled_};
    if (has_norm_) outcome.grad_norm = std::sqrt(numbers[2]);
    if (has_norm_) outcome.grad_max_abs = numbers[3];
    if (outcome.ran) outcome.value = at::Tensor();  // what a step without closure returns
    return outcome;
  }
  at::Tensor found_inf_on_device() const override {
    return device_.is_cpu() ? at::Tensor() : found_inf_;
  }
  double sum_of_squares() const { return numbers_.const_data_ptr<double>()[2]; }

 private:
  static constexpr double kNoReplay = -1.0;  // in place of found_inf, which is not negative

  void write(const at::Tensor& scale, const Verdict& verdict) {
#ifdef MEZZO_WITH_CUDA
    if (has_cuda_kernels(device_)) {
      cuda::write_letter_(scale, verdict.found_inf, verdict.sum_of_squares, verdict.max_abs,
                          numbers_);
      return;
    }
#endif
    const auto wide = device_.is_mps() ? at::kFloat : at::kDouble;
    std::vector<at::Tensor> all;
    for (const at::Tensor& number :
         {scale, verdict.found_inf, verdict.sum_of_squares, verdict.max_abs}) {
      all.push_back(number.defined() ? number.to(wide).reshape({})
                                     : at::zeros({}, scale.options().dtype(wide)));
    }
    // The stack may be freed as soon as its copy is queued: the allocator gives its memory away
    // again in the order of the stream.
    numbers_.copy_(at::stack(all), /*non_blocking=*/true);
  }

  at::Device device_;
  bool is_captured_;
  bool has_norm_ = false;
  bool was_unscaled_ = false;
  mutable bool has_arrived_ = !is_captured_;  // nothing is on its way
  mutable c10::Event event_;
  at::Tensor numbers_;
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
      const bool is_free =
          letter.use_count() == 1 && letter->device() == device && letter->has_arrived();
      if (is_free && (device.is_cpu() || capture_on(device) == 0)) return letter;
    }
    return letters_.emplace_back(std::make_shared<StepLetter>(device));
  }

 private:
  std::vector<std::shared_ptr<StepLetter>> letters_;
};

/// Returns a letter of the pool, or, on the CPU, where it is read at once, a new one: kept between
/// a model's large blocks, it would split the memory that they leave to each other.
inline std::shared_ptr<StepLetter> letter_for(LetterPool& pool, at::Device device) {
  return device.is_cpu() ? std::make_shared<StepLetter>(device) : pool.letter_for(device);
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
