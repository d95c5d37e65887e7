/// \file
/// LrSchedule: learning rates as a function of the number of applied steps. Skipped steps do not
/// advance the schedule.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/lr_factors.h>
#include <mezzo/optim/detail/step_progress.h>
#include <mezzo/optim/lr_curve.h>
#include <mezzo/optim/optimizer_ref.h>
#include <mezzo/optim/step_result.h>

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Sets the learning rates of an optimizer's param groups from a curve:
///
///     mezzo::LinearSchedule schedule(optimizer, {.warmup_steps = 100, .total_steps = 1000});
///     schedule.step(scaler.step(optimizer));
///
/// As with torch's schedulers, `options().get_lr()` is the lr of the next step. The lrs at
/// construction are the base lrs, as in torch's LambdaLR: an lr written to an option later lasts
/// one step. The base lr of a group added later is its `lr` option.
///
/// **With a mezzo optimizer or MasterWeights** the constructor passes the curve to the optimizer as
/// a table (`set_lr_factors`, 8 bytes a step). If a device decides the step, it counts applied
/// steps and looks up the factor: `step` never synchronizes, and captured CUDA graphs follow the
/// schedule. The options then hold the lr after the steps whose results are ready; `lrs()`
/// synchronizes and is exact. The position is the optimizer's step count, which its archive holds.
/// The table outlives this object, and replaces an earlier one.
///
/// **With any other optimizer** the host decides the step and this object counts. Save and load it
/// together with the optimizer. The factor of a group added later applies after the next `step`.
///
/// For an lr that depends on the loss use torch::optim::ReduceLROnPlateauScheduler. The optimizer
/// must outlive the schedule. Use one schedule for an optimizer. Not thread-safe.
template <class Curve>
class LrSchedule {
  static_assert(LrCurve<Curve>,
                "mezzo::LrSchedule: a curve is a copyable type with factor(applied_steps) and "
                "total_steps");

 public:
  /// Sets the lrs of the next step. Synchronizes if a device has already counted steps.
  /// \throws c10::Error if a member of the curve is out of range; with a mezzo optimizer also for a
  ///   curve of 2^24 steps or more, beyond which a device cannot count
  LrSchedule(OptimizerRef optimizer, Curve curve)
      : optimizer_(optimizer), curve_(std::move(curve)) {
    if (mixed_precision() != nullptr) {
      mixed_precision()->set_lr_factors(detail::make_lr_factors(curve_));
    }
    num_ready_steps_ = applied_steps();
    set_optimizer_lrs();
  }
  /// Moves the schedule: the source no longer sets the lrs.
  LrSchedule(LrSchedule&&) noexcept = default;
  /// Moves the schedule, replacing this one.
  LrSchedule& operator=(LrSchedule&&) noexcept = default;
  LrSchedule(const LrSchedule&) = delete;  // a copy would set the same lrs
  LrSchedule& operator=(const LrSchedule&) = delete;
  ~LrSchedule() = default;

  /// Advances the schedule if the step was applied. Call it after each `GradScaler::step` with the
  /// result.
  void step(const StepResult& step_result) {
    if (mixed_precision() == nullptr) {
      if (step_result.applied()) ++num_ready_steps_;
    } else if (!mixed_precision()->has_host_step_count()) {
      pending_.push_back(step_result);
      std::erase_if(pending_, [this](const StepResult& result) {
        const bool is_ready = result.ready();
        if (is_ready && result.applied()) ++num_ready_steps_;
        return is_ready;
      });
      if (pending_.size() > kMaxPending) pending_.erase(pending_.begin());
    }
    set_optimizer_lrs();
  }

  /// Advances the schedule after a step without a scaler. Warns once after a step of a torch::optim
  /// optimizer that a GradScaler of this thread skipped; the step counts nevertheless.
  void step() {
    if (detail::skipped_optimizer == &optimizer_.optimizer() && mixed_precision() == nullptr) {
      TORCH_WARN_ONCE(
          "LrSchedule::step() counts a step that the GradScaler has skipped. Pass it the result: "
          "auto result = scaler.step(optimizer); scaler.update(); schedule.step(result);");
    }
    ++num_ready_steps_;
    set_optimizer_lrs();
  }

  /// Returns the number of applied steps. Synchronizes if a mezzo optimizer counts on a device.
  int64_t applied_steps() const {
    return mixed_precision() != nullptr ? mixed_precision()->applied_steps() : num_ready_steps_;
  }

  /// Returns the lr of each group's next step. Synchronizes as `applied_steps` does.
  std::vector<double> lrs() const {
    return mixed_precision() != nullptr ? mixed_precision()->lrs()
                                        : detail::get_current_lrs(groups());
  }

  /// Returns the base lr of each group.
  std::vector<double> base_lrs() const {
    return mixed_precision() != nullptr ? mixed_precision()->base_lrs()
                                        : scheduled_lrs_.base_lrs(groups());
  }

  /// Sets the number of applied steps, for state that you restore yourself; also the optimizer's,
  /// if it is a mezzo optimizer.
  /// \throws c10::Error if negative
  void set_applied_steps(int64_t applied_steps) {
    TORCH_CHECK(applied_steps >= 0, "set_applied_steps: applied_steps is ", applied_steps,
                "; it should be at least 0");
    if (mixed_precision() != nullptr) mixed_precision()->set_applied_steps(applied_steps);
    num_ready_steps_ = applied_steps;
    pending_.clear();
    set_optimizer_lrs();
  }

  /// `torch::save(schedule, path)` and `torch::load(schedule, path)` write and read the number of
  /// applied steps and the base lrs, not the curve (include <torch/serialize.h>). Load the
  /// optimizer first: its archive also has lrs (and a mezzo optimizer's the count), which the
  /// schedule's replace. The format is the same for all optimizers.
  /// \throws c10::Error, with the strong exception guarantee, for another number of groups or a
  ///   corrupt archive
  friend torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                     const LrSchedule& schedule) {
    archive.write("applied_steps", c10::IValue(schedule.applied_steps()));
    archive.write("base_lrs", c10::IValue(schedule.base_lrs()));
    return archive;
  }
  /// Loads a schedule; see operator<<.
  friend torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                    LrSchedule& schedule) {
    const detail::StepProgress progress = schedule.read_archive(archive);
    if (schedule.mixed_precision() != nullptr) {
      schedule.mixed_precision()->set_base_lrs(progress.base_lrs);
    } else {
      schedule.scheduled_lrs_.set_base_lrs(progress.base_lrs, schedule.groups());
    }
    schedule.set_applied_steps(*progress.applied_steps);
    return archive;
  }
  /// Throws what loading the archive would throw, and changes nothing.
  friend void check_archive(torch::serialize::InputArchive& archive, const LrSchedule& schedule) {
    (void)schedule.read_archive(archive);
  }

 private:
  optim::MixedPrecisionOptimizer* mixed_precision() const noexcept {
    return optimizer_.mixed_precision();
  }
  detail::ScheduledLrs::Groups& groups() const noexcept {
    return optimizer_.optimizer().param_groups();
  }
  detail::StepProgress read_archive(torch::serialize::InputArchive& archive) const {
    c10::IValue steps, lrs;
    TORCH_CHECK(
        archive.try_read("applied_steps", steps) && archive.try_read("base_lrs", lrs) &&
            steps.isInt() && lrs.isDoubleList(),
        "This archive is not that of a schedule: it lacks \"applied_steps\" or \"base_lrs\"; "
        "load what torch::save(schedule, path) wrote");
    return detail::read_progress(archive, groups().size(), "a schedule");
  }

  /// Sets the `lr` options to the lrs of the next step, after the steps with a ready result.
  void set_optimizer_lrs() {
    if (mixed_precision() == nullptr) {
      return scheduled_lrs_.set_optimizer_lrs(groups(), curve_.factor(num_ready_steps_));
    }
    if (mixed_precision()->has_host_step_count()) {
      num_ready_steps_ = mixed_precision()->applied_steps();
      pending_.clear();
    }
    mixed_precision()->set_optimizer_lrs(num_ready_steps_);
  }

  static constexpr std::size_t kMaxPending = 64;  // results of captured steps are never ready

  OptimizerRef optimizer_;
  Curve curve_;
  int64_t num_ready_steps_ = 0;         // applied steps with a ready result
  std::vector<StepResult> pending_;     // results that are not ready
  detail::ScheduledLrs scheduled_lrs_;  // for an optimizer that is not a MixedPrecisionOptimizer
};

/// Warmup and linear decay.
using LinearSchedule = LrSchedule<LinearCurve>;
/// Warmup and constant lr.
using ConstantSchedule = LrSchedule<ConstantCurve>;
/// Warmup and cosine decay, with or without restarts.
using CosineSchedule = LrSchedule<CosineCurve>;
/// Rise to the base lr, and decay to less than the first lr.
using OneCycleSchedule = LrSchedule<OneCycleCurve>;
/// Warmup and polynomial decay.
using PolynomialSchedule = LrSchedule<PolynomialCurve>;
/// Warmup, constant lr and decay.
using WarmupStableDecaySchedule = LrSchedule<WarmupStableDecayCurve>;

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
