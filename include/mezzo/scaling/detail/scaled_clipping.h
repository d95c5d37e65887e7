#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/step_result.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Warns once (TORCH_WARN) where a loop clips gradients by norm while they still carry the loss
/// scale. The norm, with the scale, is then the same round number in step after step, while the
/// largest gradient moves. Without the scale it is no round number, as a bound on true gradients
/// is. Steps over one batch, or of a model that does not move, hold the largest gradient too.
class ScaledClipping {
 public:
  /// Looks at one step. Steps without a norm, and with an inf or NaN, tell nothing.
  void see(const StepOutcome& step) {
    if (has_told_ || !step.grad_norm || nonfinite_bits(*step.grad_norm)) return;
    const double norm = *step.grad_norm * step.scale;
    const double largest = *step.grad_max_abs * step.scale;
    if (!is_same(norm, norm_)) {
      steps_ = 0;
      norm_ = norm;
      lowest_ = highest_ = largest;
    }
    lowest_ = std::min(lowest_, largest);
    highest_ = std::max(highest_, largest);
    const bool moves = highest_ - lowest_ > 1e-2 * highest_;
    if (++steps_ < 5 || !moves || !is_round(norm)) return;
    if (is_round(*step.grad_norm)) return;
    has_told_ = true;
    TORCH_WARN("GradScaler: the norm of the scaled gradients has been ", norm, " for ", steps_,
               " steps in a row: it looks as if gradients were clipped while they still carry the "
               "loss scale ",
               step.scale, ", which is a bound of ", *step.grad_norm,
               " on the true ones; call scaler.unscale_(optimizer) before clipping, or leave "
               "clipping to scaler.step(optimizer, {.max_norm = ...})");
  }

 private:
  /// To four digits: libtorch's clip_grad_norm_ sums in float, and misses its bound by up to 9e-5.
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
  bool has_told_ = false;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
