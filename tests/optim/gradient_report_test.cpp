// An optimizer's report of its gradients, and steps that are taken by it without a GradScaler.

#include <mezzo/optim/adamw.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <sstream>
#include <vector>

namespace {

using mezzo::optim::AdamW;
using mezzo::optim::AdamWOptions;
using mezzo::optim::SGD;
using mezzo::optim::SGDOptions;
using mezzo::optim::WeightStorage;

torch::Tensor reported(std::vector<float> gradient, at::ScalarType dtype = torch::kFloat) {
  const auto size = static_cast<int64_t>(gradient.size());
  const auto parameter = torch::ones({size}, dtype).requires_grad_();
  parameter.mutable_grad() = torch::tensor(gradient).to(dtype);
  return parameter;
}

const torch::Tensor& inverse() {
  static const torch::Tensor number = torch::full({}, 0.25F);
  return number;
}

TEST(GradientReport, SaysWhatOneReadFinds) {
  const auto x = reported({12, 0}), y = reported({-16}), unused = torch::ones({3});
  SGD optimizer({x, unused, y}, SGDOptions(1.0));
  const auto report = optimizer.report(inverse());
  ASSERT_EQ(report.devices.size(), 1U);
  const auto& one = report.devices[0];
  EXPECT_EQ(one.inv_scale.item<float>(), 0.25F);
  EXPECT_EQ(one.found_inf.item<float>(), 0.0F);
  EXPECT_EQ(one.sum_of_squares.item<double>(), 25.0);
  EXPECT_EQ(one.max_abs.item<double>(), 4.0);
  ASSERT_EQ(one.gradients.size(), 2U);
  EXPECT_TRUE(one.gradients[1].is_same(y.grad()));
  EXPECT_FALSE(report.has_bare_half);
  x.mutable_grad()[1] = std::numeric_limits<float>::infinity();
  EXPECT_EQ(optimizer.report(inverse()).devices[0].found_inf.item<float>(), 1.0F);
  EXPECT_TRUE(SGD({unused}, SGDOptions(1.0)).report(inverse()).devices.empty());
}

TEST(GradientReport, IsAppliedAsGradScalerAppliesIt) {
  const auto ours = reported({3, -7, 11}), theirs = reported({3, -7, 11});
  AdamW left({ours}, AdamWOptions(0.1)), right({theirs}, AdamWOptions(0.1));
  mezzo::GradScaler scaler(mezzo::GradScalerOptions().init_scale(4));
  (void)scaler.scale(torch::zeros({}));
  for (int i = 0; i < 3; ++i) {
    left.apply(left.report(inverse()), {.max_norm = 1.0});
    scaler.step(right, {.max_norm = 1.0});
    scaler.update();
    EXPECT_TRUE(torch::equal(ours, theirs)) << i;
  }
  EXPECT_EQ(left.applied_steps(), 3);
}

TEST(GradientReport, ServesOneStepAndTheOptimizerAsItIs) {
  const auto x = reported({4}), y = reported({8});
  SGD optimizer({x}, SGDOptions(1.0));
  const auto report = optimizer.report(inverse());
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({y}));
  optimizer.apply(report);
  EXPECT_EQ(x.item<float>(), 0.0F);
  EXPECT_EQ(y.item<float>(), -1.0F) << "it has a gradient on a device that the report names";
  x.mutable_grad() = torch::full({1}, 8.0F);
  optimizer.apply(report);
  EXPECT_EQ(x.item<float>(), -2.0F) << "the gradient as it is now";
}

TEST(GradientReport, TakesWhatWasReplacedSinceAsItIsNow) {
  const auto x = reported({4});
  SGD optimizer({x}, SGDOptions(1.0));
  const auto of_another_rate = optimizer.report(inverse());
  optimizer.param_groups()[0].options().set_lr(0.5);
  optimizer.apply(of_another_rate);
  EXPECT_EQ(x.item<float>(), 0.5F);
  const auto of_another_gradient = optimizer.report(inverse());
  x.mutable_grad() = torch::full({1}, 8.0F);
  optimizer.apply(of_another_gradient);
  EXPECT_EQ(x.item<float>(), -0.5F);
  const auto of_none = optimizer.report(inverse());
  x.mutable_grad() = torch::Tensor();
  optimizer.apply(of_none);
  EXPECT_EQ(x.item<float>(), -0.5F);
}

TEST(GradientReport, StepsTheStateThatWasLoadedSince) {
  const auto x = reported({4});
  AdamW optimizer({x}, AdamWOptions(0.1));
  optimizer.step();
  std::stringstream file;
  torch::save(optimizer, file);
  optimizer.step();
  const auto report = optimizer.report(inverse());
  torch::load(optimizer, file);
  optimizer.apply(report);
  EXPECT_EQ(static_cast<mezzo::optim::AdamWParamState&>(*optimizer.state().begin()->second).step(),
            2);
}

TEST(GradientReport, TellsOfHalfThatNoMasterWidens) {
  const auto half = reported({1}, torch::kHalf);
  EXPECT_TRUE(SGD({half}, SGDOptions(1.0)).report(inverse()).has_bare_half);
  const auto masters = SGDOptions(1.0).weight_storage(WeightStorage::master);
  EXPECT_FALSE(SGD({half}, masters).report(inverse()).has_bare_half);
}

}  // namespace
