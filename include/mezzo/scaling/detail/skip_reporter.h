#pragma once

#include <mezzo/base/grad_scaler_options.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/graph_capture.h>
#include <mezzo/optim/detail/optimizer_archive.h>
#include <mezzo/optim/step_result.h>
#include <mezzo/scaling/detail/per_optimizer_state.h>
#include <mezzo/scaling/detail/scaled_clip_detector.h>
#include <mezzo/scaling/skipped_step.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/Type.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Observes the results of a GradScaler's steps: calls the skip callback for each iteration with a
/// skipped step, and warns once about clipped scaled gradients and about steps without a scaled
/// loss.
class SkipReporter {
 public:
  using Callback = std::function<void(const SkippedStep&)>;

  void set_callback(Callback callback) { callback_ = std::move(callback); }

  /// Records that a loss was scaled, or that a caller read the scale. A captured use disables the
  /// warning, since replays do not run this code.
  void record_use(bool is_captured = false) const noexcept {
    is_used_ = true;
    has_warned_ = has_warned_ || is_captured;
  }

  /// Warns once if the scale was not used in this iteration.
  void warn_unless_used(const GradScalerOptions& options, const char* call) {
    if (options.mode != LossScaleMode::dynamic || is_used_ || std::exchange(has_warned_, true))
      return;
    TORCH_WARN(
        "GradScaler: ", call,
        "() is called, but no loss was scaled since the last update(), which may have changed the "
        "scale that divides the gradients; call scaler.scale(loss).backward() in each iteration, "
        "and scaler.update() once at its end, after the steps of all optimizers");
  }

  /// Adds the result of a step in this iteration.
  void observe(const OptimizerIdentity& optimizer, StepResult result) {
    const auto* const previous = std::exchange(last_optimizer_, optimizer.address);
    has_several_optimizers_ |= previous != nullptr && previous != optimizer.address;
    steps_.push_back({optimizer, std::move(result)});
  }

  void discard_iteration() noexcept { steps_.clear(); }

  /// Ends the iteration, and reports all iterations whose results are ready, in order. No host
  /// sync: on a device a skip is reported when the results of the next iteration are ready, since
  /// they have the next scale.
  /// \param scale  the scale of the next iteration
  void finish_iteration(const GradScalerOptions& options, const at::Tensor& scale) {
    Steps steps = std::exchange(steps_, {});
    is_used_ = false;
    if (current_capture_id(scale.device()) != 0) return;  // callbacks cannot be captured
    if (!steps.empty() || iterations_.empty()) iterations_.push_back(std::move(steps));
    while (!iterations_.empty() &&
           std::ranges::all_of(iterations_[0], &StepResult::ready, &Step::result)) {
      std::optional<float> skipped_scale, next_scale;
      for (const Step& step : iterations_[0]) {
        if (step.result.found_inf()) skipped_scale = step.result.scale();
      }
      if (scale.is_cpu()) {
        next_scale = scale.item<float>();
      } else if (iterations_.size() > 1 && iterations_[1][0].result.ready()) {
        next_scale = iterations_[1][0].result.scale();
      }
      if (skipped_scale && !next_scale) return;
      steps = std::exchange(iterations_[0], {});
      iterations_.pop_front();
      for (const Step& step : steps) clip_detector_.observe(step.result);
      if (skipped_scale) {
        notify_skipped_step(options, steps, *skipped_scale, *next_scale);
      } else {
        consecutive_skips_at_min_scale_ = consecutive_skips_ = 0;
      }
    }
  }

 private:
  struct Step {
    OptimizerIdentity optimizer;
    StepResult result;
  };
  using Steps = std::vector<Step>;

  static void print_skip_message(const SkippedStep& skipped) {
    const std::string line = limited_skip_message(skipped);
    if (!line.empty()) std::cerr << line + "\n";
  }

  void notify_skipped_step(const GradScalerOptions& options, const Steps& steps, float scale,
                           float next_scale) {
    const bool is_at_min_scale = scale == next_scale && next_scale <= options.min_scale;
    consecutive_skips_at_min_scale_ = is_at_min_scale ? consecutive_skips_at_min_scale_ + 1 : 0;
    ++consecutive_skips_;
    const Callback callback = callback_;  // a copy: the callback may replace itself
    if (!callback) return;
    std::vector<const torch::optim::Optimizer*> optimizers;
    std::string description;
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const OptimizerIdentity& optimizer = steps[i].optimizer;
      if (!steps[i].result.found_inf()) continue;
      optimizers.push_back(optimizer.address);
      if (!has_several_optimizers_) continue;
      description += c10::str(
          description.empty() ? "" : ", ", "optimizer ", i + 1, " of ", steps.size(), " (",
          archive_class_name(c10::demangle(optimizer.type->name())), ", ", optimizer.num_params,
          optimizer.num_params == 1 ? " parameter)" : " parameters)");
    }
    callback({.loss_id = options.loss_id,
              .scale = scale,
              .next_scale = next_scale,
              .consecutive_skips_at_min_scale = consecutive_skips_at_min_scale_,
              .consecutive_skips = consecutive_skips_,
              .optimizers = std::move(optimizers),
              .description = std::move(description)});
  }

  Callback callback_ = &print_skip_message;
  int64_t consecutive_skips_at_min_scale_ = 0, consecutive_skips_ = 0;
  const torch::optim::Optimizer* last_optimizer_ = nullptr;  // compared, never dereferenced
  bool has_several_optimizers_ = false;
  Steps steps_;                   // of this iteration
  std::deque<Steps> iterations_;  // not reported yet: results or the next scale are not ready
  ScaledClipDetector clip_detector_;
  mutable bool is_used_ = false;     // the scale was used in this iteration
  mutable bool has_warned_ = false;  // about an unused scale
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
