/// \file
/// Learning rate curves: linear, polynomial and cosine decay with warmup.
#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// A curve returns the lr factor of the next step after a number of applied steps. A custom curve
/// is any copyable type with these two members.
template <class T>
concept LrCurve = std::copyable<T> && requires(const T& curve, int64_t applied_steps) {
  { curve.factor(applied_steps) } -> std::convertible_to<double>;
  { curve.total_steps } -> std::convertible_to<int64_t>;  // the factor is constant from here on
};

namespace detail {

/// \throws c10::Error, naming the curve's member, unless `is_valid`
template <class Value>
void check_curve_param(bool is_valid, const char* member, Value value, const char* expected) {
  TORCH_CHECK(is_valid, "LrSchedule: ", member, " is ", value, "; it should be ", expected);
}

/// Returns a curve's factor: checks the members, warms up linearly, then calls
/// `decay(done, remaining)` with the fractions of the decay before and after `applied_steps`. The
/// fractions add up to 1, or are both 0 after a warmup of all steps.
template <class Curve, class Decay>
double compute_factor(const Curve& curve, int64_t applied_steps, const Decay& decay) {
  const int64_t warmup = curve.warmup_steps, total = curve.total_steps;
  check_curve_param(total >= 1, "total_steps", total, "at least 1");
  TORCH_CHECK(warmup >= 0 && warmup <= total, "LrSchedule: warmup_steps is ", warmup,
              "; it should be from 0 to total_steps (", total, ")");
  const auto is_factor = [](double value) { return is_at_least(value, 0) && value <= 1; };
  check_curve_param(is_factor(curve.min_factor), "min_factor", curve.min_factor, "from 0 to 1");
  check_curve_param(is_factor(curve.initial_factor), "initial_factor", curve.initial_factor,
                    "from 0 to 1");
  check_curve_param(applied_steps >= 0, "applied_steps", applied_steps, "at least 0");
  if (applied_steps < warmup) {
    const double progress = static_cast<double>(applied_steps) / static_cast<double>(warmup);
    return curve.initial_factor + (1 - curve.initial_factor) * progress;
  }
  const int64_t step = std::min(applied_steps, total);
  const auto length = static_cast<double>(std::max<int64_t>(total - warmup, 1));
  const double done = static_cast<double>(step - warmup) / length;
  const double remaining = static_cast<double>(total - step) / length;
  return curve.min_factor + (1 - curve.min_factor) * decay(done, remaining);
}

}  // namespace detail

// Both curves rise linearly from `initial_factor` to 1 over `warmup_steps`, then decay to
// `min_factor` at `total_steps` and stay there:
//
//   w = warmup_steps, T = total_steps, n = min(applied_steps, T)
//   p = (n - w) / max(1, T - w)      done fraction of the decay
//   q = (T - n) / max(1, T - w)      remaining fraction
//   factor = initial_factor + (1 - initial_factor) n / w         for n < w
//   factor = min_factor + (1 - min_factor) f(p, q)               for n >= w
//
// Each curve names its f and the function of Hugging Face's transformers that it equals, also for
// w = T: there the cosine ends at 1 and the polynomial at min_factor.
//
// factor() throws c10::Error, naming the member, unless applied_steps >= 0, 0 <= w <= T, T >= 1 and
// both factors are in [0, 1].

/// f = q^power: get_polynomial_decay_schedule_with_warmup (lr_end = min_factor * lr), and with
/// power 1 get_linear_schedule_with_warmup. min_factor = 1: warmup only.
struct PolynomialCurve {
  int64_t warmup_steps = 0;   ///< w
  int64_t total_steps = 0;    ///< T, warmup included
  double min_factor = 0;      ///< final factor
  double initial_factor = 0;  ///< factor of the first warmup step
  double power = 1;           ///< positive and finite

  /// Returns the factor after `applied_steps` steps.
  double factor(int64_t applied_steps) const {
    detail::check_curve_param(detail::is_above(power, 0) && !detail::is_nonfinite(power), "power",
                              power, "positive and finite");
    return detail::compute_factor(*this, applied_steps, [this](double /*done*/, double remaining) {
      return std::pow(remaining, power);
    });
  }
};
/// f = q: a PolynomialCurve with the default power.
using LinearCurve = PolynomialCurve;

/// f = (1 + cos(pi p)) / 2: get_cosine_schedule_with_warmup, and with min_factor
/// get_cosine_with_min_lr_schedule_with_warmup. Constant after T, where Hugging Face's rise again.
struct CosineCurve {
  int64_t warmup_steps = 0;   ///< w
  int64_t total_steps = 0;    ///< T, warmup included
  double min_factor = 0;      ///< lowest factor
  double initial_factor = 0;  ///< factor of the first warmup step

  /// Returns the factor after `applied_steps` steps.
  double factor(int64_t applied_steps) const {
    return detail::compute_factor(*this, applied_steps, [](double done, double /*remaining*/) {
      return 0.5 * (1 + std::cos(std::numbers::pi * done));
    });
  }
};

namespace detail {

/// Returns the factors of a curve after 0 to total_steps steps.
template <LrCurve Curve>
std::vector<double> make_lr_factors(const Curve& curve) {
  const int64_t total = curve.total_steps;
  check_curve_param(total >= 0 && total < (int64_t{1} << 24), "total_steps", total,
                    "from 0 to 16777215, up to which a device counts steps");
  std::vector<double> factors;
  factors.reserve(static_cast<std::size_t>(total) + 1);
  for (int64_t n = 0; n <= total; ++n) factors.push_back(curve.factor(n));
  return factors;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
