#pragma once

#include <torch/torch.h>

#include <vector>

#include "../../support/bitwise_equal.h"

namespace activation_checkpoint_test {

using test_support::BitwiseEqual;

/// Returns the loss of `make_loss()` and its gradients for `leaves`, which are cleared before.
/// Each call starts from the same RNG state.
template <class MakeLoss>
std::vector<torch::Tensor> loss_and_gradients(const std::vector<torch::Tensor>& leaves,
                                              const MakeLoss& make_loss) {
  for (auto leaf : leaves) leaf.mutable_grad().reset();
  torch::manual_seed(7);
  const torch::Tensor loss = make_loss();
  loss.backward();
  std::vector<torch::Tensor> tensors{loss.detach()};
  for (const auto& leaf : leaves) {
    tensors.push_back(leaf.grad().defined() ? leaf.grad().clone() : torch::Tensor());
  }
  return tensors;
}

}  // namespace activation_checkpoint_test
