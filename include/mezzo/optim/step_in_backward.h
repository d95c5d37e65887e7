/// \file
/// StepInBackward: steps each parameter as soon as its gradient is complete, and frees the
/// gradient.
#pragma once

#include <mezzo/optim/detail/grad_hooks.h>
#include <mezzo/optim/optimizer_ref.h>
#include <mezzo/optim/step_result.h>

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/ScopeExit.h>

#include <cmath>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Steps each parameter of an optimizer in the backward pass, as soon as its gradient is complete,
/// and frees the gradient. torchtune's `optimizer_in_bwd`.
///
/// \code
///   mezzo::StepInBackward in_backward(optimizer);
///   for (auto& batch : *loader) {
///     loss(model, batch).backward();
///     schedule.step(in_backward.step());               // instead of optimizer.step()
///   }
/// \endcode
///
/// Weights, states and step counts are bitwise identical to those of `optimizer.step()` after the
/// backward pass. A parameter whose gradient has an inf or NaN is skipped, and others are not.
/// Under a DistributedDataParallel or GradReducer, parameters step when their bucket is reduced,
/// and the buckets keep their memory.
///
/// A loss scale, clipping by the norm and gradient accumulation need all gradients together:
/// GradScaler throws for a loss or optimizer of these parameters, and a second backward pass before
/// `step()` throws at a parameter that has stepped. If a backward pass throws, some parameters have
/// stepped.
class StepInBackward {
 public:
  /// Installs a post-accumulate hook in each parameter, which first calls the existing one. The
  /// optimizer must outlive this object.
  /// \throws c10::Error for a ShardedOptimizer or ModelParallelOptimizer, for parameters on several
  ///   devices, and for a second StepInBackward
  inline explicit StepInBackward(OptimizerRef optimizer);
  inline ~StepInBackward();
  StepInBackward(const StepInBackward&) = delete;
  StepInBackward& operator=(const StepInBackward&) = delete;

  /// Ends an iteration: steps parameters whose gradients no hook has seen (set by hand, or of a
  /// group that was added later) in the same way, and counts the step. Returns an applied step,
  /// with `found_inf()` if a parameter was skipped; a device's values synchronize when they are
  /// read.
  inline StepResult step();

 private:
  class Result;
  struct State;
  struct Hook;

  std::shared_ptr<State> state_;
  std::vector<at::Tensor> hooked_;
};

/// The result of a step that was applied. Reads values on a device at their first use.
class StepInBackward::Result final : public StepFuture {
 public:
  explicit Result(GradStats stats) : stats_(std::move(stats)), is_read_(!stats_.defined()) {
    if (!is_read_ && stats_.found_inf.is_cpu()) (void)values();
  }
  bool ready() const noexcept override { return is_read_; }
  const StepResult::Values& values() override {
    if (is_read_) return values_;
    values_.found_inf = stats_.found_inf.item<float>() != 0;
    values_.grad_norm = std::sqrt(stats_.norm_sq.item<double>());
    values_.grad_max_abs = stats_.max_abs.item<double>();
    is_read_ = true;
    return values_;
  }
  at::Tensor found_inf_on_device() const override {  // 0: the step was applied
    return is_read_ ? at::Tensor() : at::zeros_like(stats_.found_inf);
  }

 private:
  GradStats stats_;
  bool is_read_;
  StepResult::Values values_{.applied = true, .step_return = at::Tensor()};
};

/// Shared with the hooks, which outlive a StepInBackward if another library's hooks hold them.
struct StepInBackward::State {
  explicit State(OptimizerRef ref) : optimizer(ref) {}

  /// Steps a parameter, with the gradients of all others hidden, and frees its gradient.
  void step_param(const at::Tensor& parameter) {
    const c10::NoGradGuard no_grad;
    if (!parameter.mutable_grad().defined()) return;  // faster than grad(), here and below
    const detail::OptimizerDescription description{"", optimizer.optimizer().param_groups()};
    TORCH_CHECK(!stepped.contains(parameter.unsafeGetTensorImpl()),
                "StepInBackward: a second backward pass reached ",
                description.describe_param(parameter),
                ", which has stepped already; call step() after each backward pass. Without a "
                "StepInBackward, gradients of several passes accumulate before optimizer.step()");
    std::vector<std::pair<at::Tensor, at::Tensor>> hidden;
    const auto restore = c10::make_scope_exit([&hidden] {
      for (auto& [other, gradient] : hidden) other.mutable_grad() = gradient;
    });
    detail::for_each_parameter(optimizer.optimizer(), [&](const at::Tensor& other) {
      if (other.is_same(parameter) || !other.mutable_grad().defined()) return;
      hidden.emplace_back(other, std::exchange(other.mutable_grad(), at::Tensor()));
    });
    StepPlan plan = detail::make_plan(optimizer);
    if (plan.params.empty()) return;  // in no group
    plan.is_partial = true;
    const GradStats param_stats = detail::compute_grad_stats(
        optimizer, plan, at::ones({}, at::device(parameter.device()).dtype(at::kFloat)));
    if (optimizer.mixed_precision() != nullptr) {
      optimizer.mixed_precision()->apply(std::move(plan), param_stats);
    } else if (param_stats.found_inf.item<float>() == 0) {
      optimizer.step();
    }
    stepped.insert(parameter.unsafeGetTensorImpl());
    parameter.mutable_grad() = at::Tensor();
    stats.defined() ? detail::merge(stats, param_stats) : void(stats = param_stats);
  }

  OptimizerRef optimizer;
  std::mutex mutex{};
  std::unordered_set<const at::TensorImpl*> stepped{};  // since the last step()
  GradStats stats{};
};

struct StepInBackward::Hook final : detail::ChainedGradHook {
  explicit Hook(std::weak_ptr<State> owner) : state(std::move(owner)) {}
  bool steps() const override { return !state.expired(); }
  void on_accumulated(const at::Tensor& parameter) override {
    if (!steps()) return;
    const auto is_this = [this](const auto& hook) { return &hook == this; };
    TORCH_CHECK(detail::find_grad_hook(parameter, is_this) != nullptr,
                "StepInBackward: a post-accumulate hook that is not mezzo's was set after the "
                "StepInBackward was constructed; set it before");
    const auto completes_later = [](const auto& hook) { return hook.completes_later(); };
    if (detail::find_grad_hook(parameter, completes_later) == nullptr) on_complete(parameter);
  }
  void on_complete(const at::Tensor& parameter) override {
    const auto alive = state.lock();
    if (alive == nullptr) return;
    const std::lock_guard lock(alive->mutex);
    alive->step_param(parameter);
  }

  std::weak_ptr<State> state;
};

inline StepInBackward::StepInBackward(OptimizerRef optimizer)
    : state_(std::make_shared<State>(optimizer)),
      hooked_(detail::OptimizerDescription{"", optimizer.optimizer().param_groups()}.parameters()) {
  TORCH_CHECK(dynamic_cast<optim::ShardedOptimizerTag*>(&optimizer.optimizer()) == nullptr &&
                  optimizer.grad_stats_provider() == nullptr,
              "StepInBackward does not support ShardedOptimizer and ModelParallelOptimizer, whose "
              "steps are collective calls; pass an unsharded optimizer");
  for (const at::Tensor& parameter : hooked_) {
    TORCH_CHECK(parameter.device() == hooked_[0].device(),
                "StepInBackward: the parameters are on several devices, whose backward passes run "
                "at the same time; construct an optimizer and a StepInBackward for each device");
    TORCH_CHECK(!detail::is_stepped_in_backward(parameter),
                "StepInBackward: another StepInBackward steps this optimizer; destroy it first");
  }
  for (const at::Tensor& parameter : hooked_)
    detail::install_grad_hook(parameter, std::make_unique<Hook>(state_));
  ++detail::num_steps_in_backward;
}

inline StepInBackward::~StepInBackward() {
  for (const at::Tensor& parameter : hooked_) {
    detail::remove_grad_hook(parameter, [this](const detail::ChainedGradHook& hook) {
      const auto* const own = dynamic_cast<const Hook*>(&hook);
      return own != nullptr && own->state.lock() == state_;
    });
  }
  --detail::num_steps_in_backward;
}

inline StepResult StepInBackward::step() {
  const std::lock_guard lock(state_->mutex);
  state_->stepped.clear();
  detail::for_each_parameter(state_->optimizer.optimizer(),
                             [this](const at::Tensor& other) { state_->step_param(other); });
  state_->optimizer.step();
  state_->stepped.clear();
  return StepResult(std::make_shared<Result>(std::exchange(state_->stats, {})));
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
