#pragma once

#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cstddef>
#include <initializer_list>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

// The state of libtorch's optimizers is what it was made like, and some of it is made like the
// parameter: Adagrad's sum by the constructor, all of it by steps that were taken without masters.
// An optimizer goes on in the state's dtype, and a running mean in 16 bits does not run.

inline void widen(std::initializer_list<at::Tensor*> tensors) {
  for (at::Tensor* tensor : tensors) {
    if (tensor->defined() && is_low_precision(*tensor)) *tensor = tensor->to(at::kFloat);
  }
}

template <class State>
bool widen_adam_state(torch::optim::OptimizerParamState& state) {
  auto* const adam = dynamic_cast<State*>(&state);
  if (adam == nullptr) return false;
  widen({&adam->exp_avg(), &adam->exp_avg_sq(), &adam->max_exp_avg_sq()});
  return true;
}

/// To float, if it is the state of an optimizer of libtorch's and of 16 bits.
inline void widen_state(torch::optim::OptimizerParamState& state) {
  if (auto* const sgd = dynamic_cast<torch::optim::SGDParamState*>(&state)) {
    widen({&sgd->momentum_buffer()});
  } else if (auto* const adagrad = dynamic_cast<torch::optim::AdagradParamState*>(&state)) {
    widen({&adagrad->sum()});
  } else if (auto* const rmsprop = dynamic_cast<torch::optim::RMSpropParamState*>(&state)) {
    widen({&rmsprop->square_avg(), &rmsprop->momentum_buffer(), &rmsprop->grad_avg()});
  } else if (!widen_adam_state<torch::optim::AdamParamState>(state)) {
    widen_adam_state<torch::optim::AdamWParamState>(state);
  }
}

/// For the time of one step an optimizer finds masters where its parameters were: in the groups,
/// and with the parameters' state. The end of the scope puts everything back where it belongs, what
/// the step has made meanwhile too.
class ParameterSwap {
 public:
  explicit ParameterSwap(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {}
  ParameterSwap(const ParameterSwap&) = delete;
  ParameterSwap& operator=(const ParameterSwap&) = delete;

  ~ParameterSwap() {
    exchange(parameters_);
    for (auto lent = gradients_.rbegin(); lent != gradients_.rend(); ++lent) {  // one may be twice
      lent->first.mutable_grad() = lent->second;
    }
    for (const auto& [group, lr] : lrs_) {
      optimizer_.param_groups()[group].options().set_lr(lr);
    }
  }

  /// `tensor` has another gradient until the end.
  void lend_gradient(const at::Tensor& tensor, at::Tensor gradient) {
    gradients_.emplace_back(tensor, tensor.grad());
    tensor.mutable_grad() = std::move(gradient);
  }

  void multiply_lrs(double factor) {
    auto& groups = optimizer_.param_groups();
    for (std::size_t group = 0; group < groups.size(); ++group) {
      const double lr = groups[group].options().get_lr();
      groups[group].options().set_lr(lr * factor);  // options of your own may refuse
      lrs_.emplace_back(group, lr);
    }
  }

  /// All at once, for the groups are walked.
  void put_in(const std::vector<std::pair<at::Tensor, at::Tensor>>& parameters_and_masters) {
    Places masters;
    for (const auto& [parameter, master] : parameters_and_masters) {
      masters.emplace(parameter.unsafeGetTensorImpl(), master);
      parameters_.emplace(master.unsafeGetTensorImpl(), parameter);
      const auto state = optimizer_.state().find(parameter.unsafeGetTensorImpl());
      if (state != optimizer_.state().end()) widen_state(*state->second);
    }
    exchange(masters);
  }

 private:
  using Places = std::unordered_map<c10::TensorImpl*, at::Tensor>;

  /// Puts each tensor where the one that it is named under is.
  void exchange(const Places& places) {
    if (places.empty()) return;
    for (auto& group : optimizer_.param_groups()) {
      for (at::Tensor& tensor : group.params()) {
        const auto place = places.find(tensor.unsafeGetTensorImpl());
        if (place != places.end()) tensor = place->second;
      }
    }
    auto& states = optimizer_.state();
    for (const auto& [from, to] : places) {
      const auto state = states.find(from);
      if (state == states.end()) continue;
      auto moved = std::move(state->second);
      states.erase(state);
      states[to.unsafeGetTensorImpl()] = std::move(moved);
    }
  }

  torch::optim::Optimizer& optimizer_;
  Places parameters_;  // under their masters
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_;
  std::vector<std::pair<std::size_t, double>> lrs_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
