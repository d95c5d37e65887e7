/// \file
/// ShardedOptimizer: partitions the optimizer state across ranks (ZeRO stage 1).
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/sharded_optimizer_base.h>
#include <mezzo/distributed/grad_reducer.h>
#include <mezzo/optim/detail/fused_optimizer_base.h>
#include <mezzo/optim/detail/optimizer_description.h>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Partitions the states and updates of an optimizer across ranks, as torch's
/// ZeroRedundancyOptimizer: stage 1 of Rajbhandari et al., "ZeRO: Memory optimizations toward
/// training trillion parameter models" (2020).
///
/// \code
///   mezzo::ShardedOptimizer<mezzo::optim::AdamW> optimizer(
///       model->parameters(), world, mezzo::optim::AdamWOptions(2e-5));
///   for (auto& batch : *rank_loader) {
///     optimizer.zero_grad();
///     scaler.scale(loss(model, batch)).backward();   // all-reduces gradients in buckets
///     scaler.step(optimizer, {.max_norm = 1.0});     // or unscale_, clip_grad_norm_ and step
///     scaler.update();
///   }
/// \endcode
///
/// Each rank owns whole parameters. After a backward pass all ranks have all averaged gradients, so
/// that they skip, unscale and clip equally; a step updates the parameters that the rank owns, and
/// broadcasts them. Weights are bitwise identical to those of `OptimizerType` with the averaged
/// gradients. mezzo's fused optimizers remain fused; other optimizers, such as
/// `ShardedOptimizer<torch::optim::AdamW>`, are stepped by a GradScaler as usual.
///
/// Construction, backward, `step` and `save` are collective calls, and throw the errors of the
/// backend; restart from a checkpoint after one.
template <class OptimizerType>
class ShardedOptimizer : public detail::ShardedOptimizerBase<OptimizerType> {
 public:
  /// Broadcasts parameters from rank 0. `defaults` are options of `OptimizerType`.
  /// \throws c10::Error as OptimizerType; on all ranks, naming the first rank that differs, if
  ///   parameters or options differ
  template <std::derived_from<torch::optim::OptimizerOptions> Options>
  ShardedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                   c10::intrusive_ptr<c10d::Backend> backend, const Options& defaults,
                   const GradReducerOptions& options = {})
      : detail::ShardedOptimizerBase<OptimizerType>(groups, std::move(backend), options, defaults) {
  }
  /// With one param group.
  template <std::derived_from<torch::optim::OptimizerOptions> Options>
  ShardedOptimizer(std::vector<at::Tensor> parameters, c10::intrusive_ptr<c10d::Backend> backend,
                   const Options& defaults, const GradReducerOptions& options = {})
      : ShardedOptimizer({torch::optim::OptimizerParamGroup(std::move(parameters))},
                         std::move(backend), defaults, options) {}

  /// Steps the parameters that this rank owns, with the gradients of all others unset, and
  /// broadcasts the updates.
  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override {
    at::Tensor loss = detail::call_closure(closure);
    std::vector<at::Tensor> updated;
    std::vector<std::pair<at::Tensor, at::Tensor>> hidden;
    for (const auto& group : this->param_groups_) {
      for (const at::Tensor& parameter : group.params()) {
        if (!parameter.grad().defined()) continue;
        updated.push_back(parameter);
        if (this->partition_.get_owner(parameter) != this->partition_.rank()) {
          hidden.emplace_back(parameter, parameter.grad());
        }
      }
    }
    const auto restore = c10::make_scope_exit([&hidden] {
      for (auto& [parameter, gradient] : hidden) parameter.mutable_grad() = gradient;
    });
    for (auto& [parameter, gradient] : hidden) parameter.mutable_grad().reset();
    OptimizerType::step();
    this->partition_.broadcast_updates(updated);
    return loss;
  }
};

/// ShardedOptimizer of a fused optimizer: `plan` and `grad_stats` cover all averaged gradients, and
/// `apply` updates the parameters that this rank owns.
template <std::derived_from<detail::FusedOptimizerBase> OptimizerType>
class ShardedOptimizer<OptimizerType> : public detail::ShardedOptimizerBase<OptimizerType> {
 public:
  using typename OptimizerType::Options;

  /// Broadcasts parameters from rank 0.
  /// \throws c10::Error as OptimizerType; on all ranks, naming the first rank that differs, if
  ///   parameters or options differ
  ShardedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                   c10::intrusive_ptr<c10d::Backend> backend, const Options& defaults,
                   const GradReducerOptions& options = {},
                   const optim::WeightStorageOptions& weights = {})
      : detail::ShardedOptimizerBase<OptimizerType>(groups, std::move(backend), options, defaults,
                                                    weights) {}
  /// With one param group.
  ShardedOptimizer(std::vector<at::Tensor> parameters, c10::intrusive_ptr<c10d::Backend> backend,
                   const Options& defaults, const GradReducerOptions& options = {},
                   const optim::WeightStorageOptions& weights = {})
      : ShardedOptimizer({torch::optim::OptimizerParamGroup(std::move(parameters))},
                         std::move(backend), defaults, options, weights) {}

  /// Returns an entry for each parameter that has a gradient, on all ranks.
  StepPlan plan() override {
    StepPlan plan = OptimizerType::plan();
    for (const StepPlan::Param& param : plan.params)
      (void)this->partition_.get_owner(*param.parameter);
    return plan;
  }

  /// Updates the parameters that this rank owns, and broadcasts the updates.
  void apply(StepPlan plan, const GradStats& stats = {}, const StepOptions& options = {}) override {
    const c10::NoGradGuard no_grad;
    std::vector<at::Tensor> updated;
    for (const StepPlan::Param& param : plan.params) {
      updated.push_back(*param.parameter);
      const bool is_owned_elsewhere =
          this->partition_.is_owned_elsewhere(param.parameter->unsafeGetTensorImpl());
      if (is_owned_elsewhere && options.zero_grad) param.gradient.zero_();
    }
    std::erase_if(plan.params, [this](const StepPlan::Param& param) {
      return this->partition_.is_owned_elsewhere(param.parameter->unsafeGetTensorImpl());
    });
    plan.other_ranks_have_grads = !updated.empty();
    OptimizerType::apply(std::move(plan), stats, options);
    this->partition_.broadcast_updates(updated);
  }

  /// Returns `parameter` itself if another rank owns it and its master.
  at::Tensor master_param(const at::Tensor& parameter) override {
    if (this->partition_.is_owned_elsewhere(parameter.unsafeGetTensorImpl())) return parameter;
    return OptimizerType::master_param(parameter);
  }
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
