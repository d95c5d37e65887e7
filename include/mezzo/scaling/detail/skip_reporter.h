#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/grad_scaler_options.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/graph_capture.h>
#include <mezzo/optim/step_result.h>
#include <mezzo/scaling/skipped_step.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
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

/// Detects clipping of scaled gradients by norm, and warns once (TORCH_WARN). The norm of the
/// scaled gradients is then the same round number in each step, while their largest magnitude
/// varies (on a constant batch or model both are constant). The norm of the unscaled gradients is
/// not round, as it would be after clipping unscaled gradients.
class ScaledClipDetector {
 public:
  /// Observes one step. Ignores steps without a norm, and with an inf or NaN.
  void observe(const StepResult& step) {
    const double unscaled_norm = step.grad_norm().value_or(HUGE_VAL);
    if (has_warned_ || is_nonfinite(unscaled_norm)) return;
    const double norm = unscaled_norm * step.scale();
    const double max_abs = *step.grad_max_abs() * step.scale();
    if (!is_close(norm, norm_)) {
      steps_ = 0;
      norm_ = norm;
      lowest_max_abs_ = highest_max_abs_ = max_abs;
    }
    lowest_max_abs_ = std::min(lowest_max_abs_, max_abs);
    highest_max_abs_ = std::max(highest_max_abs_, max_abs);
    const bool varies = highest_max_abs_ - lowest_max_abs_ > 1e-2 * highest_max_abs_;
    if (++steps_ < 5 || !varies || !is_round(norm) || is_round(unscaled_norm)) return;
    has_warned_ = true;
    TORCH_WARN("GradScaler: the norm of the scaled gradients has been ", norm, " for ", steps_,
               " consecutive steps, as if scaled gradients were clipped. With the loss scale ",
               step.scale(), " this limits the norm of the unscaled gradients to ", unscaled_norm,
               "; call scaler.unscale_(optimizer) before clipping, or clip with "
               "scaler.step(optimizer, {.max_norm = ...})");
  }

 private:
  /// Relative tolerance 2e-4: clip_grad_norm_ accumulates in float32, and is up to 9e-5 off.
  static bool is_close(double a, double b) { return std::abs(a - b) <= 2e-4 * b; }
  /// Returns whether `value` has at most three significant decimal digits, two below 1e-3.
  static bool is_round(double value) {
    if (!(value > 0)) return false;
    const double digits = value < 1e-3 ? 2 : 3;
    const double unit = std::pow(10.0, std::floor(std::log10(value)) - (digits - 1));
    return is_close(value, std::round(value / unit) * unit);
  }

  double norm_ = 0, lowest_max_abs_ = 0, highest_max_abs_ = 0;
  int steps_ = 0;
  bool has_warned_ = false;
};

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
  void observe(StepResult result) { results_.push_back(std::move(result)); }

  /// Discards the results of this iteration.
  void discard_iteration() noexcept { results_.clear(); }

  /// Ends the iteration, and reports all iterations whose results are ready, in order. No host
  /// sync: on a device a skip is reported when the results of the next iteration are ready, since
  /// they have the next scale.
  /// \param scale  the scale of the next iteration
  void finish_iteration(const GradScalerOptions& options, const at::Tensor& scale) {
    Results results = std::exchange(results_, {});
    is_used_ = false;
    if (current_capture_id(scale.device()) != 0) return;  // callbacks cannot be captured
    if (!results.empty() || iterations_.empty()) iterations_.push_back(std::move(results));
    while (!iterations_.empty() && std::ranges::all_of(iterations_[0], &StepResult::ready)) {
      std::optional<float> skipped_scale, next_scale;
      for (const StepResult& result : iterations_[0]) {
        if (result.found_inf()) skipped_scale = result.scale();
      }
      if (scale.is_cpu()) {
        next_scale = scale.item<float>();
      } else if (iterations_.size() > 1 && iterations_[1][0].ready()) {
        next_scale = iterations_[1][0].scale();
      }
      if (skipped_scale && !next_scale) return;
      results = std::exchange(iterations_[0], {});
      iterations_.pop_front();
      for (const StepResult& result : results) clip_detector_.observe(result);
      if (skipped_scale) {
        notify(options, *skipped_scale, *next_scale);
      } else {
        consecutive_skips_at_min_scale_ = consecutive_skips_ = 0;
      }
    }
  }

 private:
  using Results = std::vector<StepResult>;

  static void print(const SkippedStep& skipped) {
    const std::string line = limited_skip_message(skipped);
    if (!line.empty()) std::cerr << line + "\n";
  }

  void notify(const GradScalerOptions& options, float scale, float next_scale) {
    const bool is_at_min_scale = scale == next_scale && next_scale <= options.min_scale;
    consecutive_skips_at_min_scale_ = is_at_min_scale ? consecutive_skips_at_min_scale_ + 1 : 0;
    ++consecutive_skips_;
    const Callback callback = callback_;  // a copy: the callback may replace itself
    if (!callback) return;
    callback({.loss_id = options.loss_id,
              .scale = scale,
              .next_scale = next_scale,
              .consecutive_skips_at_min_scale = consecutive_skips_at_min_scale_,
              .consecutive_skips = consecutive_skips_});
  }

  Callback callback_ = &print;
  int64_t consecutive_skips_at_min_scale_ = 0, consecutive_skips_ = 0;
  Results results_;                 // of this iteration
  std::deque<Results> iterations_;  // not reported yet: results or the next scale are not ready
  ScaledClipDetector clip_detector_;
  mutable bool is_used_ = false;     // the scale was used in this iteration
  mutable bool has_warned_ = false;  // that it was not used
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
