/// \file
/// Learning rate curves: constant, linear, polynomial, cosine, warmup-stable-decay and one-cycle.
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

/// Shape of a decay.
enum class DecayType { cosine, linear, one_minus_sqrt };

namespace detail {

/// Returns the value after `step` steps of a change from `from` at `begin` to `to` at `end`.
template <class Step>
double anneal(DecayType type, Step step, Step begin, Step end, double from, double to) {
  const auto length = static_cast<double>(end - begin);
  const double ratio = length > 0 ? static_cast<double>(step - begin) / length : step >= end;
  const double done = std::clamp(ratio, 0.0, 1.0);
  const double remaining = type == DecayType::linear ? 1 - done
                           : type == DecayType::cosine
                               ? 0.5 * (1 + std::cos(std::numbers::pi * done))
                               : 1 - std::sqrt(done);
  return to + (from - to) * remaining;
}

/// \throws c10::Error, naming the curve's member, unless `is_valid`
template <class Value>
void check_curve_param(bool is_valid, const char* member, Value value, const char* expected) {
  TORCH_CHECK(is_valid, "LrSchedule: ", member, " is ", value, "; it should be ", expected);
}

inline void check_positive(const char* member, double value) {
  check_curve_param(is_above(value, 0) && !is_nonfinite(value), member, value,
                    "positive and finite");
}

/// Returns a curve's factor: checks the members, warms up linearly, then calls
/// `decay(done, remaining)` with the fractions of the decay before and after `applied_steps`. The
/// fractions add up to 1, or are both 0 after a warmup of all steps.
template <class Curve, class Decay>
double compute_factor(const Curve& curve, int64_t applied_steps, const Decay& decay) {
  const int64_t warmup = curve.warmup_steps, total = curve.total_steps;
  check_curve_param(total >= 1, "total_steps", total, "at least 1");
  check_curve_param(applied_steps >= 0, "applied_steps", applied_steps, "at least 0");
  TORCH_CHECK(warmup >= 0 && warmup <= total, "LrSchedule: warmup_steps is ", warmup,
              "; it should be from 0 to total_steps (", total, ")");
  const auto is_factor = [](double value) { return is_at_least(value, 0) && value <= 1; };
  check_curve_param(is_factor(curve.min_factor), "min_factor", curve.min_factor, "from 0 to 1");
  check_curve_param(is_factor(curve.initial_factor), "initial_factor", curve.initial_factor,
                    "from 0 to 1");
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

// Polynomial and cosine curves rise linearly from `initial_factor` to 1 over `warmup_steps`, then
// decay to `min_factor` at `total_steps` and stay there:
//
//   w = warmup_steps, T = total_steps, n = min(applied_steps, T)
//   p = (n - w) / max(1, T - w)      done fraction of the decay
//   q = (T - n) / max(1, T - w)      remaining fraction
//   factor = initial_factor + (1 - initial_factor) n / w         for n < w
//   factor = min_factor + (1 - min_factor) f(p, q)               for n >= w
//
// Each curve names its f and the function of Hugging Face's transformers that it equals, also for
// w = T: there the cosine ends at 1 and the polynomial at min_factor.

/// f = q^power: get_polynomial_decay_schedule_with_warmup (lr_end = min_factor * lr), and with
/// power 1 get_linear_schedule_with_warmup.
struct PolynomialCurve {
  int64_t warmup_steps = 0;   ///< w
  int64_t total_steps = 0;    ///< T, warmup included
  double min_factor = 0;      ///< final factor
  double initial_factor = 0;  ///< factor of the first warmup step
  double power = 1;           ///< positive and finite

  /// Returns the factor after `applied_steps` steps.
  double factor(int64_t applied_steps) const {
    detail::check_positive("power", power);
    return detail::compute_factor(*this, applied_steps, [this](double /*done*/, double remaining) {
      return std::pow(remaining, power);
    });
  }
};
/// f = q: a PolynomialCurve with the default power.
using LinearCurve = PolynomialCurve;

/// Warmup only: get_constant_schedule_with_warmup.
struct ConstantCurve {
  int64_t warmup_steps = 0;                                  ///< w
  int64_t total_steps = std::max<int64_t>(warmup_steps, 1);  ///< leave the default

  /// Returns the factor after `applied_steps` steps.
  double factor(int64_t applied_steps) const {
    return LinearCurve{warmup_steps, total_steps, 1}.factor(applied_steps);
  }
};

/// f = (1 + cos(pi p)) / 2: get_cosine_schedule_with_warmup, and with min_factor
/// get_cosine_with_min_lr_schedule_with_warmup. Constant after T, where Hugging Face's rise again.
/// With several num_cycles: get_cosine_with_hard_restarts_schedule_with_warmup.
struct CosineCurve {
  int64_t warmup_steps = 0;   ///< w
  int64_t total_steps = 0;    ///< T, warmup included
  double min_factor = 0;      ///< lowest factor
  double initial_factor = 0;  ///< factor of the first warmup step
  int64_t num_cycles = 1;     ///< number of decays, each from 1

  /// Returns the factor after `applied_steps` steps.
  double factor(int64_t applied_steps) const {
    detail::check_curve_param(num_cycles >= 1, "num_cycles", num_cycles, "at least 1");
    return detail::compute_factor(*this, applied_steps, [this](double done, double /*remaining*/) {
      const double cycle = std::fmod(static_cast<double>(num_cycles) * done, 1.0);
      return detail::anneal(DecayType::cosine, done < 1 ? cycle : 1, 0.0, 1.0, 1, 0);
    });
  }
};

/// Warmup from min_factor to 1, then 1, then decay to min_factor: get_wsd_schedule.
struct WarmupStableDecayCurve {
  int64_t warmup_steps = 0;                  ///< w
  int64_t decay_steps = 0;                   ///< last steps, at most T - w
  int64_t total_steps = 0;                   ///< T
  double min_factor = 0;                     ///< first and final factor
  DecayType decay_type = DecayType::cosine;  ///< shape of the decay

  /// Returns the factor after `applied_steps` steps.
  double factor(int64_t applied_steps) const {
    detail::check_curve_param(decay_steps >= 0 && decay_steps <= total_steps - warmup_steps,
                              "decay_steps", decay_steps, "from 0 to total_steps - warmup_steps");
    const LinearCurve curve{warmup_steps, total_steps, min_factor, min_factor};
    return detail::compute_factor(curve, applied_steps, [&](double, double) {
      return detail::anneal(decay_type, applied_steps, total_steps - decay_steps, total_steps, 1,
                            0);
    });
  }
};

/// torch's OneCycleLR with cycle_momentum=False; the base lr is max_lr.
struct OneCycleCurve {
  int64_t total_steps = 0;                        ///< T; the factor is constant from T - 1 on
  double pct_start = 0.3;                         ///< fraction of the rise to 1
  DecayType anneal_strategy = DecayType::cosine;  ///< shape of rise and decay
  double div_factor = 25;                         ///< 1 / first factor
  double final_div_factor = 1e4;                  ///< first factor / final factor
  bool three_phase = false;  ///< decays to the first factor in as many steps as the rise has

  /// Returns the factor after `applied_steps` steps.
  double factor(int64_t applied_steps) const {
    detail::check_curve_param(detail::is_at_least(pct_start, 0) && pct_start <= 1, "pct_start",
                              pct_start, "from 0 to 1");
    detail::check_positive("div_factor", div_factor);
    detail::check_positive("final_div_factor", final_div_factor);
    return detail::compute_factor(LinearCurve{0, total_steps}, applied_steps, [&](double, double) {
      const double first = 1 / div_factor, final = first / final_div_factor;
      const double peak = pct_start * static_cast<double>(total_steps) - 1;
      const double valley = three_phase ? 2 * peak : peak;
      const auto end = static_cast<double>(total_steps - 1);
      const double n = std::min(static_cast<double>(applied_steps), end);
      if (n <= peak) return detail::anneal(anneal_strategy, n, 0.0, peak, first, 1);
      if (n <= valley) return detail::anneal(anneal_strategy, n, peak, valley, 1, first);
      return detail::anneal(anneal_strategy, n, valley, end, three_phase ? first : 1, final);
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
