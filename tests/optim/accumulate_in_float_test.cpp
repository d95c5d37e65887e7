#include <mezzo/optim/optimizer.h>
#include <mezzo/optim/sgd.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace {

using mezzo::accumulate_in_float;
using mezzo::optim::SGD;

TEST(AccumulateInFloat, AddsUpGradientsOf16BitWeights) {
  for (const bool in_float : {false, true}) {
    const auto weight = torch::zeros({2}, torch::kBFloat16).requires_grad_();
    if (in_float) accumulate_in_float({weight});
    SGD optimizer({weight}, 1.0);
    for (int i = 0; i < 1000; ++i) weight.sum().backward();
    EXPECT_EQ(weight.grad().scalar_type(), in_float ? torch::kFloat : torch::kBFloat16);
    optimizer.step();
    EXPECT_EQ(weight[0].item<float>(), in_float ? -1000.0F : -256.0F);
  }
}

TEST(AccumulateInFloat, HoldsForTheFirstBatchOfAWeightThatWasFrozen) {
  const auto weight = torch::zeros({2}, torch::kBFloat16);
  accumulate_in_float({weight});
  SGD optimizer({weight}, 1.0);
  weight.set_requires_grad(true);
  for (int i = 0; i < 1000; ++i) weight.sum().backward();
  optimizer.step();
  EXPECT_EQ(weight[0].item<float>(), -1000.0F);
}

TEST(AccumulateInFloat, AddsToWhatWasAddedUpIn16BitsBefore) {
  const auto weight = torch::zeros({2}, torch::kBFloat16).requires_grad_();
  weight.sum().backward();
  accumulate_in_float({weight});
  for (int i = 0; i < 999; ++i) weight.sum().backward();
  EXPECT_TRUE(torch::equal(weight.grad(), torch::full({2}, 1000.0)));
}

TEST(AccumulateInFloat, LeavesTheGradientsOfADoubleModelDouble) {
  const auto weight = torch::zeros({2}, torch::kDouble).requires_grad_();
  accumulate_in_float({weight});
  (weight * 1e300).sum().backward();
  EXPECT_EQ(weight.grad()[0].item<double>(), 1e300);
}

/// Relative distance of `gradient` from `exact`.
double distance(const torch::Tensor& gradient, const torch::Tensor& exact) {
  return ((gradient.to(torch::kDouble) - exact).norm() / exact.norm()).item<double>();
}

// What a product with float output (cuBLAS has one) would save: the backward pass computes in 16
// bits all the same.
TEST(AccumulateInFloat, LosesLittleToTheRoundingOfEachMicroBatchsGradient) {
  constexpr int64_t kWidth = 128, kBatch = 16, kMicroBatches = 64;
  torch::manual_seed(1);
  const auto options = torch::dtype(torch::kBFloat16);
  const auto scale = 1 / std::sqrt(double{kWidth});
  std::vector<torch::Tensor> weights, exact;
  for (int i = 0; i < 3; ++i) {
    weights.push_back((torch::randn({kWidth, kWidth}) * scale).to(options).requires_grad_());
    exact.push_back(weights.back().detach().to(torch::kDouble).requires_grad_());
  }
  const auto in_16_bits = weights.front().detach().clone().requires_grad_();
  mezzo::accumulate_in_float(weights);
  const auto loss = [](const torch::Tensor& x, const std::vector<torch::Tensor>& by,
                       torch::Tensor& first) {
    first = torch::mm(x, by[0].t());
    const auto second = torch::gelu(torch::mm(torch::gelu(first), by[1].t()));
    return torch::mm(second, by[2].t()).square().mean();
  };
  auto float_products = torch::zeros({kWidth, kWidth});
  for (int i = 0; i < kMicroBatches; ++i) {
    const auto x = torch::randn({kBatch, kWidth}).to(options);
    torch::Tensor first;
    loss(x.to(torch::kDouble), exact, first).backward();
    const auto value = loss(x, weights, first);
    first.retain_grad();
    value.backward();
    float_products += torch::mm(first.grad().to(torch::kFloat).t(), x.to(torch::kFloat));
    loss(x, {in_16_bits, weights[1].detach(), weights[2].detach()}, first).backward();
  }
  const double by_16_bits = distance(in_16_bits.grad(), exact.front().grad());
  const double by_float = distance(weights.front().grad(), exact.front().grad());
  const double by_products = distance(float_products, exact.front().grad());
  EXPECT_LT(by_float, 0.5 * by_16_bits);
  EXPECT_LT(by_float, 1.15 * by_products);
}

}  // namespace
