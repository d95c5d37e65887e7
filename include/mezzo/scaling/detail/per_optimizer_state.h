#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/optimizer_description.h>
#include <mezzo/optim/optimizer_ref.h>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline std::string describe_param(const torch::optim::Optimizer& optimizer,
                                  const at::Tensor& parameter) {
  return OptimizerDescription{"", optimizer.param_groups()}.describe_param(parameter);
}

/// Identifies an optimizer, also after its destruction.
struct OptimizerIdentity {
  const torch::optim::Optimizer* address;  ///< compared, never dereferenced
  const std::type_info* type;
  std::size_t num_params = 0;
};

/// The last call for an optimizer in an iteration.
enum class OptState : uint8_t { ready, unscaled, stepped };

/// State of one optimizer within an iteration, and weak references to the gradients that `unscale_`
/// unscaled in place.
class PerOptimizerState {
 public:
  OptState stage = OptState::ready;
  /// A float of one element on the scale's device: not 0 if a check found an inf or NaN. Undefined
  /// before the first check.
  at::Tensor found_inf{};
  OptimizerIdentity identity;

  explicit PerOptimizerState(const torch::optim::Optimizer& optimizer)
      : identity{&optimizer, &typeid(optimizer)} {
    for (const auto& group : optimizer.param_groups()) {
      identity.num_params += group.params().size();
      if (!group.params().empty())
        first_params_.emplace_back(group.params().front().getIntrusivePtr());
    }
  }

  /// Returns whether `other`, of an optimizer at the same address, is of the same optimizer. The
  /// groups of a destroyed optimizer and of its successor have no first parameter in common.
  bool is_of_same_optimizer(const PerOptimizerState& other) const {
    return first_params_.empty() ||
           std::find_first_of(first_params_.begin(), first_params_.end(),
                              other.first_params_.begin(),
                              other.first_params_.end()) != first_params_.end();
  }

  /// Records that the gradients of `plan` were unscaled in place.
  void set_unscaled_grads(const StepPlan& plan) {
    unscaled_grads_.clear();
    for (const StepPlan::Param& param : plan.params) {
      const at::Tensor& gradient = param.parameter->grad();
      unscaled_grads_.push_back({WeakTensor(param.parameter->getIntrusivePtr()),
                                 WeakTensor(gradient.getIntrusivePtr()), version_of(gradient)});
    }
  }

  /// Records which unscaled gradients are cleared when a loss is scaled.
  void mark_cleared_grads() {
    if (stage != OptState::unscaled) return;
    for (UnscaledGrad& unscaled : unscaled_grads_) {
      const at::Tensor param(unscaled.param.lock());
      if (param.defined() && !param.grad().defined()) unscaled.is_cleared = true;
    }
  }

  /// Throws if a cleared gradient is defined again: a backward pass of a scaled loss created it.
  /// Does not detect a backward pass that adds to an unscaled gradient.
  void check_still_unscaled(const torch::optim::Optimizer& optimizer) const {
    for (const UnscaledGrad& unscaled : unscaled_grads_) {
      const at::Tensor param(unscaled.is_cleared ? unscaled.param.lock() : nullptr);
      TORCH_CHECK(
          !param.defined() || !param.grad().defined(), "GradScaler: the gradient of ",
          describe_param(optimizer, param),
          " was created after unscale_, by the backward pass of a scaled loss, and step() "
          "would use it as if it were unscaled; call unscale_ after the last backward pass, "
          "or discard_iteration() between two backward passes of one iteration, as in SAM");
    }
  }

  /// Throws if a gradient of `plan` was unscaled for another optimizer and not modified since.
  static void check_not_unscaled(
      const std::unordered_map<const torch::optim::Optimizer*, PerOptimizerState>& states,
      const torch::optim::Optimizer& optimizer, const StepPlan& plan) {
    std::unordered_map<const c10::TensorImpl*, uint32_t> versions;
    for (const auto& [other, state] : states) {
      if (other == &optimizer) continue;
      for (const UnscaledGrad& unscaled : state.unscaled_grads_) {
        versions[unscaled.grad._unsafe_get_target()] = unscaled.version;
      }
    }
    if (versions.empty()) return;
    for (const StepPlan::Param& param : plan.params) {
      const at::Tensor& gradient = param.parameter->grad();
      const auto found = versions.find(gradient.unsafeGetTensorImpl());
      TORCH_CHECK(found == versions.end() || found->second != version_of(gradient),
                  "GradScaler: ", describe_param(optimizer, *param.parameter),
                  " is in two optimizers, and its gradient was already unscaled for the other one; "
                  "pass it to one optimizer, or step mezzo optimizers without unscale_, which do "
                  "not modify gradients");
    }
  }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct UnscaledGrad {
    WeakTensor param;
    WeakTensor grad;
    uint32_t version;  ///< of the gradient when it was unscaled
    bool is_cleared = false;
  };

  /// Returns the version of a tensor; 0 for an inference tensor, which has none.
  static uint32_t version_of(const at::Tensor& tensor) {
    return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
  }

  std::vector<WeakTensor> first_params_;  // the first of each group
  std::vector<UnscaledGrad> unscaled_grads_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
