#pragma once

#include <c10/util/Exception.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/optim/lr_schedule.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline void check_factor(const char* curve, const char* member, double value) {
  TORCH_CHECK(value >= 0 && value <= 1, curve, ": ", member, " is ", value,
              "; it should be from 0 to 1");
}

inline void check_exponent(const char* curve, const char* member, double value) {
  TORCH_CHECK(value > 0 && !nonfinite_bits(value), curve, ": ", member, " is ", value,
              "; it should be positive and finite");
}

/// The part that the curves share; `fall` gives what follows the warm-up, from how far in the fall
/// `applied_steps` lies: the share that is done and the one that remains.
template <class Curve, class Fall>
double warmed_up(const char* name, const Curve& curve, int64_t applied_steps, const Fall& fall) {
  const auto [warmup, total] = std::pair(curve.warmup_steps, curve.total_steps);
  TORCH_CHECK(total >= 1, name, ": total_steps is ", total, "; it should be at least 1");
  TORCH_CHECK(warmup >= 0 && warmup <= total, name, ": warmup_steps is ", warmup,
              "; it should be from 0 to total_steps (", total, ")");
  check_factor(name, "min_factor", curve.min_factor);
  check_factor(name, "initial_factor", curve.initial_factor);
  TORCH_CHECK(applied_steps >= 0, name, ": applied_steps is ", applied_steps,
              "; it should be at least 0");
  if (applied_steps < warmup) {
    const double risen = static_cast<double>(applied_steps) / static_cast<double>(warmup);
    return curve.initial_factor + (1 - curve.initial_factor) * risen;
  }
  const int64_t now = std::min(applied_steps, total);
  const auto length = static_cast<double>(std::max<int64_t>(total - warmup, 1));
  // Where all is warm-up, the end comes right after it.
  const double done = now == total ? 1.0 : static_cast<double>(now - warmup) / length;
  const double remaining = static_cast<double>(total - now) / length;
  return curve.min_factor + (1 - curve.min_factor) * fall(done, remaining);
}

}  // namespace detail

inline double LinearCurve::factor(int64_t applied_steps) const {
  return detail::warmed_up("LinearCurve", *this, applied_steps,
                           [](double /*done*/, double remaining) { return remaining; });
}

inline double CosineCurve::factor(int64_t applied_steps) const {
  detail::check_exponent("CosineCurve", "cycles", cycles);
  return detail::warmed_up("CosineCurve", *this, applied_steps,
                           [this](double done, double /*remaining*/) {
                             return 0.5 * (1 + std::cos(std::numbers::pi * cycles * 2 * done));
                           });
}

inline double PolynomialCurve::factor(int64_t applied_steps) const {
  detail::check_exponent("PolynomialCurve", "power", power);
  return detail::warmed_up(
      "PolynomialCurve", *this, applied_steps,
      [this](double /*done*/, double remaining) { return std::pow(remaining, power); });
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
