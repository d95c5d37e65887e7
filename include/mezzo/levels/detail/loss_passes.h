#pragma once

#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/optimizer_interface.h>
#include <mezzo/optim/step_result.h>
#include <mezzo/scaling/detail/set_aside.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/core/Tensor.h>
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

/// Combines several losses, each with its own scale, into one step of an optimizer.
///
/// Between calls, `.grad` holds either gradients with the scale of one loss, or true gradients. A
/// pass sets true gradients aside, unscales the gradients that it has computed, and adds the others
/// back. An inf stays in `.grad`, where the step finds it.
///
/// A scale moves when all optimizers that its loss was scaled for have stepped; if one of them does
/// not step every time, when the loss is scaled again for one that has stepped. Optimizers are
/// identified by the objects whose groups are trained.
class LossPasses {
 public:
  using Optimizers = std::vector<torch::optim::Optimizer*>;

  /// A backward pass between `begin` and `end`. If the pass throws, the destructor restores the
  /// true gradients.
  struct Pass {
    at::Tensor scaled{};  ///< the loss to run backward from
    Optimizers optimizers{};
    std::vector<std::unique_ptr<SetAside>> aside{};  ///< an optimizer
  };

  void add_loss(const LossScaleOptions& options) { losses_.emplace_back(options); }
  void add_optimizer(AnyOptimizer optimizer) { all_.push_back({optimizer}); }

  std::size_t losses() const noexcept { return losses_.size(); }
  GradScaler& scaler(std::size_t loss) { return losses_[loss].scaler; }
  const GradScaler& scaler(std::size_t loss) const { return losses_[loss].scaler; }

  /// Whether a loss was scaled for `optimizer` since its last step.
  bool awaits_step(const torch::optim::Optimizer& optimizer) const {
    return known(optimizer).awaits_step();
  }
  bool any_awaits_step() const {
    return std::any_of(all_.begin(), all_.end(),
                       [](const Known& one) { return one.awaits_step(); });
  }

  /// Begins the backward pass of `value`, loss number `loss`.
  Pass begin(std::size_t loss, const at::Tensor& value, const Optimizers& optimizers) {
    Loss& own = losses_[loss];
    for (const auto* optimizer : optimizers) {
      if (contains(own.stepped, optimizer)) end_iteration(loss);
    }
    for (const auto* optimizer : optimizers) {
      Known& one = known(*optimizer);
      if (one.scaled_by.value_or(loss) != loss) unscale(one);
      if (one.unscaled_by) follow_masters(one);
    }
    const bool is_low = is_low_precision(value.scalar_type());
    Pass pass{own.scaler.scale(is_low ? value.to(at::kFloat) : value), optimizers};
    for (auto* optimizer : optimizers) {  // after all that may throw
      Known& one = known(*optimizer);
      auto& aside = pass.aside.emplace_back();
      if (one.unscaled_by) aside = std::make_unique<SetAside>(parameters_of(*optimizer));
      if (!contains(own.waiting, optimizer)) own.waiting.push_back(optimizer);
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

  /// Unscales the gradients of the pass, and adds those that were set aside. If `delays` is true,
  /// does so only if gradients were set aside. An inf in the gradients of one optimizer counts for
  /// all optimizers of the pass, since the loss has overflowed.
  void end(Pass pass, bool delays) {
    std::vector<at::Tensor> found;
    for (std::size_t i = 0; i < pass.optimizers.size(); ++i) {
      if (delays && !pass.aside[i]) continue;
      Known& one = known(*pass.optimizers[i]);
      const at::Tensor own = unscale(one);
      if (own.defined()) found.push_back(own);
      if (pass.aside[i]) pass.aside[i]->add_back();
    }
    if (pass.optimizers.size() == 1 || delays) return;
    for (const auto* optimizer : pass.optimizers) {
      for (const at::Tensor& one : found) spoil_gradients(known(*optimizer), one);
    }
  }

  /// Steps an optimizer for which a loss was scaled.
  StepResult step(torch::optim::Optimizer& optimizer, StepOptions options) {
    Known& one = known(optimizer);
    options.is_unscaled = !one.scaled_by;
    options.known_inf = one.known_inf;
    GradScaler& own = scaler(one.scaled_by ? *one.scaled_by : *one.unscaled_by);
    const auto forget = [&] {  // also after a step that threw
      if (one.scaled_by && own.is_unscaled(one.optimizer)) {
        one.unscaled_by = std::exchange(one.scaled_by, std::nullopt);
      }
      (void)own.forget(one.optimizer);
    };
    try {
      StepResult result = own.step(one.optimizer, options);
      forget();
      finish(optimizer);
      return result;
    } catch (...) {
      forget();
      throw;
    }
  }

  /// Discards the losses that were scaled for `optimizer` since its last step.
  void zero_grad(torch::optim::Optimizer& optimizer, bool set_to_none) {
    optimizer.zero_grad(set_to_none);
    finish(optimizer);
  }

 private:
  /// The state of an optimizer between its steps.
  struct Known {
    AnyOptimizer optimizer;
    std::optional<std::size_t> scaled_by{};    // the loss whose scale the gradients carry
    std::optional<std::size_t> unscaled_by{};  // the loss whose scale was taken off last
    at::Tensor known_inf{};                    // what the checks of all passes so far have found
    bool awaits_step() const noexcept { return scaled_by || unscaled_by; }
  };

  /// A loss, and the state of its scale's iteration.
  struct Loss {
    explicit Loss(const LossScaleOptions& options) : scaler(options) {}
    GradScaler scaler;
    Optimizers waiting{};  // scaled for, and not stepped yet
    Optimizers stepped{};
  };

  static bool contains(const Optimizers& list, const torch::optim::Optimizer* optimizer) {
    return std::find(list.begin(), list.end(), optimizer) != list.end();
  }

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

  /// Updates gradients after the caller has changed those of masters.
  static void follow_masters(const Known& one) {
    if (optim::FusedOptimizer* const fused = as_fused(one.optimizer)) (void)fused->plan();
  }

  /// Unscales the gradients; returns found_inf.
  at::Tensor unscale(Known& one) {
    GradScaler& own = scaler(*one.scaled_by);
    own.unscale_(one.optimizer);
    one.unscaled_by = std::exchange(one.scaled_by, std::nullopt);
    const at::Tensor found = own.forget(one.optimizer);
    if (found.defined()) note_inf(one, found);
    return found;
  }

  static void note_inf(Known& one, const at::Tensor& found) {
    one.known_inf = one.known_inf.defined()
                        ? one.known_inf.add(on_device(found, one.known_inf.device()))
                        : found;
  }

  /// If `found` is nonzero, writes a NaN into the gradients of an optimizer, so that its step is
  /// skipped. Clearing the gradients clears this mark too. No host sync.
  static void spoil_gradients(Known& one, const at::Tensor& found) {
    const c10::NoGradGuard no_grad;
    for (const StepPlan::Row& row : plain_plan(one.optimizer.optimizer()).rows) {
      at::Tensor first = gradient_values(*row.parameter);
      if (first.numel() == 0) continue;
      while (first.dim() > 0) first = first.select(0, 0);
      const at::Tensor is_bad = on_device(found, first.device()).ne(0);
      first.copy_(
          at::where(is_bad, at::full_like(first, std::numeric_limits<double>::quiet_NaN()), first));
      break;
    }
    note_inf(one, found);
  }

  /// Marks the optimizer's step as done. Losses that waited for this optimizer only move their
  /// scale.
  void finish(torch::optim::Optimizer& optimizer) {
    Known& one = known(optimizer);
    one = Known{one.optimizer};
    for (Loss& loss : losses_) {
      if (std::erase(loss.waiting, &optimizer) != 0) loss.stepped.push_back(&optimizer);
    }
    for (std::size_t id = 0; id < losses_.size(); ++id) {
      const Loss& loss = losses_[id];
      if (contains(loss.stepped, &optimizer) && loss.waiting.empty()) end_iteration(id);
    }
  }

  /// Moves the scale of a loss, after unscaling the gradients that still carry it.
  void end_iteration(std::size_t loss) {
    for (Known& one : all_) {
      if (one.scaled_by == loss) (void)unscale(one);
    }
    losses_[loss].waiting.clear();
    losses_[loss].stepped.clear();
    GradScaler& own = losses_[loss].scaler;
    if (own.is_in_iteration()) own.update();  // a callback may throw
  }

  std::vector<Known> all_;
  std::vector<Loss> losses_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
