/// \file
/// MixedPrecisionOptimizer: a training step as values. StepPlan lists the parameters that take
/// part, GradStats holds what one read of the gradients found, and `apply` does the rest in one
/// pass. OptimizerRef: a reference to any optimizer.
#pragma once

#include <mezzo/base/detail/autocast_mode.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/grad_stats.h>
#include <mezzo/optim/detail/applied_steps.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/detail/lr_factors.h>
#include <mezzo/optim/detail/optimizer_description.h>
#include <mezzo/optim/step_plan.h>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

/// A base of optimizers whose state the ranks of a group share: their `load` is given all states on
/// the CPU, and brings those that it keeps to the devices of their parameters.
struct ShardedState {
  virtual ~ShardedState() = default;
};

/// An optimizer that unscales, clips, updates and zeroes in one pass over its memory. The device
/// decides whether the step is skipped, so that the host never waits:
///
/// \code
///   StepPlan plan = optimizer.plan();
///   GradStats stats = optimizer.grad_stats(plan, inv_scale);
///   optimizer.apply(std::move(plan), stats, {.max_norm = 1.0});
/// \endcode
///
/// GradScaler::step calls these three functions. Between `plan` and `apply` groups, gradients and
/// states must not change. The optimizer counts the applied steps, on the host for parameters on
/// the CPU and elsewhere on the device that decides whether a step is applied.
///
/// mezzo's optimizers are a torch::optim::Optimizer and a MixedPrecisionOptimizer; a MasterWeights
/// is a MixedPrecisionOptimizer alone, and steps another optimizer.
class MixedPrecisionOptimizer {
 public:
  MixedPrecisionOptimizer() = default;
  MixedPrecisionOptimizer(const MixedPrecisionOptimizer&) = delete;  // as torch::optim::Optimizer's
  MixedPrecisionOptimizer& operator=(const MixedPrecisionOptimizer&) = delete;
  /// Takes the counts and the schedule over.
  MixedPrecisionOptimizer(MixedPrecisionOptimizer&&) = default;
  /// Takes the counts and the schedule over.
  MixedPrecisionOptimizer& operator=(MixedPrecisionOptimizer&&) = default;
  virtual ~MixedPrecisionOptimizer() = default;

  /// Returns the optimizer whose groups are trained: this one, or the one that a MasterWeights
  /// steps.
  virtual torch::optim::Optimizer& optimizer() noexcept = 0;

  /// Takes a step without a scaler: calls `closure` once, if there is one, steps with the gradients
  /// as they are, and returns what the closure returned.
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

  /// Sets the learning rates of steps to come, as a table: after n applied steps the next step
  /// multiplies each group's base rate by `factors[n]`, and by the last factor once n is larger
  /// (LrSchedule makes the table of a curve). An empty table ends the schedule: the `lr` options
  /// are the base rates again. The base rates are what the options say when the first table is set,
  /// and stay: a rate of 0 loses none.
  ///
  /// The device that decides whether a step is applied looks the factor up: a skipped step uses up
  /// no factor, nothing waits, and captured CUDA graphs follow the table. Set it before a capture,
  /// and step once; a graph captured earlier reads the memory of the old table: capture it anew.
  /// The table is not in files: `load` keeps it, and goes on at the saved number of steps. Waits
  /// where a device has counted steps already.
  /// \throws c10::Error if a factor is negative or not finite
  void set_lr_factors(std::vector<double> factors) {
    lr_factors_.set(std::move(factors), groups(), applied_steps());
  }
  /// Returns the table of a schedule; empty if there is none.
  const std::vector<double>& lr_factors() const noexcept { return lr_factors_.table(); }

  /// Sets each group's `lr` option to the rate of the step after `applied_steps` applied steps, so
  /// that whoever reads it sees the rate in use. LrSchedule::step calls this. Without a table it
  /// does nothing.
  ///
  /// A rate that you write to an option holds until the next call. Where a device counts the steps,
  /// a step with such a rate waits for the count.
  void set_optimizer_lrs(int64_t applied_steps) {
    lr_factors_.set_optimizer_lrs(groups(), applied_steps);
  }

  /// Returns the rates that the factors multiply, one for each group. Without a table they are the
  /// groups' `lr` options.
  std::vector<double> base_lrs() { return lr_factors_.base_lrs(groups()); }

  /// Returns the rate of each group's next step. Waits for the device that counts the steps.
  std::vector<double> lrs() {
    return has_schedule() ? lr_factors_.lrs(groups(), applied_steps()) : base_lrs();
  }

  /// Makes `lrs` the base rates, for files of your own.
  /// \throws c10::Error unless there is one for each group
  void set_base_lrs(const std::vector<double>& lrs) {
    TORCH_CHECK(lrs.size() == groups().size(), "set_base_lrs: there are ", lrs.size(),
                " rates for ", groups().size(), " param groups; give one for each");
    lr_factors_.set_base_lrs(groups(), lrs);
    set_optimizer_lrs(applied_steps());
  }

  /// Whether the host counts the applied steps; otherwise a device does, and `applied_steps` waits
  /// for it.
  bool has_host_step_count() const noexcept { return applied_steps_.on_host(); }

  /// Returns how many steps were applied, that is, not skipped; steps without any gradient count
  /// too. The number is in files; from libtorch's it is the highest count of a parameter, and 0
  /// from those of torch::optim::SGD, which have none. Waits for the device that counts: that of
  /// the parameters.
  int64_t applied_steps() const { return applied_steps_.value(); }

  /// Goes on as after `applied_steps` applied steps: the next step's factor is
  /// lr_factors()[applied_steps]. For files of your own and for schedules that begin anew;
  /// `torch::load` restores the number by itself. The counts of single parameters (for the
  /// corrections of Adam's early steps) stay. Where a device counts, the number is written there
  /// without waiting, and captured graphs go on from it; a device counts to 2^24.
  /// \throws c10::Error if negative
  void set_applied_steps(int64_t applied_steps) {
    TORCH_CHECK(applied_steps >= 0, "set_applied_steps: applied_steps is ", applied_steps,
                "; it should be at least 0");
    applied_steps_.step_count().overwrite(applied_steps);
    set_optimizer_lrs(applied_steps);
  }

  /// Returns the plan of a step: one row for each parameter with a gradient. Writes no weight.
  /// \throws c10::Error, naming the parameter or option, if `apply` could not take the step
  virtual StepPlan plan() = 0;

  /// Reads the plan's gradients once, and returns what it found on all devices, in tensors on the
  /// device of the first gradient. Does not synchronise, except to coalesce sparse gradients.
  /// \param inv_scale a float of one element, on any device
  virtual GradStats grad_stats(const StepPlan& plan, const at::Tensor& inv_scale) {
    const c10::NoGradGuard no_grad;
    return detail::compute_grad_stats_across_devices(detail::dense_gradients(plan), inv_scale);
  }

  /// Takes the step, or skips it where the statistics have an inf: parameters, moments and counts
  /// then keep every bit. Runs on the current streams. Waits for a device only where parameters lie
  /// on several.
  virtual void apply(StepPlan plan, const GradStats& stats = {},
                     const StepOptions& options = {}) = 0;

  /// Returns the tensor that a step trains in place of `parameter`: its float master, made if there
  /// is none and equal to the parameter as it is now; or the parameter. Until the next step the
  /// master's `.grad` is the parameter's, the same tensor.
  /// \throws c10::Error for WeightStorage::split_master, whose master is no tensor
  virtual at::Tensor master_param(const at::Tensor& parameter) { return parameter; }

  /// Trains parameters of half and bfloat16 as float masters from here on, if their storage was
  /// `plain`.
  /// \throws c10::Error if this optimizer keeps no masters
  virtual void enable_master_weights() {
    TORCH_CHECK(
        false,
        "enable_master_weights: this optimizer keeps no float masters; give "
        "mezzo::initialize a level with master_weights = false, or use mezzo::optim::AdamW, "
        "Adam, SGD or Lion");
  }

 protected:
  /// Writes the number of applied steps and, under a schedule, the base rates.
  void save_progress(torch::serialize::OutputArchive& archive) const {
    archive.write("applied_steps", c10::IValue(applied_steps()));
    if (!has_schedule()) return;
    const auto& groups = const_cast<MixedPrecisionOptimizer*>(this)->groups();
    archive.write("base_lrs", c10::IValue(lr_factors_.base_lrs(groups)));
  }

  /// What `save_progress` wrote.
  struct Progress {
    std::optional<int64_t> applied_steps{};  ///< none in a file without a count
    std::vector<double> base_lrs{};          ///< empty where the options are the base rates
  };

  /// Reads the progress in a file for an optimizer of `groups` param groups.
  /// \throws c10::Error for numbers that no file of mezzo's has
  static Progress read_progress(torch::serialize::InputArchive& archive, std::size_t groups) {
    Progress progress;
    c10::IValue value;
    if (archive.try_read("applied_steps", value)) {
      TORCH_CHECK(value.isInt(),
                  "The archive of an optimizer has a number of applied steps that is no integer; "
                  "it is damaged: load an earlier one");
      progress.applied_steps = value.toInt();
      detail::check_steps(*progress.applied_steps);
    }
    if (archive.try_read("base_lrs", value)) {
      if (value.isDoubleList()) progress.base_lrs = value.toDoubleVector();
      const auto& lrs = progress.base_lrs;
      const auto is_bad = [](double lr) { return detail::is_nonfinite(lr); };
      TORCH_CHECK(lrs.size() == groups && std::ranges::none_of(lrs, is_bad),
                  "The archive of an optimizer has the base rates [", c10::Join(", ", lrs),
                  "] for ", groups, " param groups; it is damaged: load an earlier one");
    }
    return progress;
  }

  /// Goes on from a file's progress, after its options were taken over. From here on the host
  /// counts, until a device is to.
  void load_progress(const Progress& progress) {
    applied_steps_.step_count().set(progress.applied_steps.value_or(0));
    lr_factors_.load_base_lrs(progress.base_lrs, groups());
    set_optimizer_lrs(applied_steps());
  }

  /// Returns whether there is a table of factors.
  bool has_schedule() const noexcept { return !lr_factors_.empty(); }

  detail::LrFactors lr_factors_;
  detail::AppliedSteps applied_steps_;

 private:
  std::vector<torch::optim::OptimizerParamGroup>& groups() noexcept {
    return optimizer().param_groups();
  }
};

}  // namespace optim

namespace detail {

/// The optimizer not mezzo's whose last step with a GradScaler in this thread was skipped; null if
/// that step ran. Only compared, never followed.
inline thread_local const torch::optim::Optimizer* skipped_optimizer = nullptr;

/// A class that steps an optimizer and is none itself: MasterWeights, or one of yours.
template <class T>
concept OptimizerWrapper = std::derived_from<T, optim::MixedPrecisionOptimizer> &&
    !std::derived_from<T, torch::optim::Optimizer>;

/// Deleted where it is given: a compiler then shows the line that says what to write instead.
template <class T>
concept PointsToOptimizer = requires(const T& pointer) {
  { *pointer } -> std::convertible_to<torch::optim::Optimizer&>;
};

}  // namespace detail

/// A reference to any optimizer: what GradScaler, clipping and schedules take. Pass an optimizer of
/// torch::optim or your own, one of mezzo's, or a MasterWeights; it must outlive the reference.
class OptimizerRef {
 public:
  /// Refers to any optimizer that is a torch::optim::Optimizer, mezzo's own among them.
  OptimizerRef(torch::optim::Optimizer& optimizer)
      : optimizer_(&optimizer),
        mixed_precision_(dynamic_cast<optim::MixedPrecisionOptimizer*>(&optimizer)) {}
  /// Refers to what steps another optimizer: a MasterWeights.
  template <detail::OptimizerWrapper T>
  OptimizerRef(T& wrapper) : optimizer_(&wrapper.optimizer()), mixed_precision_(&wrapper) {}
  template <detail::PointsToOptimizer Pointer>
  OptimizerRef(const Pointer&) = delete;  // mezzo takes optimizers by reference: give *optimizer

  /// Returns the optimizer whose groups hold the parameters; for a MasterWeights the one that it
  /// steps.
  torch::optim::Optimizer& optimizer() const noexcept { return *optimizer_; }
  /// Returns mezzo's view of the optimizer; null for an optimizer that is not mezzo's.
  optim::MixedPrecisionOptimizer* mixed_precision() const noexcept { return mixed_precision_; }

  /// Takes a step with the gradients as they are. `closure`, if given, is called first, and its
  /// loss returned.
  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) const {
    if (mixed_precision_ != nullptr) return mixed_precision_->step(std::move(closure));
    at::Tensor loss = optimizer_->step(std::move(closure));
    detail::clear_autocast_cache();
    return loss;
  }
  /// Writes the optimizer's file.
  void save(torch::serialize::OutputArchive& archive) const {
    mixed_precision_ != nullptr ? mixed_precision_->save(archive) : optimizer_->save(archive);
  }
  /// Reads the optimizer's file. \throws c10::Error as the optimizer's own `load` does
  void load(torch::serialize::InputArchive& archive) const {
    mixed_precision_ != nullptr ? mixed_precision_->load(archive) : optimizer_->load(archive);
  }

 private:
  torch::optim::Optimizer* optimizer_;
  optim::MixedPrecisionOptimizer* mixed_precision_;
};

namespace detail {

/// Returns the plan of a step of any optimizer.
inline StepPlan make_plan(OptimizerRef optimizer) {
  optim::MixedPrecisionOptimizer* const fused = optimizer.mixed_precision();
  return fused != nullptr ? fused->plan() : make_torch_plan(optimizer.optimizer());
}

}  // namespace detail

/// `torch::save(optimizer, path)` and `torch::load(optimizer, path)` for a reference, and for a
/// MasterWeights (include <torch/serialize.h>).
template <class Archive, class T>
requires std::same_as<Archive, torch::serialize::OutputArchive> &&
    (std::same_as<T, OptimizerRef> || detail::OptimizerWrapper<T>)Archive&
    operator<<(Archive& archive, const T& optimizer) {
  optimizer.save(archive);
  return archive;
}

/// Loads the file of an optimizer; see operator<<.
template <class Archive, class T>
requires std::same_as<Archive, torch::serialize::InputArchive> &&
    (std::same_as<T, OptimizerRef> || detail::OptimizerWrapper<T>)Archive&
    operator>>(Archive& archive, T& optimizer) {
  optimizer.load(archive);
  return archive;
}

/// Makes autograd add up the gradients of bfloat16 and half parameters in float (libtorch's
/// `set_grad_dtype`), as Megatron's main_grad: 1,000 micro-batches of 1 give 1000, where bfloat16
/// gives 256. `.grad` is then a float tensor, 4 bytes an element in place of 2, which libtorch's
/// clipping and every step take as any other. Converts gradients that there are, and passes over
/// parameters of float and double.
///
/// Call it after the model is cast and before a DistributedDataParallel or GradBuckets of its
/// parameters. The setting belongs to the parameters, frozen ones too, and is not taken back.
inline void accumulate_in_float(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    if (!detail::is_low_precision(parameter) || parameter.grad_dtype() == at::kFloat) continue;
    parameter.set_grad_dtype(at::kFloat);
    const at::Tensor& gradient = parameter.grad();
    if (gradient.defined() && gradient.layout() == at::kStrided) {
      parameter.mutable_grad() = gradient.detach().to(at::kFloat);
    }
  }
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
