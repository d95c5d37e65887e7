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

#include <initializer_list>

// The state of libtorch's optimizers is what it was made like, and some of it is made like the
// parameter: Adagrad's sum by the constructor, all of it by steps that were taken without masters.
// An optimizer goes on in the state's dtype, and a running mean in 16 bits does not run.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

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

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
