#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/optimizer_description.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/optimizer.h>

#include <atomic>
#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

// Post-accumulate hooks of parameters. A tensor has one such hook, so each calls the hook that it
// replaced.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

using GradHookPtr = std::unique_ptr<torch::autograd::PostAccumulateGradHook>;

struct ChainedGradHook : torch::autograd::PostAccumulateGradHook {
  /// Called when the gradient of `parameter` has been accumulated, on a thread of autograd.
  virtual void on_accumulated(const at::Tensor& parameter) = 0;
  /// Returns whether this hook's owner calls notify_grad_complete after a reduction.
  virtual bool completes_later() const { return false; }
  /// Returns whether this hook's owner steps the parameter in the backward pass.
  virtual bool steps() const { return false; }
  /// Called by notify_grad_complete.
  virtual void on_complete(const at::Tensor& /*parameter*/) {}

  void operator()(const at::Tensor& parameter) final {
    if (previous != nullptr) (*previous)(parameter);
    on_accumulated(parameter);
  }

  GradHookPtr previous{};
};

inline void install_grad_hook(const at::Tensor& parameter, std::unique_ptr<ChainedGradHook> hook) {
  torch::autograd::impl::materialize_autograd_meta(parameter);
  hook->previous = std::move(torch::autograd::impl::post_acc_grad_hooks(parameter));
  torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::move(hook));
}

/// Returns the pointer to the first hook for which `predicate(hook)` holds; null if there is none.
/// The search ends at a hook that is not a ChainedGradHook.
template <class Predicate>
GradHookPtr* find_grad_hook(const at::Tensor& parameter, const Predicate& predicate) {
  if (torch::autograd::impl::get_autograd_meta(parameter) == nullptr) return nullptr;
  GradHookPtr* link = &torch::autograd::impl::post_acc_grad_hooks(parameter);
  while (auto* const hook = dynamic_cast<ChainedGradHook*>(link->get())) {
    if (predicate(*hook)) return link;
    link = &hook->previous;
  }
  return nullptr;
}

/// Removes the first hook for which `predicate(hook)` holds, unless a hook that is not a
/// ChainedGradHook has replaced it.
template <class Predicate>
void remove_grad_hook(const at::Tensor& parameter, const Predicate& predicate) {
  GradHookPtr* const link = find_grad_hook(parameter, predicate);
  if (link == nullptr) return;
  GradHookPtr previous = std::move(static_cast<ChainedGradHook&>(**link).previous);
  *link = std::move(previous);
}

/// Calls on_complete of all hooks of a parameter whose gradient was reduced.
inline void notify_grad_complete(const at::Tensor& parameter) {
  (void)find_grad_hook(parameter, [&](ChainedGradHook& hook) {
    hook.on_complete(parameter);
    return false;
  });
}

inline bool is_stepped_in_backward(const at::Tensor& parameter) {
  return find_grad_hook(parameter, [](auto& hook) { return hook.steps(); }) != nullptr;
}

/// Number of StepInBackward objects in the process.
inline std::atomic<int> num_steps_in_backward = 0;

/// \throws c10::Error if a StepInBackward steps `optimizer`
inline void check_not_stepped_in_backward(const torch::optim::Optimizer& optimizer,
                                          const char* call) {
  if (num_steps_in_backward == 0) return;
  for (const at::Tensor& parameter :
       OptimizerDescription{"", optimizer.param_groups()}.parameters()) {
    TORCH_CHECK(!is_stepped_in_backward(parameter), "GradScaler::", call,
                ": a StepInBackward has stepped this optimizer's parameters in the backward pass, "
                "and freed the gradients; call the step() of the StepInBackward instead");
  }
}

/// \throws c10::Error if a StepInBackward steps a parameter of the graph of `loss`
inline void check_not_stepped_in_backward(const at::Tensor& loss) {
  if (num_steps_in_backward == 0) return;
  std::vector<torch::autograd::Node*> nodes{loss.grad_fn().get()};
  std::unordered_set<torch::autograd::Node*> seen{nullptr};
  while (!nodes.empty()) {
    torch::autograd::Node* const node = nodes.back();
    nodes.pop_back();
    if (!seen.insert(node).second) continue;
    const auto* const leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node);
    TORCH_CHECK(
        leaf == nullptr || !is_stepped_in_backward(leaf->variable),
        "GradScaler::scale: a StepInBackward would step a parameter (", describe(leaf->variable),
        ") with "
        "scaled gradients, which it does not unscale; train without a loss scale (bfloat16, or "
        "GradScaler({.enabled = false})), or without the StepInBackward");
    for (const auto& edge : node->next_edges()) nodes.push_back(edge.function.get());
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
