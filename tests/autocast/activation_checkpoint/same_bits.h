#pragma once

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

namespace activation_checkpoint_test {

/// The loss that `make_loss()` returns, and its gradients for `leaves`, which are reset before.
/// Each call starts from the same random state.
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

/// Undefined tensors are equal to each other only.
inline void expect_same_bits(const std::vector<torch::Tensor>& a,
                             const std::vector<torch::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].defined(), b[i].defined()) << "tensor " << i;
    if (a[i].defined()) {
      EXPECT_EQ(a[i].scalar_type(), b[i].scalar_type()) << "tensor " << i;
      EXPECT_TRUE(torch::equal(a[i], b[i])) << "tensor " << i;
    }
  }
}

}  // namespace activation_checkpoint_test
