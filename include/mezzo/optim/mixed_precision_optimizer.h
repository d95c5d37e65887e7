/// \file
/// MixedPrecisionOptimizer: an optimizer whose step unscales, checks and clips gradients itself.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/grad_stats.h>
#include <mezzo/optim/detail/applied_steps.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/detail/lr_factors.h>
#include <mezzo/optim/detail/optimizer_description.h>
#include <mezzo/optim/detail/step_progress.h>
#include <mezzo/optim/step_options.h>
#include <mezzo/optim/step_plan.h>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

/// Tag of optimizers whose state is partitioned over ranks. `load` is called with all states on
/// the CPU, and moves those that this rank owns to the devices of their parameters.
struct ShardedOptimizerTag {
  virtual ~ShardedOptimizerTag() = default;
};

/// Interface of optimizers whose step unscales, checks and clips the gradients itself: mezzo's, in
/// one pass over memory and without host synchronization, since the device decides whether the step
/// is skipped; and MasterWeights, which wraps another optimizer and synchronizes once.
///
/// \code
///   StepPlan plan = optimizer.plan();
///   GradStats stats = optimizer.grad_stats(plan, inv_scale);
///   optimizer.apply(std::move(plan), stats, {.max_norm = 1.0});
/// \endcode
///
/// GradScaler::step calls these three functions. Param groups, gradients and states must not change
/// between `plan` and `apply`. The optimizer counts applied steps: on the host for CPU parameters,
/// otherwise on the device that decides the step.
///
/// mezzo's are also torch::optim::Optimizers; MasterWeights is not.
class MixedPrecisionOptimizer {
 public:
  MixedPrecisionOptimizer() = default;
  MixedPrecisionOptimizer(const MixedPrecisionOptimizer&) = delete;  // as torch::optim::Optimizer's
  MixedPrecisionOptimizer& operator=(const MixedPrecisionOptimizer&) = delete;
  /// Moves the step count and the schedule.
  MixedPrecisionOptimizer(MixedPrecisionOptimizer&&) = default;
  /// Moves the step count and the schedule.
  MixedPrecisionOptimizer& operator=(MixedPrecisionOptimizer&&) = default;
  virtual ~MixedPrecisionOptimizer() = default;

  /// Returns the optimizer that holds the param groups: this one, or the one that MasterWeights
  /// wraps.
  virtual torch::optim::Optimizer& optimizer() noexcept = 0;

  /// Steps without a scaler: calls `closure` once, if given, applies the gradients as they are, and
  /// returns the closure's loss.
  // NOLINTNEXTLINE(performance-unnecessary-value-param): what torch::optim::Optimizer declares
  virtual at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) {
    at::Tensor loss = detail::call_closure(closure);
    apply(plan());
    return loss;
  }
  /// Writes the state and the options.
  virtual void save(torch::serialize::OutputArchive& archive) const = 0;
  /// Reads what `save` wrote.
  virtual void load(torch::serialize::InputArchive& archive) = 0;

  /// Sets the lr factors of coming steps: after n applied steps, the lr of each group is its base
  /// lr times `factors[n]`, or times the last factor for larger n. LrSchedule computes the factors
  /// of a curve. An empty table ends the schedule and restores the base lrs. The base lrs are the
  /// `lr` options when the first table is set (an lr of 0 included), and stay.
  ///
  /// The device that decides the step looks up the factor: a skipped step consumes none, and
  /// captured CUDA graphs follow the table without synchronization. Set the table and step once
  /// before a capture; a graph captured earlier reads the old table's memory and must be captured
  /// again. `save` does not write the table; `load` keeps it and resumes at the saved step count.
  /// Synchronizes if a device has already counted steps.
  /// \throws c10::Error if a factor is negative or not finite
  void set_lr_factors(std::vector<double> factors) {
    lr_factors_.set(std::move(factors), groups(), applied_steps());
  }
  /// Returns the lr factors; empty without a schedule.
  const std::vector<double>& lr_factors() const noexcept { return lr_factors_.table(); }

  /// Sets each group's `lr` option to the lr of the step after `applied_steps` applied steps.
  /// LrSchedule::step calls this. No-op without lr factors.
  ///
  /// An lr written to an option by hand holds until the next call. If a device counts the steps, a
  /// step with such an lr synchronizes.
  void set_optimizer_lrs(int64_t applied_steps) {
    lr_factors_.set_optimizer_lrs(groups(), applied_steps);
  }

  /// Returns the base lr of each group; without lr factors, the `lr` options.
  std::vector<double> base_lrs() { return lr_factors_.base_lrs(groups()); }

  /// Returns the lr of each group's next step. Synchronizes if a device counts the steps.
  std::vector<double> lrs() {
    return has_schedule() ? lr_factors_.lrs(groups(), applied_steps()) : base_lrs();
  }

  /// Sets the base lr of each group, for state that you restore yourself.
  /// \throws c10::Error unless there is one for each group
  void set_base_lrs(const std::vector<double>& lrs) {
    TORCH_CHECK(lrs.size() == groups().size(), "set_base_lrs: expected ", groups().size(),
                " learning rates, one for each param group, but got ", lrs.size());
    lr_factors_.set_base_lrs(groups(), lrs);
    set_optimizer_lrs(applied_steps());
  }

  /// Returns whether the host counts the applied steps. Otherwise a device does, and
  /// `applied_steps` synchronizes.
  bool has_host_step_count() const noexcept { return applied_steps_.on_host(); }

  /// Returns the number of applied (not skipped) steps, steps without any gradient included. `save`
  /// writes it. After loading a torch::optim archive it is the highest `step` of a parameter, and 0
  /// for torch::optim::SGD, which has none. Synchronizes if a device counts.
  int64_t applied_steps() const { return applied_steps_.value(); }

  /// Sets the number of applied steps: the next step uses lr_factors()[applied_steps]. For state
  /// that you restore yourself and for restarted schedules; `torch::load` restores the number. The
  /// `step` of each parameter (for Adam's bias correction) does not change. Writes to the device
  /// without synchronizing if a device counts, and captured graphs follow; a device counts to 2^24.
  /// \throws c10::Error if negative
  void set_applied_steps(int64_t applied_steps) {
    TORCH_CHECK(applied_steps >= 0, "set_applied_steps: applied_steps is ", applied_steps,
                "; it should be at least 0");
    applied_steps_.step_count().set_in_place(applied_steps);
    set_optimizer_lrs(applied_steps);
  }

  /// Returns the parameters that have a gradient, checked. Writes no parameter.
  /// \throws c10::Error, naming the parameter or option, if `apply` does not support the step
  virtual StepPlan plan() = 0;

  /// Returns statistics of the plan's gradients over all devices, on the device of the first
  /// gradient, from one read. Does not synchronize, except to coalesce sparse gradients.
  /// \param inv_scale  float32 scalar on any device
  virtual GradStats grad_stats(const StepPlan& plan, const at::Tensor& inv_scale) {
    const c10::NoGradGuard no_grad;
    return detail::compute_grad_stats_across_devices(detail::dense_gradients(plan), inv_scale);
  }

  /// Applies the step, or skips it if `stats.found_inf` is nonzero: parameters, moments and counts
  /// then do not change. Runs on the current streams. mezzo's optimizers synchronize only if the
  /// parameters are on several devices.
  virtual void apply(StepPlan plan, const GradStats& stats = {},
                     const StepOptions& options = {}) = 0;

  /// Returns the float32 master of `parameter`, created if necessary and equal to the parameter's
  /// current value; the parameter itself if it has no master. Until the next step the master's
  /// `.grad` is the parameter's `.grad`.
  /// \throws c10::Error for WeightStorage::split_master, which has no master tensor
  virtual at::Tensor master_param(const at::Tensor& parameter) { return parameter; }

  /// Switches float16 and bfloat16 parameters from WeightStorage::plain to float32 masters.
  /// \throws c10::Error if this optimizer does not support masters
  virtual void enable_master_weights() {
    TORCH_CHECK(
        false,
        "enable_master_weights: this optimizer does not support float32 masters; pass "
        "mezzo::initialize a level with master_weights = false, or use mezzo::optim::AdamW, "
        "Adam, SGD or Lion");
  }

 protected:
  /// Writes the number of applied steps and, with lr factors, the base lrs.
  void save_progress(torch::serialize::OutputArchive& archive) const {
    archive.write("applied_steps", c10::IValue(applied_steps()));
    if (!has_schedule()) return;
    const auto& groups = const_cast<MixedPrecisionOptimizer*>(this)->groups();
    archive.write("base_lrs", c10::IValue(lr_factors_.base_lrs(groups)));
  }

  /// Restores the progress of an archive whose options are already loaded. The host counts until
  /// the next step on a device.
  void load_progress(const detail::StepProgress& progress) {
    applied_steps_.step_count().set_on_host(progress.applied_steps.value_or(0));
    lr_factors_.load_base_lrs(progress.base_lrs, groups());
    set_optimizer_lrs(applied_steps());
  }

  /// Returns whether there are lr factors.
  bool has_schedule() const noexcept { return !lr_factors_.empty(); }

  detail::LrFactors lr_factors_;
  detail::AppliedSteps applied_steps_;

 private:
  std::vector<torch::optim::OptimizerParamGroup>& groups() noexcept {
    return optimizer().param_groups();
  }
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
