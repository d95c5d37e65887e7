// A scaler in use that nobody planned: several for one optimizer, errors in between, odd gradients.

#include <mezzo/optim/grad_buckets.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../support/error_of.h"
#include "../support/tiny_optimizer.h"

namespace {

using mezzo::AnyOptimizer;
using mezzo::GradScaler;
using test_support::error_of;
using test_support::parameter;
using test_support::quiet_scaler;
using test_support::set_gradient;
using testing::HasSubstr;
using torch::Tensor;

/// libtorch's SGD and mezzo's, with a rate of 1: a step subtracts the gradient.
template <class Optimizer>
class UnplannedScalerCalls : public testing::Test {
 protected:
  static Optimizer sgd(std::vector<Tensor> parameters) {
    return Optimizer(std::move(parameters), typename Options<Optimizer>::type(1.0));
  }

 private:
  template <class Made>
  struct Options {
    using type = torch::optim::SGDOptions;
  };
  template <class Made>
  requires std::same_as<Made, mezzo::optim::SGD>
  struct Options<Made> {
    using type = mezzo::optim::SGDOptions;
  };
};

/// `optimizer` trains `x` and `y`, both 1, at a rate of 1.
template <class Optimizer>
void expect_a_throw_is_given_up_by_zero_grad(Optimizer& optimizer, Tensor& x, Tensor& y) {
  GradScaler scaler({.init_scale = 4});
  bool throws = true;
  y.register_hook([&throws](const Tensor&) {
    if (throws) throw std::runtime_error("a hook");
  });
  EXPECT_THROW(scaler.scale((x * x + y * y).sum()).backward(), std::runtime_error);
  throws = false;
  optimizer.zero_grad();
  scaler.scale((x * x + y * y).sum()).backward();
  EXPECT_TRUE(scaler.step(optimizer).ran());
  scaler.update();
  EXPECT_EQ(x.item<float>(), -1);
  EXPECT_EQ(y.item<float>(), -1);
}

using Optimizers = testing::Types<torch::optim::SGD, mezzo::optim::SGD>;
TYPED_TEST_SUITE(UnplannedScalerCalls, Optimizers);

TYPED_TEST(UnplannedScalerCalls, TwoScalersTakeTheirScalesOffOneAfterTheOther) {
  auto x = parameter({0});
  auto optimizer = this->sgd({x});
  auto first = quiet_scaler({.init_scale = 4});
  auto second = quiet_scaler({.init_scale = 8});
  set_gradient(x, {32});
  first.unscale_(optimizer);
  second.unscale_(optimizer);
  EXPECT_TRUE(first.step(optimizer).ran());
  EXPECT_EQ(x.item<float>(), -1);
  first.update();
  second.update();
  EXPECT_EQ(first.get_scale(), 4);
  EXPECT_EQ(second.get_scale(), 8);
}

TYPED_TEST(UnplannedScalerCalls, WhatWasFoundCountsThoughTheOptimizerIsGone) {
  auto x = parameter({0});
  auto scaler = quiet_scaler({.init_scale = 4});
  {
    auto optimizer = std::make_unique<TypeParam>(this->sgd({x}));
    set_gradient(x, {kInfinity});
    scaler.unscale_(*optimizer);
  }
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 2);
}

TYPED_TEST(UnplannedScalerCalls, ALossThatIsScaledTwiceKeepsOneScale) {
  auto x = parameter({0});
  auto optimizer = this->sgd({x});
  GradScaler scaler({.init_scale = 4});
  scaler.scale(scaler.scale(x.sum())).backward();
  scaler.step(optimizer);
  EXPECT_EQ(x.item<float>(), -4);
}

TYPED_TEST(UnplannedScalerCalls, ABackwardThatThrewIsGivenUpByZeroGrad) {
  auto x = parameter({1}), y = parameter({1});
  auto optimizer = this->sgd({x, y});
  expect_a_throw_is_given_up_by_zero_grad(optimizer, x, y);
}

TYPED_TEST(UnplannedScalerCalls, ParametersWithoutElementsStep) {
  auto x = parameter({});
  auto optimizer = this->sgd({x});
  auto scaler = quiet_scaler({});
  set_gradient(x, {});
  EXPECT_TRUE(scaler.step(optimizer).ran());
  scaler.update();
}

TYPED_TEST(UnplannedScalerCalls, NothingToCheckIsAnError) {
  auto x = parameter({1});
  auto without_gradients = this->sgd({x});
  // mezzo's refuses to be without parameters.
  torch::optim::SGD without_parameters(std::vector<torch::Tensor>{}, /*lr=*/1.0);
  auto scaler = quiet_scaler({});
  for (const AnyOptimizer optimizer :
       {AnyOptimizer(without_gradients), AnyOptimizer(without_parameters)}) {
    EXPECT_THAT(error_of([&] { scaler.step(optimizer); }),
                HasSubstr("No inf checks were recorded for this optimizer."));
  }
  EXPECT_THAT(error_of([&] { scaler.update(); }),
              HasSubstr("No inf checks were recorded prior to update."));
}

TYPED_TEST(UnplannedScalerCalls, AGradientThatTwoParametersShareIsUnscaledOnce) {
  for (const bool unscales_before : {false, true}) {
    auto x = parameter({0}), y = parameter({0});
    auto optimizer = this->sgd({x, y});
    auto scaler = quiet_scaler({.init_scale = 4});
    set_gradient(x, {4});
    y.mutable_grad() = x.grad();
    if (unscales_before) scaler.unscale_(optimizer);
    scaler.step(optimizer);
    EXPECT_EQ(x.item<float>(), -1);
    EXPECT_EQ(y.item<float>(), -1);
  }
}

TYPED_TEST(UnplannedScalerCalls, TwoGradientsOfOneMemoryAreEachUnscaled) {
  auto x = parameter({0}), y = parameter({0});
  auto optimizer = this->sgd({x, y});
  auto scaler = quiet_scaler({.init_scale = 4});
  set_gradient(x, {16});
  y.mutable_grad() = x.grad().detach();
  scaler.unscale_(optimizer);
  EXPECT_EQ(x.grad().item<float>(), 1);
}

TYPED_TEST(UnplannedScalerCalls, AFirstGroupThatLeavesTakesNoRecordWithIt) {
  auto x = parameter({0}), y = parameter({0}), z = parameter({0});
  auto optimizer = this->sgd({x});
  for (const auto& other : {y, z}) {
    optimizer.add_param_group(torch::optim::OptimizerParamGroup({other}));
  }
  auto& groups = optimizer.param_groups();
  auto scaler = quiet_scaler({.init_scale = 4});
  for (const auto& each : {x, y, z}) set_gradient(each, {4});
  scaler.unscale_(optimizer);
  groups.erase(groups.begin());
  EXPECT_THAT(error_of([&] { scaler.unscale_(optimizer); }), HasSubstr("already been called"));
  scaler.step(optimizer);
  EXPECT_EQ(y.item<float>(), -1) << "unscaled once";
  groups.erase(groups.begin());
  EXPECT_THAT(error_of([&] { scaler.step(optimizer); }), HasSubstr("already been called"));
  EXPECT_EQ(z.item<float>(), -1) << "stepped once";
}

TEST(UnplannedCalls, LossesOfAnyDtypeAreScaledInIt) {
  auto scaler = quiet_scaler({.init_scale = 4});
  for (const auto dtype :
       {torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kHalf, torch::kComplexFloat}) {
    const Tensor scaled = scaler.scale(torch::full({2}, 3, dtype));
    EXPECT_EQ(scaled.scalar_type(), dtype);
    EXPECT_TRUE(torch::equal(scaled, torch::full({2}, 12, dtype))) << dtype;
  }
}

TEST(UnplannedCalls, ABackwardThatThrewLeavesBucketsUsable) {
  auto x = parameter({1}), y = parameter({1});
  mezzo::GradBuckets buckets({x, y});
  mezzo::optim::SGD optimizer(buckets.parameters(), mezzo::optim::SGDOptions(1.0));
  expect_a_throw_is_given_up_by_zero_grad(optimizer, x, y);
}

}  // namespace
