#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/detail/number_text.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// How many finite steps in a row with the same number make a warning.
inline constexpr int64_t kClippedSteps = 8;
/// How many steps are looked at. A bound that is 65536 times too tight holds from the first step
/// on; a number that begins to hold later (a converged model's) is no sign of one.
inline constexpr int64_t kWatchedSteps = 64;
/// Relative difference below which two numbers count as equal. libtorch's clip_grad_norm_ misses
/// max_norm by up to 9e-5, because it sums millions of squares in float. (bfloat16 gradients miss
/// it by 7e-3, and are not recognised.)
inline constexpr double kSameNumber = 2e-4;
/// Relative difference that the gradients of different batches exceed.
inline constexpr double kOtherNumber = 1e-2;

/// Returns whether `value` has two significant digits, as bounds that people write do.
inline bool is_round_number(double value) {
  const double unit = std::pow(10.0, std::floor(std::log10(value)) - 1.0);
  const double nearest = std::round(value / unit) * unit;
  return std::abs(value - nearest) <= kSameNumber * value;
}

/// Returns whether `value` may be the scaled gradient of a mean over n < 2^14 outputs of a loss
/// with constant slopes (L1, hinge) and weight w. The largest magnitude, a bias's, is then w *
/// scale / n in every step, without any clipping. Few bounds have this form (4 and 8 at a scale of
/// 65536); 0.1, 0.5, 1, 2, 5 and 10 do not.
inline bool may_be_slope_of_mean(double value, double scale) {
  for (const double weight : {1., 2., 5., 10., 20., 50., 100., 0.5, 0.2, 0.1, 0.05, 0.02, 0.01}) {
    const double outputs = weight * scale / value;
    if (outputs < 0x1p14 && std::abs(outputs - std::round(outputs)) <= 1e-6 * outputs) return true;
  }
  return false;
}

/// Counts the steps over which one number stayed the same, and notes how far another one moved
/// meanwhile.
class HeldNumber {
 public:
  void see(double value, double other) {
    if (steps_ == 0 || std::abs(value - value_) > kSameNumber * value_) *this = {value, other};
    lowest_other_ = std::min(lowest_other_, other);
    highest_other_ = std::max(highest_other_, other);
    ++steps_;
  }

  /// Returns whether the number looks like a bound on scaled gradients: it held while the gradients
  /// changed, it is round, and without the scale it is not. A bound on true gradients (max_norm
  /// times the scale) is round without the scale, and no mistake.
  bool is_bound_on_scaled(double scale) const {
    return steps_ >= kClippedSteps &&
           highest_other_ - lowest_other_ > kOtherNumber * highest_other_ &&
           is_round_number(value_) && !is_round_number(value_ / scale);
  }
  double value() const noexcept { return value_; }
  int64_t steps() const noexcept { return steps_; }

  HeldNumber() = default;

 private:
  HeldNumber(double value, double other)
      : value_(value), lowest_other_(other), highest_other_(other) {}

  double value_ = 0;
  double lowest_other_ = 0;
  double highest_other_ = 0;
  int64_t steps_ = 0;
};

/// Warns once (TORCH_WARN) when the gradients of a run look as if they had been clipped while they
/// still carried the loss scale. Clipping by norm holds the norm, and the largest magnitude moves
/// from batch to batch; clipping by value holds the largest magnitude, and the norm moves. The same
/// gradients in every step (a toy) hold both, and are not reported.
class ClipWatch {
 public:
  /// Looks at one step of an optimizer whose gradients carried `scale` when `step` was called.
  /// \param norm, max_abs  of the gradients without the scale
  void see(double scale, double norm, double max_abs) {
    if (has_told_ || looks_ == kWatchedSteps) return;
    ++looks_;
    if (nonfinite_bits(norm) || nonfinite_bits(max_abs) || !(max_abs > 0)) return;
    norm_.see(norm * scale, max_abs * scale);
    max_abs_.see(max_abs * scale, norm * scale);
    if (norm_.is_bound_on_scaled(scale)) {
      tell("norm", "step(optimizer, {.max_norm = ...})", norm_, scale);
    } else if (max_abs_.is_bound_on_scaled(scale) &&
               !may_be_slope_of_mean(max_abs_.value(), scale)) {
      tell("largest magnitude", "mezzo::clip_grad_value_(scaler, optimizer, ...)", max_abs_, scale);
    }
  }

 private:
  void tell(const char* what, const char* instead, const HeldNumber& held, double scale) {
    has_told_ = true;
    TORCH_WARN("Telemetry: the ", what, " of the scaled gradients has been ",
               digits(held.value(), 4), " for ", held.steps(),
               " steps in a row: it looks as if gradients were clipped while they still carry the "
               "loss scale ",
               scale, ", which is a bound of ", digits(held.value() / scale, 4),
               " on the true ones; call unscale_(optimizer) before clipping, or ", instead);
  }

  HeldNumber norm_;
  HeldNumber max_abs_;
  int64_t looks_ = 0;
  bool has_told_ = false;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
