#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/devices.h>
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

/// The numbers of a step: loss scale, found_inf, sum of squares, largest magnitude.
using StepOutcomeValues = std::array<double, 4>;

/// Returns the outcome that the numbers of a step without closure stand for.
/// \param has_norm  whether the last two are known
inline StepOutcome make_outcome(const StepOutcomeValues& numbers, bool has_norm,
                                bool was_unscaled) {
  const auto [scale, found_inf, sum_of_squares, max_abs] = numbers;
  StepOutcome outcome{.ran = found_inf == 0,
                      .found_inf = found_inf != 0,
                      .scale = static_cast<float>(scale),
                      .was_unscaled = was_unscaled};
  if (has_norm) {
    outcome.grad_norm = std::sqrt(sum_of_squares);
    outcome.grad_max_abs = max_abs;
  }
  if (outcome.ran) outcome.value = at::Tensor();
  return outcome;
}

/// Carries the four numbers of one step from a device to the host, as doubles. Kernels of mezzo's
/// write them into pinned memory; on devices without them ATen copies them there. An event behind
/// the write tells when the numbers have arrived, and the host reads them no earlier.
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

  /// Sends the numbers of a step. No host sync.
  /// \param scale  a float of one element
  /// \param verdict  the totals of all devices; sum_of_squares and max_abs may be undefined
  /// \param was_unscaled  whether the gradients had lost the scale before the step
  void send(const at::Tensor& scale, const Verdict& verdict, bool was_unscaled) {
    is_read_ = false;
    has_norm_ = verdict.sum_of_squares.defined();
    was_unscaled_ = was_unscaled;
    found_inf_ = verdict.found_inf;
    has_arrived_ = false;
    write(on_device(scale, device_), verdict.on(device_));
    if (!is_captured_)
      event_.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }

  /// Returns whether the device will not write the numbers any more. An event may not be queried
  /// during a capture.
  bool ready() const noexcept override {
    try {
      if (!has_arrived_ && !is_captured_ && capture_on(device_) == 0) {
        const RelaxedCaptureModeGuard relaxed(device_);
        has_arrived_ = event_.query();
      }
    } catch (const c10::Error&) {
      return false;  // of a device that has failed: `outcome` throws it
    }
    return has_arrived_;
  }

  /// Returns the outcome of the step; of a captured one, that of the last replay.
  /// Scaler and user may ask at once.
  /// \throws c10::Error while the device is being captured, and for a captured step before the
  ///   first replay
  const StepOutcome& outcome() override {
    const std::lock_guard lock(reading_);
    if (is_read_) return outcome_;
    if (!has_arrived_) {
      TORCH_CHECK(capture_on(device_) == 0,
                  "StepResult: asked for an outcome while a CUDA graph is being captured, which "
                  "runs nothing; ask after the capture, and after a replay for that of a captured "
                  "step");
      const RelaxedCaptureModeGuard relaxed(device_);
      if (is_captured_) {
        c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
      } else {
        event_.synchronize();
        has_arrived_ = true;
      }
    }
    StepOutcomeValues numbers;
    std::copy_n(numbers_.const_data_ptr<double>(), numbers.size(), numbers.begin());
    TORCH_CHECK(numbers[1] != kNoReplay,
                "StepResult: this step was captured into a CUDA graph that has not been replayed "
                "yet; replay it, and ask then");
    outcome_ = make_outcome(numbers, has_norm_, was_unscaled_);
    is_read_ = !is_captured_;
    return outcome_;
  }
  at::Tensor found_inf_on_device() const override { return found_inf_; }

 private:
  static constexpr double kNoReplay = -1.0;  // in place of found_inf, which is not negative

  void write(const at::Tensor& scale, const Verdict& verdict) {
    if (kernel_backend(device_) == KernelBackend::cuda) {
      return cuda_kernels()->write_letter_(scale, verdict.found_inf, verdict.sum_of_squares,
                                           verdict.max_abs, numbers_, address_);
    }
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
  mutable std::atomic<bool> has_arrived_ = !is_captured_;  // nothing is on its way
  std::mutex reading_;
  bool is_read_ = false;
  mutable c10::Event event_;
  at::Tensor numbers_;
  void* address_ = nullptr;  // of numbers_ on the device
  at::Tensor found_inf_;
  StepOutcome outcome_;
};

/// The letters of a scaler, which live as long as the scaler. A letter that nothing else holds, and
/// that no device will write, is used again; a captured letter, which its graph keeps writing, is
/// not.
class LetterPool {
 public:
  /// Returns the result of a step: known on the CPU, where the numbers are read, and otherwise in a
  /// letter from the scale's device.
  StepResult result_of(const at::Tensor& scale, const Verdict& verdict, bool was_unscaled) {
    if (scale.is_cpu()) {
      const auto read = [](const at::Tensor& number) {
        return number.defined() ? number.item<double>() : 0.0;
      };
      return StepResult(make_outcome({read(scale), read(verdict.found_inf),
                                      read(verdict.sum_of_squares), read(verdict.max_abs)},
                                     verdict.sum_of_squares.defined(), was_unscaled));
    }
    const std::shared_ptr<StepLetter> letter = letter_for(scale.device());
    letter->send(scale, verdict, was_unscaled);
    return StepResult(letter);
  }

 private:
  std::shared_ptr<StepLetter> letter_for(at::Device device) {
    for (const std::shared_ptr<StepLetter>& letter : letters_) {
      const bool is_free = letter.use_count() == 1 && letter->device() == device && letter->ready();
      if (!is_free || capture_on(device) != 0) continue;
      std::atomic_thread_fence(std::memory_order_acquire);  // use_count alone is a relaxed read
      return letter;
    }
    return letters_.emplace_back(std::make_shared<StepLetter>(device));
  }

  std::vector<std::shared_ptr<StepLetter>> letters_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
