#include <mezzo/autocast/activation_checkpoint.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <stdexcept>

#include "loss_and_gradients.h"

namespace {

using torch::Tensor;

Tensor drop(const Tensor& x) { return torch::dropout(x, 0.5, /*train=*/true); }

// For a gradient of 1, the gradient of x is its mask times 2; so is the result for x = 1.
class ActivationCheckpointRngState : public testing::Test {
 protected:
  Tensor x_ = torch::ones({64}).requires_grad_();
};

TEST_F(ActivationCheckpointRngState, RecomputesSameDropout) {
  const auto y = mezzo::activation_checkpoint(drop, x_);
  torch::rand({100});
  torch::manual_seed(1234);
  y.sum().backward();
  EXPECT_TRUE(torch::equal(x_.grad(), y.detach()));
}

TEST_F(ActivationCheckpointRngState, DropoutDiffersUnlessPreserved) {
  const auto y = mezzo::activation_checkpoint({.preserve_rng_state = false}, drop, x_);
  y.sum().backward();
  EXPECT_FALSE(torch::equal(x_.grad(), y.detach()));
}

TEST_F(ActivationCheckpointRngState, PreservesSubsequentRandomNumbers) {
  torch::manual_seed(5);
  const auto y = drop(x_);
  const auto after_forward = torch::rand({4});
  const auto after_backward = torch::rand({4});

  torch::manual_seed(5);
  const auto z = mezzo::activation_checkpoint(drop, x_);
  EXPECT_TRUE(torch::equal(z, y));
  EXPECT_TRUE(torch::equal(torch::rand({4}), after_forward));
  z.sum().backward();
  EXPECT_TRUE(torch::equal(torch::rand({4}), after_backward));
}

TEST_F(ActivationCheckpointRngState, RestoredWhenRecomputationThrows) {
  bool first = true;
  const auto y = mezzo::activation_checkpoint(
      [&first](const Tensor& x) {
        const auto dropped = drop(x);
        if (!first) throw std::runtime_error("second run");
        first = false;
        return dropped;
      },
      x_);
  torch::manual_seed(5);
  const auto expected = torch::rand({4});
  torch::manual_seed(5);
  EXPECT_THROW(y.sum().backward(), std::runtime_error);
  EXPECT_TRUE(torch::equal(torch::rand({4}), expected));
}

TEST_F(ActivationCheckpointRngState, SeparateForEachCheckpoint) {
  const auto y = mezzo::activation_checkpoint(drop, x_);
  const auto z = mezzo::activation_checkpoint(drop, x_);
  EXPECT_FALSE(torch::equal(y, z));
  (y + 3 * z).sum().backward();
  EXPECT_TRUE(torch::equal(x_.grad(), (y + 3 * z).detach()));
}

TEST_F(ActivationCheckpointRngState, SeparateForNestedCheckpoint) {
  const auto inner = [](const Tensor& x) { return drop(x); };
  const auto y = mezzo::activation_checkpoint(
      [&](const Tensor& x) { return mezzo::activation_checkpoint(inner, drop(x)); }, x_);
  torch::manual_seed(99);
  y.sum().backward();
  EXPECT_TRUE(torch::equal(x_.grad(), y.detach()));
}

}  // namespace
