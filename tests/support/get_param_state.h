#pragma once

#include <torch/optim/optimizer.h>
#include <torch/types.h>

namespace test_support {

/// Returns the optimizer's state of a parameter, of class `State`.
template <class State>
State& get_param_state(const torch::optim::Optimizer& optimizer, const torch::Tensor& parameter) {
  return static_cast<State&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
}

}  // namespace test_support
