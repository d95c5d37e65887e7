#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/step_result.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

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

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
