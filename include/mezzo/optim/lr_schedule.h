/// \file
/// LrSchedule: learning rates as functions of the number of applied steps. A step that the scaler
/// skips uses up nothing of the schedule.
#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/optimizer_ref.h>
#include <mezzo/optim/step_result.h>

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// A curve gives the factor of the next step's learning rate after a number of applied steps. A
/// curve of yours is any copyable type with these two members.
template <class T>
concept LrCurve = std::copyable<T> && requires(const T& curve, int64_t applied_steps) {
  { curve.factor(applied_steps) } -> std::convertible_to<double>;
  { curve.total_steps } -> std::convertible_to<int64_t>;  // after these the factor is constant
};

namespace detail {

/// \throws c10::Error, naming a curve's number, unless `is_fine`
template <class Value>
void check_curve_param(bool is_fine, const char* member, Value value, const char* wanted) {
  TORCH_CHECK(is_fine, "LrSchedule: ", member, " is ", value, "; it should be ", wanted);
}

/// Returns a curve's factor: checks the members, rises during the warm-up, and then calls
/// `fall(done, remaining)` with the shares of the fall that lie before and after `applied_steps`.
/// They add up to 1, but for a warm-up that takes all steps, at whose end both are 0.
template <class Curve, class Fall>
double compute_factor(const Curve& curve, int64_t applied_steps, const Fall& fall) {
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
    const double risen = static_cast<double>(applied_steps) / static_cast<double>(warmup);
    return curve.initial_factor + (1 - curve.initial_factor) * risen;
  }
  const int64_t now = std::min(applied_steps, total);
  const auto length = static_cast<double>(std::max<int64_t>(total - warmup, 1));
  const double done = static_cast<double>(now - warmup) / length;
  const double remaining = static_cast<double>(total - now) / length;
  return curve.min_factor + (1 - curve.min_factor) * fall(done, remaining);
}

}  // namespace detail

// The curves below rise in a straight line from `initial_factor` to 1 over `warmup_steps`, then
// fall to `min_factor`, reach it after `total_steps`, and keep it:
//
//   w = warmup_steps, T = total_steps, n = min(applied_steps, T)
//   p = (n - w) / max(1, T - w)      the share of the fall that is done
//   q = (T - n) / max(1, T - w)      the share that remains
//   factor = initial_factor + (1 - initial_factor) n / w         for n < w
//   factor = min_factor + (1 - min_factor) f(p, q)               for n >= w
//
// The comment of each curve gives f and the functions of Hugging Face's transformers that have the
// same numbers. For w = T these agree as well: the cosine ends at 1, where the warm-up ends, and
// the other at min_factor.
//
// factor() throws c10::Error, and names the member, for n < 0, unless 0 <= w <= T and T >= 1, and
// unless both factors lie within [0, 1].

/// f = q^power: get_polynomial_decay_schedule_with_warmup, whose lr_end is min_factor times lr, and
/// with a power of 1 get_linear_schedule_with_warmup. With min_factor = 1 it is a warm-up alone.
struct PolynomialCurve {
  int64_t warmup_steps = 0;   ///< w: steps in which the factor rises to 1
  int64_t total_steps = 0;    ///< T: steps after which the factor is min_factor
  double min_factor = 0;      ///< the lowest factor, at the end
  double initial_factor = 0;  ///< factor of the first step of a warm-up
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
/// f = q: a PolynomialCurve whose power is left at 1.
using LinearCurve = PolynomialCurve;

/// f = (1 + cos(pi p)) / 2: get_cosine_schedule_with_warmup, and with min_factor
/// get_cosine_with_min_lr_schedule_with_warmup. Hugging Face's curves rise again after T; this
/// curve stays where it is.
struct CosineCurve {
  int64_t warmup_steps = 0;   ///< w: steps in which the factor rises to 1
  int64_t total_steps = 0;    ///< T: steps after which the factor stays
  double min_factor = 0;      ///< the lowest factor
  double initial_factor = 0;  ///< factor of the first step of a warm-up

  /// Returns the factor after `applied_steps` steps.
  double factor(int64_t applied_steps) const {
    return detail::compute_factor(*this, applied_steps, [](double done, double /*remaining*/) {
      return 0.5 * (1 + std::cos(std::numbers::pi * done));
    });
  }
};

namespace detail {

/// A curve as the table that MixedPrecisionOptimizer::set_lr_factors takes.
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

/// What a file has of a schedule.
struct SerializedSchedule {
  int64_t applied_steps;
  std::vector<double> base_lrs;

  /// Reads a file for an optimizer of `groups` groups. \throws c10::Error for any other
  SerializedSchedule(torch::serialize::InputArchive& archive, std::size_t groups) {
    c10::IValue steps, lrs;
    TORCH_CHECK(
        archive.try_read("applied_steps", steps) && archive.try_read("base_lrs", lrs) &&
            steps.isInt() && lrs.isDoubleList(),
        "This archive is not that of a schedule: it lacks \"applied_steps\" or \"base_lrs\"; "
        "load what torch::save(schedule, path) wrote");
    applied_steps = steps.toInt();
    base_lrs = lrs.toDoubleVector();
    TORCH_CHECK(base_lrs.size() == groups, "The archive of a schedule has ", base_lrs.size(),
                " parameter groups, and this optimizer ", groups,
                "; make the groups that were there when it was saved");
    const auto is_broken = [](double lr) { return is_nonfinite(lr); };
    TORCH_CHECK(applied_steps >= 0 && std::none_of(base_lrs.begin(), base_lrs.end(), is_broken),
                "The archive of a schedule has ", applied_steps,
                " applied steps, and the learning rates ", c10::Join(", ", base_lrs),
                "; it is damaged: load an earlier file");
  }
};

}  // namespace detail

/// Moves the learning rates of an optimizer's param groups along a curve:
///
///     mezzo::LinearSchedule schedule(optimizer, {.warmup_steps = 100, .total_steps = 1000});
///     schedule.step(scaler.step(optimizer));
///
/// The groups' `lr` options show the rates: `options().get_lr()` is the rate of the next step, as
/// with libtorch's schedulers. The rates at construction are the base rates, and stay, as in
/// torch's LambdaLR: a rate that you write to an option later lasts one step. A group that is added
/// later has its own `lr` as its base.
///
/// **With an optimizer of mezzo's or a MasterWeights** the constructor hands over the whole curve
/// as a table (`set_lr_factors`, 8 bytes a step). Where a device decides whether a step is applied,
/// the device counts the step and looks its factor up: `step` never waits, and captured CUDA graphs
/// follow the schedule. The options then show the rate after those steps of which the host knows by
/// now; `lrs()` waits and is exact. The position is the optimizer's own count, and is in the
/// optimizer's file. The table stays after this object is gone, and replaces an earlier one.
///
/// **With any other optimizer** the host decides whether to step, and this object counts. Save and
/// load it beside the optimizer. Such an optimizer steps with the options as they are: the factor
/// reaches a group that is added at the next call of this object's `step`.
///
/// For a rate that depends on the loss use libtorch's ReduceLROnPlateauScheduler. The optimizer
/// must outlive the schedule. Use one schedule for an optimizer, from one thread at a time.
template <LrCurve Curve>
class LrSchedule {
 public:
  /// Sets the rates of the next step. Waits where a device has counted steps already.
  /// \throws c10::Error if the curve refuses its numbers; with an optimizer of mezzo's also if the
  ///   curve is longer than 2^24 - 1 steps, beyond which no device counts
  LrSchedule(OptimizerRef optimizer, Curve curve)
      : optimizer_(optimizer), curve_(std::move(curve)) {
    if (mixed_precision() != nullptr)
      mixed_precision()->set_lr_factors(detail::make_lr_factors(curve_));
    known_steps_ = applied_steps();
    set_optimizer_lrs();
  }
  /// Takes a schedule over; only the new object moves the rates.
  LrSchedule(LrSchedule&&) noexcept = default;
  /// Takes a schedule over, and ends its own.
  LrSchedule& operator=(LrSchedule&&) noexcept = default;
  LrSchedule(const LrSchedule&) = delete;  // a copy would move the same rates
  LrSchedule& operator=(const LrSchedule&) = delete;
  ~LrSchedule() = default;

  /// Moves the rates if the step ran. Call it after each `GradScaler::step`, with the result of
  /// that.
  void step(const StepResult& step_result) {
    if (mixed_precision() == nullptr) {
      if (step_result.applied()) ++known_steps_;
    } else if (!mixed_precision()->has_host_step_count()) {
      pending_.push_back(step_result);
      std::erase_if(pending_, [this](const StepResult& result) {
        const bool is_known = result.ready();
        if (is_known && result.applied()) ++known_steps_;
        return is_known;
      });
      if (pending_.size() > kMaxPending) pending_.erase(pending_.begin());
    }
    set_optimizer_lrs();
  }

  /// Moves the rates after a step without a scaler, which always runs. Warns once after a step of a
  /// libtorch optimizer that a scaler of this thread has skipped, which it counts all the same.
  void step() {
    if (detail::skipped_optimizer == &optimizer_.optimizer() && mixed_precision() == nullptr) {
      TORCH_WARN_ONCE(
          "LrSchedule::step() counts a step that the GradScaler has skipped. Give it the result: "
          "auto result = scaler.step(optimizer); scaler.update(); schedule.step(result);");
    }
    ++known_steps_;
    set_optimizer_lrs();
  }

  /// Returns how many steps were applied. An optimizer of mezzo's counts all that it applied, and
  /// this waits for its device.
  int64_t applied_steps() const {
    return mixed_precision() != nullptr ? mixed_precision()->applied_steps() : known_steps_;
  }

  /// Returns the rate of each group's next step. Waits as `applied_steps` does.
  std::vector<double> lrs() const {
    // An optimizer that is not mezzo's steps with what its options say.
    return mixed_precision() != nullptr ? mixed_precision()->lrs()
                                        : detail::get_current_lrs(groups());
  }

  /// Returns the rate that the factor multiplies, for each group.
  std::vector<double> base_lrs() const {
    return mixed_precision() != nullptr ? mixed_precision()->base_lrs()
                                        : scheduled_.base_lrs(groups());
  }

  /// Goes on as after `applied_steps` applied steps, for files of your own. With an optimizer of
  /// mezzo's this calls its `set_applied_steps`.
  /// \throws c10::Error if negative
  void set_applied_steps(int64_t applied_steps) {
    TORCH_CHECK(applied_steps >= 0, "set_applied_steps: applied_steps is ", applied_steps,
                "; it should be at least 0");
    if (mixed_precision() != nullptr) mixed_precision()->set_applied_steps(applied_steps);
    known_steps_ = applied_steps;
    pending_.clear();
    set_optimizer_lrs();
  }

  /// `torch::save(schedule, path)` and `torch::load(schedule, path)` write and read the number of
  /// applied steps and the base rates, not the curve (include <torch/serialize.h>). Load the
  /// optimizer first: its file holds rates too, and that of mezzo's optimizers the count, and the
  /// schedule's numbers replace them. Files of schedules are the same for all optimizers.
  /// \throws c10::Error, and changes nothing, for another number of groups and for a damaged file
  friend torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                     const LrSchedule& schedule) {
    archive.write("applied_steps", c10::IValue(schedule.applied_steps()));
    archive.write("base_lrs", c10::IValue(schedule.base_lrs()));
    return archive;
  }
  /// Loads a schedule; see operator<<.
  friend torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                    LrSchedule& schedule) {
    const detail::SerializedSchedule serialized(archive, schedule.groups().size());
    if (schedule.mixed_precision() != nullptr) {
      schedule.mixed_precision()->set_base_lrs(serialized.base_lrs);
    } else {
      schedule.scheduled_.set_base_lrs(serialized.base_lrs, schedule.groups());
    }
    schedule.set_applied_steps(serialized.applied_steps);
    return archive;
  }
  /// Throws what loading the archive would throw, and changes nothing.
  friend void check_archive(torch::serialize::InputArchive& archive, const LrSchedule& schedule) {
    (void)detail::SerializedSchedule(archive, schedule.groups().size());
  }

 private:
  optim::MixedPrecisionOptimizer* mixed_precision() const noexcept {
    return optimizer_.mixed_precision();
  }
  detail::ScheduledLrs::Groups& groups() const noexcept {
    return optimizer_.optimizer().param_groups();
  }

  /// Sets the groups' options to the rates of the next step, as far as the host knows it.
  void set_optimizer_lrs() {
    if (mixed_precision() == nullptr)
      return scheduled_.set_optimizer_lrs(groups(), curve_.factor(known_steps_));
    if (mixed_precision()->has_host_step_count()) {
      known_steps_ = mixed_precision()->applied_steps();
      pending_.clear();
    }
    mixed_precision()->set_optimizer_lrs(known_steps_);
  }

  /// Results of captured steps are never ready: so many wait at most.
  static constexpr std::size_t kMaxPending = 64;

  OptimizerRef optimizer_;
  Curve curve_;
  int64_t known_steps_ = 0;          // applied steps that the host knows of
  std::vector<StepResult> pending_;  // of steps that a device decided, not known yet
  detail::ScheduledLrs scheduled_;   // where the optimizer is not mezzo's
};

/// A warm-up and a straight fall.
using LinearSchedule = LrSchedule<LinearCurve>;
/// A warm-up and a cosine.
using CosineSchedule = LrSchedule<CosineCurve>;
/// A warm-up and a power of what remains.
using PolynomialSchedule = LrSchedule<PolynomialCurve>;

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
