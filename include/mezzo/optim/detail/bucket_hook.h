#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <memory>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Hears that a parameter's gradient is there. A tensor has one slot for such a hook, so this one
/// keeps, and calls first, the one that it found there.
template <class State>
class BucketHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  using Hook = torch::autograd::PostAccumulateGradHook;

  BucketHook(std::weak_ptr<State> state, std::size_t number, std::unique_ptr<Hook> previous)
      : state_(std::move(state)), number_(number), previous_(std::move(previous)) {}

  void operator()(const at::Tensor& parameter) override {
    if (previous_ != nullptr) (*previous_)(parameter);
    if (const auto state = state_.lock()) state->arrived(number_);
  }

  static void install(const std::shared_ptr<State>& state, std::size_t number,
                      const at::Tensor& parameter) {
    torch::autograd::impl::materialize_autograd_meta(parameter);
    auto previous = std::move(torch::autograd::impl::post_acc_grad_hooks(parameter));
    torch::autograd::impl::set_post_acc_grad_hooks(
        parameter, std::make_unique<BucketHook>(state, number, std::move(previous)));
  }

  /// Puts back what was there. Under somebody else's hook it stays, and does nothing but call it.
  static void remove(const State* state, const at::Tensor& parameter) {
    std::unique_ptr<Hook>* link = &torch::autograd::impl::post_acc_grad_hooks(parameter);
    while (auto* const hook = dynamic_cast<BucketHook*>(link->get())) {
      if (hook->state_.lock().get() == state) {
        auto previous = std::move(hook->previous_);
        *link = std::move(previous);
        return;
      }
      link = &hook->previous_;
    }
  }

  /// Whether `is_meant(state)` holds for one of those that hear of `parameter`.
  template <class IsMeant>
  static bool any_of(const at::Tensor& parameter, const IsMeant& is_meant) {
    const Hook* link = torch::autograd::impl::post_acc_grad_hooks(parameter).get();
    while (const auto* const hook = dynamic_cast<const BucketHook*>(link)) {
      const auto state = hook->state_.lock();
      if (state != nullptr && is_meant(*state)) return true;
      link = hook->previous_.get();
    }
    return false;
  }

 private:
  std::weak_ptr<State> state_;
  std::size_t number_;
  std::unique_ptr<Hook> previous_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
