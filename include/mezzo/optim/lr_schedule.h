/// \file
/// Learning rates as functions of the steps that were applied, so that a step which the scaler
/// skipped spends nothing of the schedule, and for mezzo's optimizers without waiting to know.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/optimizer_interface.h>
#include <mezzo/optim/step_result.h>

#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstdint>
#include <vector>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// A function from the number of applied steps to what the next step's learning rate is multiplied
/// with. Yours may be any copyable type with these two members.
template <class T>
concept LrCurve = std::copyable<T> && requires(const T& curve, int64_t applied_steps) {
  { curve.factor(applied_steps) } -> std::convertible_to<double>;
  { curve.total_steps } -> std::convertible_to<int64_t>;  // from there on the factor is constant
};

// The three curves below rise in a straight line from `initial_factor` to 1 over `warmup_steps` and
// then fall to `min_factor`, which is reached after `total_steps` and kept. With
//   w = warmup_steps, T = total_steps, n = min(applied_steps, T),
//   p = (n - w) / max(1, T - w), q = (T - n) / max(1, T - w),
// the factor is initial_factor + (1 - initial_factor) n / w for n < w, and from w on
// min_factor + (1 - min_factor) times what stands at each curve. Numbers and names are those of
// Hugging Face's get_*_schedule_with_warmup. With w = T, too: the cosine then ends at 1, where the
// warm-up ends, and the others at min_factor.
//
// factor() throws c10::Error for n < 0 and unless 0 <= w <= T, T >= 1 and both factors lie within
// [0, 1], naming the member.

/// q: get_linear_schedule_with_warmup. With min_factor = 1 a warm-up alone.
struct LinearCurve {
  int64_t warmup_steps = 0;
  int64_t total_steps = 0;
  double min_factor = 0;
  double initial_factor = 0;  ///< of the first step, where there is a warm-up

  double factor(int64_t applied_steps) const;
};

/// (1 + cos(2 pi cycles p)) / 2: get_cosine_schedule_with_warmup, with min_factor
/// get_cosine_with_min_lr_schedule_with_warmup. Hugging Face's curves rise again after T; this one
/// stays where it is.
struct CosineCurve {
  int64_t warmup_steps = 0;
  int64_t total_steps = 0;
  double min_factor = 0;
  double initial_factor = 0;
  double cycles = 0.5;  ///< waves from w to T; half a one falls from 1 to 0. Positive and finite.

  double factor(int64_t applied_steps) const;
};

/// q^power: get_polynomial_decay_schedule_with_warmup, whose lr_end is min_factor times lr.
struct PolynomialCurve {
  int64_t warmup_steps = 0;
  int64_t total_steps = 0;
  double min_factor = 0;
  double initial_factor = 0;
  double power = 1;  ///< positive and finite

  double factor(int64_t applied_steps) const;
};

/// Moves the learning rates of an optimizer's param groups along a curve:
///
///     mezzo::LinearSchedule schedule(optimizer, {.warmup_steps = 100, .total_steps = 1000});
///     ...
///     auto result = scaler.step(optimizer, {.max_norm = 1.0});
///     scaler.update();
///     schedule.step(result);
///
/// **With an optimizer of mezzo's, or a MasterWeights,** the constructor hands it the whole curve
/// as a table
/// (`set_lr_factors`, 8 bytes a step). Whoever decides whether a step is applied, the device on a
/// GPU, counts it and looks the factor up; `step` has nothing left to do and never waits, and
/// captured CUDA graphs follow the schedule. The groups' `lr` stays as you set it, the base rate:
/// log `lrs()`, not `options().get_lr()`. The position is the optimizer's own count and goes with
/// its file; it continues where that stands. The table stays when the schedule ends, and replaces
/// the one that was there.
///
/// **With any other optimizer** `step` sets each group's `lr` to its base times the factor, if
/// the step ran; the outcome is known by then, since the host decided. The base is the `lr` that
/// the group has at construction. A group that is added later takes its first step at its own `lr`,
/// and the next `step` makes that its base. Save and load the schedule beside the optimizer.
///
/// For a rate that depends on the loss use libtorch's ReduceLROnPlateauScheduler; it waits for the
/// loss. The optimizer must outlive the schedule. One schedule an optimizer; one thread at a time.
template <LrCurve Curve>
class LrSchedule {
 public:
  /// Sets the rates of the first step.
  /// \throws c10::Error if the curve refuses its numbers; with an optimizer of mezzo's also if the
  ///   curve is longer than 2^24 - 1 steps, beyond which no device counts
  LrSchedule(AnyOptimizer optimizer, Curve curve);
  LrSchedule(LrSchedule&&) noexcept = default;
  LrSchedule& operator=(LrSchedule&&) noexcept = default;
  LrSchedule(const LrSchedule&) = delete;  // two would move the same rates
  LrSchedule& operator=(const LrSchedule&) = delete;
  ~LrSchedule() = default;

  /// After each `GradScaler::step`, with its result: moves if the step ran.
  void step(const StepResult& result);

  /// After a step without a scaler, which always ran.
  void step();

  /// The steps that were applied. With an optimizer of mezzo's all that it applied; waits for its
  /// device.
  int64_t applied_steps() const;

  /// The rate that each group's next step takes. Waits as `applied_steps` does.
  std::vector<double> lrs() const;

  /// The rate that each group's factor multiplies.
  std::vector<double> base_lrs() const;

  const Curve& curve() const noexcept { return curve_; }

  /// Moves to where so many applied steps lead, for files of your own. With an optimizer of mezzo's
  /// this is its own `set_applied_steps`. \throws c10::Error if negative
  void set_applied_steps(int64_t applied_steps);

 private:
  void add_new_groups();
  void set_lrs();
  void restore(int64_t applied_steps, const std::vector<double>& base_lrs);

  AnyOptimizer optimizer_;
  Curve curve_;
  int64_t applied_steps_ = 0;     // not counted where the optimizer does
  std::vector<double> base_lrs_;  // not kept where the groups' lr is the base

  template <class Archive, LrCurve C>
  requires std::same_as<Archive, torch::serialize::InputArchive>
  friend Archive& operator>>(Archive& archive, LrSchedule<C>& schedule);
};

using LinearSchedule = LrSchedule<LinearCurve>;
using CosineSchedule = LrSchedule<CosineCurve>;
using PolynomialSchedule = LrSchedule<PolynomialCurve>;

/// `torch::save(schedule, path)` and `torch::load(schedule, path)`: applied steps and base rates,
/// not the curve (include <torch/serialize.h>). Load the optimizer first, for its file holds rates
/// too, and with an optimizer of mezzo's the count. Files are the same for all optimizers.
///
/// The count of a schedule's file becomes that of an optimizer of mezzo's which does not know its
/// own (`knows_applied_steps`), after a file of torch::optim::SGD.
/// \throws c10::Error, and changes nothing, for another number of groups, a damaged file, or where
///   an optimizer of mezzo's knows that it has applied another number of steps
template <class Archive, LrCurve Curve>
requires std::same_as<Archive, torch::serialize::OutputArchive> Archive& operator<<(
    Archive& archive, const LrSchedule<Curve>& schedule);

template <class Archive, LrCurve Curve>
requires std::same_as<Archive, torch::serialize::InputArchive> Archive& operator>>(
    Archive& archive, LrSchedule<Curve>& schedule);

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/optim/detail/lr_schedule_impl.h>  // IWYU pragma: export
