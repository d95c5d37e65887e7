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

/// Detects a loop that has_max_norm gradients by norm while they still carry the loss scale, and
/// warns once (TORCH_WARN). The norm, with the scale, is then the same round number in step after
/// step, while the largest gradient moves. Without the scale it is no round number, as a bound on
/// true gradients is. Steps over one batch, or of a model that does not move, hold the largest
/// gradient too.
class ScaledClipDetector {
 public:
  /// Looks at one step. Steps without a norm, and with an inf or NaN, are ignored.
  void observe(const StepResult& step) {
    const double bound = step.grad_norm().value_or(HUGE_VAL);
    if (has_warned_ || is_nonfinite(bound)) return;
    const double norm = bound * step.scale();
    const double largest = *step.grad_max_abs() * step.scale();
    if (!is_same(norm, norm_)) {
      steps_ = 0;
      norm_ = norm;
      lowest_ = highest_ = largest;
    }
    lowest_ = std::min(lowest_, largest);
    highest_ = std::max(highest_, largest);
    const bool moves = highest_ - lowest_ > 1e-2 * highest_;
    if (++steps_ < 5 || !moves || !is_round(norm) || is_round(bound)) return;
    has_warned_ = true;
    TORCH_WARN("GradScaler: the norm of the scaled gradients has been ", norm, " for ", steps_,
               " steps in a row: it looks as if gradients were clipped while they still carry the "
               "loss scale ",
               step.scale(), ", which is a bound of ", bound,
               " on the true ones; call scaler.unscale_(optimizer) before clipping, or leave "
               "clipping to scaler.step(optimizer, {.max_norm = ...})");
  }

 private:
  /// Equal within 2e-4: libtorch's clip_grad_norm_ sums in float, and misses its bound by up to
  /// 9e-5.
  static bool is_same(double a, double b) { return std::abs(a - b) <= 2e-4 * b; }
  /// Whether a number is a bound that people write: of two digits, or of three, as 0.125, if it is
  /// not tiny.
  static bool is_round(double value) {
    if (!(value > 0)) return false;
    const double digits = value < 1e-3 ? 2 : 3;
    const double unit = std::pow(10.0, std::floor(std::log10(value)) - (digits - 1));
    return is_same(value, std::round(value / unit) * unit);
  }

  double norm_ = 0, lowest_ = 0, highest_ = 0;
  int steps_ = 0;
  bool has_warned_ = false;
};

/// Observes the results of a GradScaler's steps: calls a function for each iteration that skipped a
/// step, and warns once about gradients that carry the loss scale where they should not, or do not
/// where they should.
class SkipReporter {
 public:
  using Callback = std::function<void(const SkippedStep&)>;

  void set_callback(Callback callback) { callback_ = std::move(callback); }

  /// Records a use of the scale: a loss was multiplied by it, or a caller read it. Replays cannot
  /// be recorded: a captured use disables the warning.
  void note_use(bool is_captured = false) const noexcept {
    is_used_ = true;
    has_warned_ = has_warned_ || is_captured;
  }

  /// Warns once if gradients cannot carry the present scale: it was not used in this iteration.
  void warn_unless_used(const GradScalerOptions& options, const char* call) {
    if (options.mode != LossScaleMode::dynamic || is_used_ || std::exchange(has_warned_, true))
      return;
    TORCH_WARN(
        "GradScaler: ", call,
        "() is called, and no loss was scaled since the last update(). It divides gradients by "
        "the present loss scale, which may have moved: call scaler.scale(loss).backward() in "
        "each iteration, and scaler.update() once at its end, after the steps of all "
        "optimizers");
  }

  /// Adds the result of a step of this iteration.
  void observe(StepResult result) { results_.push_back(std::move(result)); }

  /// Forgets the results of this iteration.
  void discard_iteration() noexcept { results_.clear(); }

  /// Ends the iteration, and reports all iterations whose results have arrived, in order. Never
  /// waits: on a device a skip is reported once the next iteration's results are there, which have
  /// the scale that followed.
  /// \param scale  of the next iteration
  void finish_iteration(const GradScalerOptions& options, const at::Tensor& scale) {
    Results results = std::exchange(results_, {});
    is_used_ = false;
    if (current_capture_id(scale.device()) != 0) return;  // no callback in a graph
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
      for (const StepResult& result : results) clipping_.observe(result);
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
    const Callback callback = callback_;  // a copy: it may silence or replace itself
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
  std::deque<Results> iterations_;  // whose results have not all arrived, or no next scale
  ScaledClipDetector clipping_;
  mutable bool is_used_ = false;     // the scale, in this iteration
  mutable bool has_warned_ = false;  // that it was not
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
