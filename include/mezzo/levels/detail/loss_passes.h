#pragma once

#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/optimizer.h>
#include <mezzo/optim/step_result.h>
#include <mezzo/scaling/detail/set_aside.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Combines several losses, each with its own scale, into one step of an optimizer, as Apex does:
///
///     pass:          set true gradients aside, run backward from the scaled loss,
///                    take the scale off, move it, add back what was set aside
///     delayed pass:  run backward from the scaled loss; the gradients keep the scale until
///                    the next pass that is not delayed, a pass of another loss, or the step
///     step:          skip if a gradient is inf or NaN
///
/// A scale moves whenever it is taken off, which is from all gradients that carry it. An inf stays
/// in `.grad`, where the step finds it.
class LossPasses {
 public:
  using Optimizers = std::vector<torch::optim::Optimizer*>;

  /// A backward pass between `begin` and `end`. If the pass throws, the destructor restores the
  /// true gradients.
  struct Pass {
    at::Tensor scaled{};  ///< the loss to run backward from
    std::size_t loss = 0;
    Optimizers optimizers{};
    std::vector<std::unique_ptr<SetAside>> aside{};  ///< an optimizer; null if it had none
  };

  LossPasses() { verdict_.on_skip(nullptr); }

  void add_loss(const LossScale& options) { losses_.emplace_back(options); }
  void add_optimizer(AnyOptimizer optimizer) { all_.push_back({optimizer}); }

  std::size_t losses() const noexcept { return losses_.size(); }
  GradScaler& scaler(std::size_t loss) { return losses_[loss].scaler; }
  const GradScaler& scaler(std::size_t loss) const { return losses_[loss].scaler; }

  /// Whether a loss was scaled for `optimizer` since its last step.
  bool awaits_step(const torch::optim::Optimizer& optimizer) const {
    return known(optimizer).awaits_step;
  }
  bool any_awaits_step() const {
    return std::any_of(all_.begin(), all_.end(), [](const Known& one) { return one.awaits_step; });
  }

  /// Begins the backward pass of `value`, loss number `loss`.
  Pass begin(std::size_t loss, const at::Tensor& value, const Optimizers& optimizers) {
    if (losses_[loss].was_taken_off) move_scale(loss);  // which threw halfway
    for (const auto* optimizer : optimizers) {
      const Known& one = known(*optimizer);
      if (one.scaled_by.value_or(loss) != loss) move_scale(*one.scaled_by);
    }
    const bool is_low = is_low_precision(value.scalar_type());
    Pass pass{scaler(loss).scale(is_low ? value.to(at::kFloat) : value), loss, optimizers};
    for (auto* optimizer : optimizers) {  // after all that may throw
      Known& one = known(*optimizer);
      auto& aside = pass.aside.emplace_back();
      const bool has_true_gradients = one.awaits_step && !one.scaled_by;
      if (has_true_gradients) aside = std::make_unique<SetAside>(parameters_of(*optimizer));
      one.awaits_step = true;
      one.scaled_by = loss;
    }
    return pass;
  }

  /// Restores the gradients that were set aside, after the pass has thrown. Gradients that carried
  /// the same scale before the pass stay as the pass left them.
  void give_up(const Pass& pass) {
    for (std::size_t i = 0; i < pass.optimizers.size(); ++i) {
      if (pass.aside[i]) known(*pass.optimizers[i]).scaled_by.reset();
    }
  }

  /// Takes the scale off and moves it, and adds the gradients that were set aside; if `delays` is
  /// true, only where gradients were set aside. Without a delay an inf in the gradients of one
  /// optimizer counts for all optimizers of the pass, since the loss has overflowed.
  void end(const Pass& pass, bool delays) {
    const auto& aside = pass.aside;
    const bool has_aside =
        std::any_of(aside.begin(), aside.end(), [](const auto& one) { return one != nullptr; });
    if (delays && !has_aside) return;
    take_scale_off(pass.loss);
    if (!delays) share_inf(pass.optimizers);
    for (const auto& one : aside) {
      if (one) one->add_back();
    }
    end_iteration(pass.loss);
  }

  /// Steps an optimizer for which a loss was scaled.
  StepResult step(torch::optim::Optimizer& optimizer, const StepOptions& options) {
    Known& one = known(optimizer);
    if (one.scaled_by) move_scale(*one.scaled_by);
    StepResult result = step_if_finite(one.optimizer, options);
    one = Known{one.optimizer};
    return result;
  }

  /// Discards the losses that were scaled for `optimizer` since its last step.
  void zero_grad(torch::optim::Optimizer& optimizer, bool set_to_none) {
    optimizer.zero_grad(set_to_none);
    Known& one = known(optimizer);
    one = Known{one.optimizer};
  }

 private:
  /// The state of an optimizer between its steps.
  struct Known {
    AnyOptimizer optimizer;
    bool awaits_step = false;
    std::optional<std::size_t> scaled_by{};  ///< the loss whose scale the gradients carry
  };

  struct Loss {
    explicit Loss(const LossScale& options) : scaler(options) {}
    GradScaler scaler;
    bool was_taken_off = false;  ///< since the scale moved last
  };

  const Known& known(const torch::optim::Optimizer& optimizer) const {
    const auto is_it = [&](const Known& one) { return &one.optimizer.optimizer() == &optimizer; };
    const auto found = std::find_if(all_.begin(), all_.end(), is_it);
    TORCH_INTERNAL_ASSERT(found != all_.end());
    return *found;
  }
  Known& known(const torch::optim::Optimizer& optimizer) {
    return const_cast<Known&>(std::as_const(*this).known(optimizer));
  }

  static std::vector<at::Tensor> parameters_of(const torch::optim::Optimizer& optimizer) {
    std::vector<at::Tensor> all;
    for_each_parameter(optimizer,
                       [&](std::size_t, const at::Tensor& parameter) { all.push_back(parameter); });
    return all;
  }

  /// Returns the gradient of some parameter; undefined if there is none.
  static at::Tensor a_gradient(AnyOptimizer optimizer) {
    at::Tensor found;
    for_each_parameter(optimizer.optimizer(), [&](std::size_t, const at::Tensor& parameter) {
      if (!found.defined()) found = parameter.mutable_grad();
    });
    return found;
  }

  static at::Tensor one_on(at::Device device) {
    return at::ones({}, at::TensorOptions().device(device).dtype(at::kFloat));
  }

  void take_scale_off(std::size_t loss) {
    for (Known& one : all_) {
      if (one.scaled_by != loss) continue;
      if (a_gradient(one.optimizer).defined()) {
        scaler(loss).unscale_(one.optimizer);
        losses_[loss].was_taken_off = true;
      }
      one.scaled_by.reset();
    }
  }

  void end_iteration(std::size_t loss) {
    const bool has_found = std::exchange(losses_[loss].was_taken_off, false);
    if (has_found) scaler(loss).update();  // a callback may throw
  }

  void move_scale(std::size_t loss) {
    take_scale_off(loss);
    end_iteration(loss);
  }

  /// If one of the optimizers has an inf or NaN, writes a NaN into the gradients of the others, so
  /// that their steps are skipped. Clearing the gradients clears this mark too. No host sync.
  static void share_inf(const Optimizers& optimizers) {
    if (optimizers.size() < 2) return;
    const c10::NoGradGuard no_grad;
    std::vector<StepPlan> plans;
    std::vector<at::Tensor> found;
    for (const auto* optimizer : optimizers) {
      const StepPlan& plan = plans.emplace_back(plain_plan(*optimizer));
      if (plan.rows.empty()) continue;
      found.push_back(read_gradients(plan, one_on(plan.rows[0].gradient.device())).found_inf);
    }
    for (const StepPlan& plan : plans) {
      for (const StepPlan::Row& row : plan.rows) {
        at::Tensor first = gradient_values(*row.parameter);
        if (first.numel() == 0) continue;
        while (first.dim() > 0) first = first.select(0, 0);
        for (const at::Tensor& one : found) {
          const at::Tensor is_bad = on_device(one, first.device()).ne(0);
          const double nan = std::numeric_limits<double>::quiet_NaN();
          first.copy_(at::where(is_bad, at::full_like(first, nan), first));
        }
        break;
      }
    }
  }

  /// Checks, clips and steps with true gradients.
  StepResult step_if_finite(AnyOptimizer optimizer, const StepOptions& options) {
    const at::Tensor gradient = a_gradient(optimizer);
    if (!gradient.defined()) return StepResult({.ran = true, .value = optimizer.step()});
    if (!std::exchange(has_verdict_scale_, true)) (void)verdict_.scale(one_on(gradient.device()));
    verdict_.forget_iteration();  // of a step that threw
    StepResult result = verdict_.step(optimizer, options);
    verdict_.update();
    return result;
  }

  std::vector<Known> all_;
  std::vector<Loss> losses_;
  GradScaler verdict_{{.kind = LossScaleKind::none, .allow_fp16_gradients = true}};
  bool has_verdict_scale_ = false;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
