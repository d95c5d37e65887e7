// Apex's test_larc: an optimizer of the user's own, which rewrites gradients before it steps, under
// a loss scale and on master weights. What it computes depends on the size of the gradients, so it
// shows whether they are the true ones when it steps.

#include <mezzo/optim/master_weights.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "../support/tiny_optimizer.h"

namespace {

using mezzo::GradScaler;
using torch::Tensor;

/// Layer-wise adaptive rate clipping (You et al. 2017) around an optimizer of libtorch's.
template <class Base>
class Larc : public Base {
 public:
  using Base::Base;

  Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override {
    constexpr double kTrust = 0.02;  // Apex's default
    const torch::NoGradGuard no_grad;
    for (auto& group : this->param_groups()) {
      const double lr = group.options().get_lr();
      for (const Tensor& parameter : group.params()) {
        if (!parameter.grad().defined()) continue;
        const double size = parameter.norm().template item<double>();
        const double gradient = parameter.grad().norm().template item<double>();
        const double adaptive = kTrust * size / (gradient + 1e-8);
        parameter.mutable_grad().mul_(std::min(adaptive / lr, 1.0));
      }
    }
    return Base::step(closure);
  }
};

using LarcSgd = Larc<torch::optim::SGD>;

LarcSgd larc(const Tensor& weight) {
  return LarcSgd({weight}, torch::optim::SGDOptions(0.25).momentum(0.125));
}

/// Apex's model: the weight {1, 2}, an input of ones, the sum as the loss; the gradient is ones.
Tensor weight_in(torch::ScalarType dtype) {
  return (1 + torch::arange(2, torch::kFloat)).to(dtype).requires_grad_();
}
Tensor loss_of(const Tensor& weight) { return (torch::ones({2}) * weight.to(torch::kFloat)).sum(); }

/// 0.02 |w| / |g| for the rate, |w|^2 = 5 and |g|^2 = 2.
const double kStep = 0.02 * std::sqrt(5.0 / 2.0);

void expect_one_step(const Tensor& weight, double tolerance) {
  EXPECT_NEAR(weight[0].item<double>(), 1 - kStep, tolerance);
  EXPECT_NEAR(weight[1].item<double>(), 2 - kStep, tolerance);
}

class LarcIn : public testing::TestWithParam<torch::ScalarType> {
 protected:
  double tolerance() const {
    return GetParam() == torch::kFloat ? 1e-6 : GetParam() == torch::kHalf ? 1e-3 : 8e-3;
  }
};

TEST_P(LarcIn, AnyDtypeStepsAloneAsAtO0AndO3) {
  const auto weight = weight_in(GetParam());
  auto optimizer = larc(weight);
  loss_of(weight).backward();
  optimizer.step();
  expect_one_step(weight, tolerance());
}

TEST_P(LarcIn, AnyDtypeSeesTrueGradientsUnderAScaler) {
  const auto weight = weight_in(GetParam());
  auto optimizer = larc(weight);
  GradScaler scaler({.init_scale = 1024, .allow_fp16_gradients = true});
  scaler.on_skip(nullptr);
  scaler.scale(loss_of(weight)).backward();
  EXPECT_TRUE(scaler.step(optimizer).ran());
  expect_one_step(weight, tolerance());
  scaler.update();

  const auto before = weight.detach().clone();
  weight.mutable_grad().fill_(kInfinity);
  EXPECT_FALSE(scaler.step(optimizer).ran());
  EXPECT_TRUE(torch::equal(weight, before));
}

TEST_P(LarcIn, MastersOfAnyDtypeStepInFloatAsAtO2) {
  const auto weight = weight_in(GetParam());
  auto inner = larc(weight);
  mezzo::MasterWeights optimizer(inner);
  GradScaler scaler({.init_scale = 1024});
  scaler.on_skip(nullptr);
  scaler.scale(loss_of(weight)).backward();
  EXPECT_TRUE(scaler.step(optimizer).ran());
  expect_one_step(mezzo::master_params(optimizer)[0], 1e-6);
  expect_one_step(weight, tolerance());
}

TEST_P(LarcIn, MastersOfAnyDtypeMayBeClippedBefore) {
  const auto weight = weight_in(GetParam());
  auto inner = larc(weight);
  mezzo::MasterWeights optimizer(inner);
  GradScaler scaler({.init_scale = 1024});
  scaler.scale(loss_of(weight)).backward();
  scaler.unscale_(optimizer);
  const double norm = torch::nn::utils::clip_grad_norm_(mezzo::master_params(optimizer), 0.01);
  EXPECT_NEAR(norm, std::sqrt(2.0), 1e-6);
  EXPECT_TRUE(scaler.step(optimizer).ran());
  // |g| = 0.01 asks for a larger step than the rate of 0.25, which is then the bound.
  const double step = 0.25 * 0.01 / std::sqrt(2.0);
  EXPECT_NEAR(mezzo::master_params(optimizer)[0][0].item<double>(), 1 - step, 1e-6);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, LarcIn,
                         testing::Values(torch::kFloat, torch::kHalf, torch::kBFloat16),
                         [](const auto& dtype) { return std::string(toString(dtype.param)); });

}  // namespace
