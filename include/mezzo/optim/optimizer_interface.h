/// \file
/// What is known of mezzo's optimizers (how many steps were applied, the table that learning rates
/// follow), and a reference to any optimizer. Brings no kernels.
#pragma once

#include <mezzo/base/detail/capture.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/step_count.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

/// What counts the steps that were applied where it is decided whether one is: on the host for
/// parameters on the CPU, elsewhere on the device. mezzo's optimizers are a
/// torch::optim::Optimizer and this; a MasterWeights is this alone, and steps an optimizer of
/// somebody else's.
class OptimizerInterface {
 public:
  OptimizerInterface() = default;
  OptimizerInterface(const OptimizerInterface&) = default;
  OptimizerInterface& operator=(const OptimizerInterface&) = default;
  virtual ~OptimizerInterface() = default;

  /// The one whose groups are trained: itself, or the one that a MasterWeights steps.
  virtual torch::optim::Optimizer& optimizer() noexcept = 0;

  /// As a torch::optim::Optimizer's.
  virtual at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) = 0;
  virtual void save(torch::serialize::OutputArchive& archive) const = 0;
  virtual void load(torch::serialize::InputArchive& archive) = 0;

  /// A schedule as a table (mezzo/optim/lr_schedule.h makes it from a curve): after n applied steps
  /// the next one multiplies each group's lr by factors[n], and by the last factor from there on.
  /// The device that decides whether a step is applied looks the factor up, so that a skipped step
  /// does not use one up, without a host sync, and in a captured CUDA graph as well (set it before
  /// the capture, and step once; a graph that was captured before reads the old table's memory:
  /// capture it anew). Not in files: `load` keeps the table that there is, and goes on at the saved
  /// number of steps. Empty: no schedule. \throws c10::Error if a factor is negative or not finite
  void set_lr_factors(std::vector<double> factors) {
    for (std::size_t i = 0; i < factors.size(); ++i) {
      TORCH_CHECK(!detail::nonfinite_bits(factors[i]) && factors[i] >= 0,
                  "set_lr_factors: factors[", i, "] is ", factors[i],
                  "; it should be finite and at least 0");
    }
    lr_factors_ = std::move(factors);
    lr_factors_on_device_ = at::Tensor();
  }
  const std::vector<double>& lr_factors() const noexcept { return lr_factors_; }

  /// How many steps were applied, which is to say not skipped; steps without any gradient count
  /// too. The number is in files; from libtorch's it is the highest count of a parameter, and 0
  /// from those of torch::optim::SGD, which have none. Waits for the device that counts: that of
  /// the parameters.
  int64_t applied_steps() const {
    return detail::steps_counted(applied_on_host_, applied_on_device_);
  }

  /// Goes on as after so many applied steps: the next one's factor is lr_factors()[applied_steps].
  /// For files of your own and for schedules that begin anew; `torch::load` restores the number by
  /// itself. What parameters count for themselves (the corrections of Adam's early steps) stays.
  /// Where a device counts it is written there, without waiting, and captured graphs go on from it;
  /// a device counts to 2^24. \throws c10::Error if negative
  void set_applied_steps(int64_t applied_steps) {
    TORCH_CHECK(applied_steps >= 0, "set_applied_steps: applied_steps is ", applied_steps,
                "; it should be at least 0");
    applied_count().overwrite(applied_steps);
    applied_is_known_ = true;
  }

  /// Whether `applied_steps` counts all steps of the run: false from the load of a file without a
  /// count (torch::optim::SGD's) to the next `set_applied_steps` or load of a file that has one.
  /// The file of an LrSchedule then sets the count.
  bool knows_applied_steps() const noexcept { return applied_is_known_; }

 protected:
  /// Takes over the count of a file. From here on the host counts, until a device is to.
  void load_applied_steps(int64_t applied_steps) {
    detail::check_steps(applied_steps);
    applied_count().set(applied_steps);
    applied_is_known_ = true;
  }
  /// Counts from 0, after a file that holds no count.
  void forget_applied_steps() {
    applied_count().set(0);
    applied_is_known_ = false;
  }

  detail::StepCount applied_count() noexcept { return {applied_on_host_, applied_on_device_}; }
  /// The device's float that counts applied steps; undefined where the host counts.
  const at::Tensor& applied_on_device() const noexcept { return applied_on_device_; }

  /// What the next step multiplies the lr with, of which the host knows where it counts.
  double lr_factor(int64_t applied) const {
    if (lr_factors_.empty()) return 1.0;
    return lr_factors_[std::min(static_cast<std::size_t>(applied), lr_factors_.size() - 1)];
  }

  /// The table as doubles on `device`; undefined where there is none.
  const at::Tensor& lr_factors_on(at::Device device) {
    if (lr_factors_.empty()) return lr_factors_on_device_;
    if (!lr_factors_on_device_.defined() || lr_factors_on_device_.device() != device) {
      detail::check_is_warm(device, "the table of lr factors");
      lr_factors_on_device_ = at::tensor(lr_factors_, at::kDouble).to(device);
    }
    return lr_factors_on_device_;
  }

 private:
  std::vector<double> lr_factors_;
  at::Tensor lr_factors_on_device_;
  int64_t applied_on_host_ = 0;
  bool applied_is_known_ = true;
  at::Tensor applied_on_device_;
};

}  // namespace optim

namespace detail {

/// A MasterWeights, or a class of yours that steps an optimizer and is none.
template <class T>
concept StepsAnother = std::derived_from<T, optim::OptimizerInterface> &&
    !std::derived_from<T, torch::optim::Optimizer>;

/// Deleted where it is given: a compiler then shows the line that says what to write instead.
template <class T>
concept PointsToOptimizer = requires(const T& pointer) {
  { *pointer } -> std::convertible_to<torch::optim::Optimizer&>;
};

}  // namespace detail

/// A reference to any optimizer: what GradScaler, clipping and schedules take. Pass an optimizer of
/// torch::optim or your own, one of mezzo's, or a MasterWeights; it must outlive the reference.
class AnyOptimizer {
 public:
  AnyOptimizer(torch::optim::Optimizer& optimizer)
      : optimizer_(&optimizer), mezzos_(dynamic_cast<optim::OptimizerInterface*>(&optimizer)) {}
  template <detail::StepsAnother T>
  AnyOptimizer(T& stepper) : optimizer_(&stepper.optimizer()), mezzos_(&stepper) {}
  template <detail::PointsToOptimizer Pointer>
  AnyOptimizer(const Pointer&) = delete;  // mezzo takes optimizers by reference: give *optimizer

  /// Whose groups and gradients they are; of a MasterWeights the optimizer that it steps.
  torch::optim::Optimizer& optimizer() const noexcept { return *optimizer_; }
  /// What counts the steps; null where it is not mezzo's.
  optim::OptimizerInterface* mezzos() const noexcept { return mezzos_; }

  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) const {
    return mezzos_ != nullptr ? mezzos_->step(std::move(closure))
                              : optimizer_->step(std::move(closure));
  }
  void save(torch::serialize::OutputArchive& archive) const {
    mezzos_ != nullptr ? mezzos_->save(archive) : optimizer_->save(archive);
  }
  void load(torch::serialize::InputArchive& archive) const {
    mezzos_ != nullptr ? mezzos_->load(archive) : optimizer_->load(archive);
  }

 private:
  torch::optim::Optimizer* optimizer_;
  optim::OptimizerInterface* mezzos_;
};

/// `torch::save(optimizer, path)` and `torch::load(optimizer, path)` for a reference, and for a
/// MasterWeights (include <torch/serialize.h>).
template <class Archive, class T>
requires std::same_as<Archive, torch::serialize::OutputArchive> &&
    (std::same_as<T, AnyOptimizer> || detail::StepsAnother<T>)Archive&
    operator<<(Archive& archive, const T& optimizer) {
  optimizer.save(archive);
  return archive;
}

template <class Archive, class T>
requires std::same_as<Archive, torch::serialize::InputArchive> &&
    (std::same_as<T, AnyOptimizer> || detail::StepsAnother<T>)Archive&
    operator>>(Archive& archive, T& optimizer) {
  optimizer.load(archive);
  return archive;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
