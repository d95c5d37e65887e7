/// \file
/// The gradients of one optimizer while several backward passes, of losses with different scales,
/// add up to one step.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/fused_optimizer.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/scaling/grad_scaler.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Sparse or dense, in place where that can be: a gradient may be a view into a bucket.
inline void add_gradient(const at::Tensor& holder, const at::Tensor& more) {
  const at::Tensor gradient = holder.grad();
  if (!gradient.defined()) {
    holder.mutable_grad() = more;
  } else if (gradient.is_sparse() && !more.is_sparse()) {
    holder.mutable_grad() = more.add(gradient);
  } else {
    gradient.add_(more);
  }
}

/// `gradient` for who keeps it while its holder gets another: memory that others hold too, as that
/// of a bucket, is the next backward pass's to write to.
inline at::Tensor kept_gradient(const at::Tensor& gradient) {
  const bool owns_memory = gradient.layout() != at::kStrided || gradient.storage().use_count() == 1;
  return owns_memory ? gradient : gradient.clone();
}

/// What is known of an optimizer that was given to initialize, between its steps.
class OptimizerPasses {
 public:
  OptimizerPasses(torch::optim::Optimizer& given, bool wants_masters)
      : given_(&given), stepper_(given) {
    if (!wants_masters) return;
    auto* const fused = as_fused(given);
    if (fused == nullptr) {
      adapter_ = std::make_unique<MasterWeights>(given);
      stepper_ = AnyOptimizer(*adapter_);
    } else {
      fused->enable_master_weights();
      keeps_own_masters_ = true;
    }
  }

  const torch::optim::Optimizer& given() const noexcept { return *given_; }

  /// What steps.
  AnyOptimizer& stepper() {
    if (keeps_own_masters_) as_fused(stepper_)->enable_master_weights();  // groups that are new
    return stepper_;
  }

  bool awaits_step() const noexcept { return scaled_by_.has_value() || unscaled_by_.has_value(); }
  std::optional<std::size_t> scaled_by() const noexcept { return scaled_by_; }
  std::optional<std::size_t> unscaled_by() const noexcept { return unscaled_by_; }
  const std::vector<at::Tensor>& found_inf() const noexcept { return found_inf_; }

  /// A backward pass of a loss with scale `loss` begins.
  void expect_gradients_of(std::size_t loss) {
    is_set_aside_for_this_pass_ = !scaled_by_ && unscaled_by_;
    if (is_set_aside_for_this_pass_) set_aside();
    scaled_by_ = loss;
  }

  /// That pass threw. Where all that there was before it had been set aside, this is what there is
  /// again; what it should be added to otherwise carries the same scale, and is as it left it.
  void give_pass_up() {
    if (!std::exchange(is_set_aside_for_this_pass_, false)) return;
    scaled_by_.reset();
    const std::vector<Held> all = everything_held();
    for (const Held& held : all) held.parameter.mutable_grad() = at::Tensor();
    const std::vector<OwnGradient> were = own_gradients_;
    add_what_was_set_aside();
    for (std::size_t i = 0; i < std::min(all.size(), were.size()); ++i) {
      const at::Tensor& parameter = all[i].parameter;
      if (!were[i].version || parameter.grad().defined()) continue;
      parameter.mutable_grad() = at::zeros_like(parameter);  // see set_aside for who looks at it
      own_gradients_[i] = OwnGradient(parameter);
    }
  }

  /// Takes the scale off what has come since, and adds what was set aside. Returns whether there
  /// was a gradient to check.
  bool unscale(GradScaler& scaler) {
    const AnyOptimizer optimizer = stepper();
    scaler.unscale_(optimizer);
    const bool is_checked = take_back(scaler, optimizer);
    add_what_was_set_aside();
    return is_checked;
  }

  /// From `scaler`, which knows nothing of `optimizer`, the stepper, from here on; before or after
  /// its step, one that threw too. Returns whether it has checked a gradient.
  bool take_back(GradScaler& scaler, AnyOptimizer optimizer) {
    if (scaled_by_ && scaler.is_unscaled(optimizer)) {
      unscaled_by_ = std::exchange(scaled_by_, std::nullopt);
    }
    const std::vector<at::Tensor> found = scaler.release(optimizer);
    hear_of(found);
    return !found.empty();
  }

  /// What checks of the same loss found in the gradients of other optimizers.
  void hear_of(const std::vector<at::Tensor>& found_inf) {
    found_inf_.insert(found_inf_.end(), found_inf.begin(), found_inf.end());
  }

  /// Of the gradients' holders, and of the parameters beside them.
  void clear_gradients(bool set_to_none) {
    for (const Held& held : everything_held()) {
      if (!held.gradient_is_own()) held.holder.mutable_grad() = at::Tensor();
    }
    given_->zero_grad(set_to_none);
  }

  void forget() {
    scaled_by_.reset();
    unscaled_by_.reset();
    found_inf_.clear();
    aside_.clear();
    own_gradients_.clear();
    is_set_aside_for_this_pass_ = false;
  }

 private:
  /// A parameter, and where its unscaled gradient stands: at its master, or at itself.
  struct Held {
    at::Tensor parameter;
    at::Tensor holder;
    bool gradient_is_own() const { return holder.is_same(parameter); }
  };

  std::vector<Held> everything_held() {
    const StepTaker taker(stepper());
    std::vector<Held> all;
    for_each_parameter(taker.optimizer(), [&](std::size_t group, const at::Tensor& parameter) {
      const bool has_master = taker.keeps_master(group, parameter);
      all.push_back({parameter, has_master ? taker.master_param(group, parameter) : parameter});
    });
    return all;
  }

  /// A parameter's gradient when it was unscaled onto a master, or where it stands.
  struct OwnGradient {
    std::optional<uint32_t> version;  // none: there was no gradient
    OwnGradient() = default;
    explicit OwnGradient(const at::Tensor& parameter) {
      if (parameter.grad().defined()) version = parameter.grad()._version();
    }
    bool is_gone_from(const at::Tensor& parameter) const {
      return version && !parameter.grad().defined();
    }
    /// By `zero_grad(false)`. Waits for the device, where it has been written at all.
    bool is_zeroed_at(const at::Tensor& parameter) const {
      const at::Tensor& gradient = parameter.grad();
      if (!version || !gradient.defined() || gradient._version() == *version) return false;
      return gradient.is_sparse() ? gradient._nnz() == 0 : !gradient.any().item<bool>();
    }
  };

  // Where a parameter's own gradient has been cleared since it was unscaled, the master's is
  // cleared too as far as who did it is concerned; and where it has gone, those of parameters that
  // had none.
  void set_aside() {
    const std::vector<Held> all = everything_held();
    own_gradients_.resize(all.size());
    bool is_one_gone = false;
    for (std::size_t i = 0; i < all.size(); ++i) {
      is_one_gone = is_one_gone || own_gradients_[i].is_gone_from(all[i].parameter);
    }
    aside_.assign(all.size(), at::Tensor());
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto& [parameter, holder] = all[i];
      const OwnGradient& own = own_gradients_[i];
      const bool is_there = own.version && parameter.grad().defined();
      const bool is_given_up =
          !all[i].gradient_is_own() && (is_there ? own.is_zeroed_at(parameter) : is_one_gone);
      if (holder.grad().defined() && !is_given_up) aside_[i] = kept_gradient(holder.grad());
      holder.mutable_grad() = at::Tensor();
      parameter.mutable_grad() = at::Tensor();
    }
  }

  void add_what_was_set_aside() {
    const c10::NoGradGuard no_grad;
    const std::vector<Held> all = everything_held();
    own_gradients_.clear();
    for (std::size_t i = 0; i < all.size(); ++i) {
      own_gradients_.emplace_back(all[i].parameter);
      if (i < aside_.size() && aside_[i].defined()) add_gradient(all[i].holder, aside_[i]);
    }
    aside_.clear();
  }

  torch::optim::Optimizer* given_;
  std::unique_ptr<MasterWeights> adapter_;
  AnyOptimizer stepper_;
  bool keeps_own_masters_ = false;
  std::optional<std::size_t> scaled_by_;    // the loss whose scale the gradients carry
  std::optional<std::size_t> unscaled_by_;  // the loss whose scale was taken off last
  std::vector<at::Tensor> found_inf_;       // by the checks of all passes so far
  std::vector<at::Tensor> aside_;           // unscaled gradients, by parameter; empty for none
  std::vector<OwnGradient> own_gradients_;  // by parameter, when unscaled last
  bool is_set_aside_for_this_pass_ = false;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
