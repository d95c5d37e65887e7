#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/optim/lr_schedule.h>

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline void check_factor(const char* curve, const char* member, double value) {
  TORCH_CHECK(is_at_least(value, 0) && value <= 1, curve, ": ", member, " is ", value,
              "; it should be from 0 to 1");
}

inline void check_exponent(const char* curve, const char* member, double value) {
  TORCH_CHECK(is_above(value, 0) && !nonfinite_bits(value), curve, ": ", member, " is ", value,
              "; it should be positive and finite");
}

/// Returns a curve's factor: checks the members, rises during the warm-up, and then calls
/// `fall(done, remaining)` with the shares of the fall that lie before and after `applied_steps`.
/// They add up to 1, but for a warm-up that takes all steps, at whose end both are 0.
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
  const double done = static_cast<double>(now - warmup) / length;
  const double remaining = static_cast<double>(total - now) / length;
  return curve.min_factor + (1 - curve.min_factor) * fall(done, remaining);
}

/// A curve as the table that FusedOptimizer::set_lr_factors takes.
template <LrCurve Curve>
std::vector<double> lr_factors(const Curve& curve) {
  const int64_t total = curve.total_steps;
  TORCH_CHECK(total >= 0 && total < (int64_t{1} << 24), "LrSchedule: total_steps is ", total,
              "; it should be from 0 to 16777215, up to which a device counts steps");
  std::vector<double> factors;
  factors.reserve(static_cast<std::size_t>(total) + 1);
  for (int64_t n = 0; n <= total; ++n) factors.push_back(curve.factor(n));
  return factors;
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

template <LrCurve Curve>
LrSchedule<Curve>::LrSchedule(AnyOptimizer optimizer, Curve curve)
    : optimizer_(optimizer), curve_(std::move(curve)) {
  if (optimizer_.mezzos() != nullptr) {
    optimizer_.mezzos()->set_lr_factors(detail::lr_factors(curve_));
    known_steps_ = optimizer_.mezzos()->applied_steps();
  }
  show_lrs();
}

template <LrCurve Curve>
void LrSchedule<Curve>::step(const StepResult& result) {
  const optim::FusedOptimizer* const counting = optimizer_.mezzos();
  if (counting == nullptr) {
    if (result.ran()) ++known_steps_;
  } else if (!counting->counts_on_host()) {
    pending_.push_back(result);
    std::erase_if(pending_, [this](const StepResult& one) {
      const bool is_known = one.ready();
      if (is_known && one.ran()) ++known_steps_;
      return is_known;
    });
    if (pending_.size() > kMaxPending) pending_.erase(pending_.begin());
  }
  show_lrs();
}

template <LrCurve Curve>
void LrSchedule<Curve>::step() {
  if (detail::skipped_optimizer == &optimizer_.optimizer() && optimizer_.mezzos() == nullptr) {
    TORCH_WARN_ONCE(
        "LrSchedule::step() counts a step that the GradScaler has skipped. Give it the result: "
        "auto result = scaler.step(optimizer); scaler.update(); schedule.step(result);");
  }
  ++known_steps_;
  show_lrs();
}

template <LrCurve Curve>
int64_t LrSchedule<Curve>::applied_steps() const {
  return optimizer_.mezzos() != nullptr ? optimizer_.mezzos()->applied_steps() : known_steps_;
}

template <LrCurve Curve>
std::vector<double> LrSchedule<Curve>::lrs() const {
  return optimizer_.mezzos() != nullptr
             ? optimizer_.mezzos()->lrs()  // another steps with what its options say
             : detail::ScheduledLrs().bases(optimizer_.optimizer().param_groups());
}

template <LrCurve Curve>
std::vector<double> LrSchedule<Curve>::base_lrs() const {
  return optimizer_.mezzos() != nullptr ? optimizer_.mezzos()->base_lrs()
                                        : scheduled_.bases(optimizer_.optimizer().param_groups());
}

template <LrCurve Curve>
void LrSchedule<Curve>::set_applied_steps(int64_t applied_steps) {
  TORCH_CHECK(applied_steps >= 0, "set_applied_steps: applied_steps is ", applied_steps,
              "; it should be at least 0");
  if (optimizer_.mezzos() != nullptr) optimizer_.mezzos()->set_applied_steps(applied_steps);
  known_steps_ = applied_steps;
  pending_.clear();
  show_lrs();
}

/// Sets the groups' options to the rates of the next step, as far as the host knows it.
template <LrCurve Curve>
void LrSchedule<Curve>::show_lrs() {
  if (optim::FusedOptimizer* const counting = optimizer_.mezzos()) {
    if (counting->counts_on_host()) {
      known_steps_ = counting->applied_steps();
      pending_.clear();
    }
    counting->show_lrs(known_steps_);
  } else {
    scheduled_.show(optimizer_.optimizer().param_groups(), curve_.factor(known_steps_));
  }
}

template <LrCurve Curve>
void LrSchedule<Curve>::restore(int64_t applied_steps, const std::vector<double>& base_lrs) {
  auto& groups = optimizer_.optimizer().param_groups();
  TORCH_CHECK(applied_steps >= 0, "The archive of a schedule has ", applied_steps,
              " applied steps; it is damaged: load an earlier file");
  TORCH_CHECK(base_lrs.size() == groups.size(), "The archive of a schedule has ", base_lrs.size(),
              " parameter groups, and this optimizer ", groups.size(),
              "; make the groups that were there when it was saved");
  for (const double lr : base_lrs) {
    TORCH_CHECK(!detail::nonfinite_bits(lr), "The archive of a schedule has the learning rate ", lr,
                "; it is damaged: load an earlier file");
  }
  if (optim::FusedOptimizer* const counting = optimizer_.mezzos()) {
    counting->set_applied_steps(applied_steps);
    counting->set_base_lrs(base_lrs);
  } else {
    scheduled_.set(base_lrs, groups);
  }
  known_steps_ = applied_steps;
  pending_.clear();
  show_lrs();
}

template <class Archive, LrCurve Curve>
requires std::same_as<Archive, torch::serialize::OutputArchive> Archive& operator<<(
    Archive& archive, const LrSchedule<Curve>& schedule) {
  archive.write("applied_steps", c10::IValue(schedule.applied_steps()));
  archive.write("base_lrs", c10::IValue(schedule.base_lrs()));
  return archive;
}

template <class Archive, LrCurve Curve>
requires std::same_as<Archive, torch::serialize::InputArchive> Archive& operator>>(
    Archive& archive, LrSchedule<Curve>& schedule) {
  c10::IValue applied_steps, base_lrs;
  TORCH_CHECK(archive.try_read("applied_steps", applied_steps) &&
                  archive.try_read("base_lrs", base_lrs) && applied_steps.isInt() &&
                  base_lrs.isDoubleList(),
              "This archive is not that of a schedule: it lacks \"applied_steps\" or \"base_lrs\"; "
              "load what torch::save(schedule, path) wrote");
  schedule.restore(applied_steps.toInt(), base_lrs.toDoubleVector());
  return archive;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
