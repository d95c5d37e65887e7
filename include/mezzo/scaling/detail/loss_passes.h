/// \file
/// Several losses, each with a scale of its own, that become one step of an optimizer.
#pragma once

#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/optimizer_interface.h>
#include <mezzo/optim/step_result.h>
#include <mezzo/scaling/detail/gradients_aside.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Between a backward pass and the step each loss's scaler unscales what its pass has brought, and
/// lets go of the optimizer; the scaler that was used last takes the optimizer back for its step.
/// What any of them found skips that step, and lowers the scale of the loss that it was found for.
/// A scale moves when the last optimizer that its loss was scaled for has stepped; or, where one of
/// those is not stepped every time, when the loss is scaled again for one that has.
///
/// Optimizers are known by the objects whose groups are trained.
class LossPasses {
 public:
  using Optimizers = std::vector<torch::optim::Optimizer*>;

  void add_loss(const GradScalerOptions& options) { losses_.emplace_back(options); }
  void add_optimizer(AnyOptimizer optimizer) { passes_.emplace_back(optimizer); }

  std::size_t losses() const noexcept { return losses_.size(); }
  GradScaler& scaler(std::size_t loss) { return losses_[loss].scaler; }
  const GradScaler& scaler(std::size_t loss) const { return losses_[loss].scaler; }

  /// Whether a loss was scaled for `optimizer` since its last step.
  bool awaits_step(const torch::optim::Optimizer& optimizer) const {
    return passes_of(optimizer).awaits_step();
  }
  bool any_awaits_step() const {
    return std::any_of(passes_.begin(), passes_.end(),
                       [](const Passes& passes) { return passes.awaits_step(); });
  }

  /// Before the backward pass of `value`, loss number `loss`: returns it scaled, in float.
  at::Tensor begin(std::size_t loss, const at::Tensor& value, const Optimizers& optimizers) {
    Loss& own = losses_[loss];
    for (const auto* optimizer : optimizers) {
      if (contains(own.stepped, optimizer)) end_iteration(loss);
    }
    for (const auto* optimizer : optimizers) {
      Passes& passes = passes_of(*optimizer);
      if (passes.scaled_by.value_or(loss) != loss) unscale(passes);
    }
    const bool is_low = is_low_precision(value.scalar_type());
    at::Tensor scaled = own.scaler.scale(is_low ? value.to(at::kFloat) : value);
    for (auto* optimizer : optimizers) {  // after all that may throw
      Passes& passes = passes_of(*optimizer);
      passes.are_aside_for_this_pass = !passes.scaled_by && passes.unscaled_by;
      if (passes.are_aside_for_this_pass) passes.gradients.set_aside();
      passes.scaled_by = loss;
      if (!contains(own.waiting, optimizer)) own.waiting.push_back(optimizer);
    }
    return scaled;
  }

  /// The pass threw. Where all that there was before it had been set aside, this is what there is
  /// again; what it should be added to otherwise carries the same scale, and is as it left it.
  void give_up(const Optimizers& optimizers) {
    for (const auto* optimizer : optimizers) {
      Passes& passes = passes_of(*optimizer);
      if (!std::exchange(passes.are_aside_for_this_pass, false)) continue;
      passes.scaled_by.reset();
      passes.gradients.put_back();
    }
  }

  /// Takes the scale off what the passes have brought. What shows in the gradients of one optimizer
  /// holds for all: it is the loss that overflowed.
  void unscale(const Optimizers& optimizers) {
    std::vector<at::Tensor> found;
    for (const auto* optimizer : optimizers) {
      Passes& passes = passes_of(*optimizer);
      const auto known = static_cast<std::ptrdiff_t>(passes.found_inf.size());
      unscale(passes);
      found.insert(found.end(), passes.found_inf.begin() + known, passes.found_inf.end());
    }
    if (optimizers.size() == 1) return;
    for (const auto* optimizer : optimizers) passes_of(*optimizer).hear_of(found);
  }

  /// Of an optimizer that awaits it. Gradients that carry one scale only are unscaled in its pass.
  StepResult step(torch::optim::Optimizer& optimizer, const StepOptions& options) {
    Passes& passes = passes_of(optimizer);
    const bool is_direct = !passes.unscaled_by.has_value();
    if (!is_direct && passes.scaled_by) unscale(passes);
    GradScaler& own = scaler(is_direct ? *passes.scaled_by : *passes.unscaled_by);
    if (!is_direct) own.adopt(passes.optimizer, passes.found_inf);
    try {
      StepResult result = own.step(passes.optimizer, options);
      take_back(passes, own);
      finish(optimizer);
      return result;
    } catch (...) {
      take_back(passes, own);
      throw;
    }
  }

  /// Gives up what was scaled for `optimizer` since its last step.
  void zero_grad(torch::optim::Optimizer& optimizer, bool set_to_none) {
    passes_of(optimizer).gradients.zero_grad(set_to_none);
    finish(optimizer);
  }

 private:
  /// What is known of an optimizer between its steps.
  struct Passes {
    explicit Passes(AnyOptimizer of) : optimizer(of), gradients(of) {}
    bool awaits_step() const noexcept { return scaled_by || unscaled_by; }
    void hear_of(const std::vector<at::Tensor>& found) {
      found_inf.insert(found_inf.end(), found.begin(), found.end());
    }

    AnyOptimizer optimizer;
    GradientsAside gradients;
    std::optional<std::size_t> scaled_by{};    // the loss whose scale the gradients carry
    std::optional<std::size_t> unscaled_by{};  // the loss whose scale was taken off last
    std::vector<at::Tensor> found_inf{};       // by the checks of all passes so far
    bool are_aside_for_this_pass = false;
  };

  /// A loss, and what its scale's iteration knows.
  struct Loss {
    explicit Loss(const GradScalerOptions& options) : scaler(options) {}
    GradScaler scaler;
    Optimizers waiting{};  // scaled for, and not stepped yet
    Optimizers stepped{};
  };

  static bool contains(const Optimizers& list, const torch::optim::Optimizer* optimizer) {
    return std::find(list.begin(), list.end(), optimizer) != list.end();
  }

  const Passes& passes_of(const torch::optim::Optimizer& optimizer) const {
    const auto is_it = [&](const Passes& one) { return &one.optimizer.optimizer() == &optimizer; };
    const auto found = std::find_if(passes_.begin(), passes_.end(), is_it);
    TORCH_INTERNAL_ASSERT(found != passes_.end());
    return *found;
  }
  Passes& passes_of(const torch::optim::Optimizer& optimizer) {
    return const_cast<Passes&>(std::as_const(*this).passes_of(optimizer));
  }

  /// Takes the scale off what has come since, and adds what was set aside.
  void unscale(Passes& passes) {
    GradScaler& own = scaler(*passes.scaled_by);
    own.unscale_(passes.optimizer);
    take_back(passes, own);
    passes.gradients.add_back();
  }

  /// From `own`, which knows nothing of the optimizer from here on; before or after its step, one
  /// that threw too.
  static void take_back(Passes& passes, GradScaler& own) {
    if (passes.scaled_by && own.is_unscaled(passes.optimizer)) {
      passes.unscaled_by = std::exchange(passes.scaled_by, std::nullopt);
    }
    passes.hear_of(own.release(passes.optimizer));
  }

  /// The optimizer waits for nothing any more; losses that waited for it alone move their scale.
  void finish(torch::optim::Optimizer& optimizer) {
    Passes& passes = passes_of(optimizer);
    passes = Passes(passes.optimizer);
    for (Loss& loss : losses_) {
      if (std::erase(loss.waiting, &optimizer) != 0) loss.stepped.push_back(&optimizer);
    }
    for (std::size_t id = 0; id < losses_.size(); ++id) {
      const Loss& loss = losses_[id];
      if (contains(loss.stepped, &optimizer) && loss.waiting.empty()) end_iteration(id);
    }
  }

  /// Gradients that carry a scale lose it before the scale moves.
  void end_iteration(std::size_t loss) {
    for (Passes& passes : passes_) {
      if (passes.scaled_by == loss) unscale(passes);
    }
    losses_[loss].waiting.clear();
    losses_[loss].stepped.clear();
    if (losses_[loss].scaler.has_checks()) losses_[loss].scaler.update();  // a callback may throw
  }

  std::vector<Passes> passes_;
  std::vector<Loss> losses_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
