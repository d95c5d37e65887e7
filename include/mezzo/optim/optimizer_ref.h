/// \file
/// OptimizerRef: a reference to any optimizer. accumulate_in_float: float32 gradient accumulation.
#pragma once

#include <mezzo/base/detail/autocast_mode.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/optimizer_refs.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/mixed_precision_optimizer.h>
#include <mezzo/optim/step_plan.h>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <concepts>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The torch::optim optimizer whose last step with a GradScaler in this thread was skipped; null if
/// it was applied. Compared, never dereferenced.
inline thread_local const torch::optim::Optimizer* skipped_optimizer = nullptr;

/// A MixedPrecisionOptimizer that is not a torch::optim::Optimizer but wraps one, as MasterWeights.
template <class T>
concept OptimizerWrapper = std::derived_from<T, optim::MixedPrecisionOptimizer> &&
    !std::derived_from<T, torch::optim::Optimizer>;

}  // namespace detail

namespace optim {

/// Computes the statistics of gradients on several ranks, instead of the optimizer, which has those
/// of one rank.
struct GradStatsProvider {
  virtual ~GradStatsProvider() = default;
  /// See MixedPrecisionOptimizer::grad_stats. \param plan  may be empty
  virtual GradStats grad_stats(const StepPlan& plan, const at::Tensor& inv_scale) = 0;
};

}  // namespace optim

/// Non-owning reference to any optimizer: torch::optim's, mezzo's, your own, or a MasterWeights.
/// GradScaler, clipping and schedules take one by value. The optimizer must outlive it.
class OptimizerRef {
 public:
  /// Refers to a torch::optim::Optimizer, mezzo's included.
  OptimizerRef(torch::optim::Optimizer& optimizer)
      : optimizer_(&optimizer),
        mixed_precision_(dynamic_cast<optim::MixedPrecisionOptimizer*>(&optimizer)) {}
  /// Refers to an optimizer wrapper: a MasterWeights.
  template <detail::OptimizerWrapper T>
  OptimizerRef(T& wrapper) : optimizer_(&wrapper.optimizer()), mixed_precision_(&wrapper) {}
  /// Refers to `optimizer`, with statistics by `provider`.
  OptimizerRef(const OptimizerRef& optimizer, optim::GradStatsProvider& provider) noexcept
      : OptimizerRef(optimizer) {
    grad_stats_provider_ = &provider;
  }
  template <detail::OptimizerPointer Pointer>
  OptimizerRef(const Pointer&) = delete;  // mezzo takes optimizers by reference: pass *optimizer

  /// Returns the optimizer that holds the param groups; for a MasterWeights the one that it wraps.
  torch::optim::Optimizer& optimizer() const noexcept { return *optimizer_; }
  /// Returns the optimizer as a MixedPrecisionOptimizer; null if it is not one.
  optim::MixedPrecisionOptimizer* mixed_precision() const noexcept { return mixed_precision_; }
  /// Returns the provider of gradient statistics; null if the optimizer computes its own.
  optim::GradStatsProvider* grad_stats_provider() const noexcept { return grad_stats_provider_; }

  /// Steps with the gradients as they are. Calls `closure` first, if given, and returns its loss.
  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) const {
    if (mixed_precision_ != nullptr) return mixed_precision_->step(std::move(closure));
    at::Tensor loss = optimizer_->step(std::move(closure));
    detail::clear_autocast_cache();
    return loss;
  }
  /// Writes the optimizer's archive.
  void save(torch::serialize::OutputArchive& archive) const {
    mixed_precision_ != nullptr ? mixed_precision_->save(archive) : optimizer_->save(archive);
  }
  /// Reads the optimizer's archive. \throws c10::Error as the optimizer's `load` does
  void load(torch::serialize::InputArchive& archive) const {
    mixed_precision_ != nullptr ? mixed_precision_->load(archive) : optimizer_->load(archive);
  }

 private:
  torch::optim::Optimizer* optimizer_;
  optim::MixedPrecisionOptimizer* mixed_precision_;
  optim::GradStatsProvider* grad_stats_provider_ = nullptr;
};

namespace detail {

/// Returns the plan of a step of any optimizer.
inline StepPlan make_plan(OptimizerRef optimizer) {
  optim::MixedPrecisionOptimizer* const mixed_precision = optimizer.mixed_precision();
  StepPlan plan =
      mixed_precision != nullptr ? mixed_precision->plan() : make_torch_plan(optimizer.optimizer());
  plan.other_ranks_have_grads = optimizer.grad_stats_provider() != nullptr;
  return plan;
}

/// Returns the statistics of a step of any optimizer.
inline GradStats compute_grad_stats(OptimizerRef optimizer, const StepPlan& plan,
                                    const at::Tensor& inv_scale) {
  if (optimizer.grad_stats_provider() != nullptr)
    return optimizer.grad_stats_provider()->grad_stats(plan, inv_scale);
  return optimizer.mixed_precision() != nullptr
             ? optimizer.mixed_precision()->grad_stats(plan, inv_scale)
             : compute_grad_stats_across_devices(dense_gradients(plan), inv_scale);
}

}  // namespace detail

/// `torch::save(optimizer, path)` and `torch::load(optimizer, path)` for an OptimizerRef or a
/// MasterWeights (include <torch/serialize.h>).
template <class Archive, class T>
requires std::same_as<Archive, torch::serialize::OutputArchive> &&
    (std::same_as<T, OptimizerRef> || detail::OptimizerWrapper<T>)Archive&
    operator<<(Archive& archive, const T& optimizer) {
  optimizer.save(archive);
  return archive;
}

/// Loads the archive of an optimizer; see operator<<.
template <class Archive, class T>
requires std::same_as<Archive, torch::serialize::InputArchive> &&
    (std::same_as<T, OptimizerRef> || detail::OptimizerWrapper<T>)Archive&
    operator>>(Archive& archive, T& optimizer) {
  optimizer.load(archive);
  return archive;
}

/// Makes autograd accumulate gradients of bfloat16 and float16 parameters in float32 (torch's
/// `grad_dtype`), as Megatron's main_grad: 1,000 micro-batches with gradient 1 give 1000 instead of
/// bfloat16's 256. `.grad` is then a float32 tensor of 4 bytes an element instead of 2. Every step
/// and torch's clipping accept it. Converts existing gradients; skips float32 and float64
/// parameters.
///
/// Call it after the model is cast and before DistributedDataParallel or GradBuckets are
/// constructed. The setting belongs to the parameters, frozen ones included, and cannot be undone.
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
