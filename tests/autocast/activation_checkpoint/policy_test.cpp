#include <mezzo/autocast/activation_checkpoint.h>
#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/op_policy.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace {

TEST(CheckpointPolicy, RecomputesUnderTheOpPolicyOfTheFirstRun) {
  const auto x = torch::randn({4, 4}).requires_grad_();
  const auto w = torch::randn({4, 4});
  std::vector<at::ScalarType> dtypes;
  const auto block = [&](const torch::Tensor& input) {
    const auto product = input.mm(w);
    dtypes.push_back(product.scalar_type());
    return product.to(at::kFloat).tanh();
  };
  torch::Tensor y;
  {
    const mezzo::Autocast<torch::kCPU> autocast(
        {.policy = mezzo::install_op_overrides(mezzo::OpPolicy().deny("aten::mm"))});
    y = mezzo::activation_checkpoint(block, x);
  }
  const mezzo::Autocast<torch::kCPU> no_policy_here;
  std::thread([&] { y.sum().backward(); }).join();
  EXPECT_EQ(dtypes, (std::vector{at::kFloat, at::kFloat}));
}

}  // namespace
