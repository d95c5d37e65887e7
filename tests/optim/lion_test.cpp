// Lion compared with the paper's algorithm.

#include <mezzo/optim/lion.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

namespace {

using mezzo::optim::Lion;
using mezzo::optim::LionOptions;

/// The paper's algorithm in torch ops.
void paper_step(torch::Tensor& parameter, torch::Tensor& mean, const torch::Tensor& gradient,
                double lr, double decay) {
  const auto update = (0.9 * mean + 0.1 * gradient).sign();
  parameter = parameter - lr * (update + decay * parameter);
  mean = 0.99 * mean + 0.01 * gradient;
}

TEST(Lion, MatchesReference) {
  torch::manual_seed(2);
  const auto x = torch::randn({50}, torch::kDouble);
  auto expected = x.clone();
  auto mean = torch::zeros({50}, torch::kDouble);
  const auto options = LionOptions(1e-2).weight_decay(0.1);
  Lion optimizer({x}, options);
  for (int i = 0; i < 20; ++i) {
    x.mutable_grad() = torch::randn({50}, torch::kDouble);
    paper_step(expected, mean, x.grad(), 1e-2, 0.1);
    optimizer.step();
  }
  EXPECT_TRUE(torch::allclose(x, expected, 0, 1e-13));
}

}  // namespace
