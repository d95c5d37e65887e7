// Calls that a scaler accepts and refuses, and what it remembers between them.
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../support/error_of.h"
#include "../support/throwing_sgd.h"
#include "../support/tiny_optimizer.h"
#include "../support/warnings.h"

namespace {

using namespace test_support;
using mezzo::AnyOptimizer;
using mezzo::GradScaler;
using test_support::error_of;
using test_support::parameter;
using test_support::quiet_scaler;
using test_support::set_gradient;
using testing::HasSubstr;
using testing::StartsWith;
using torch::Tensor;

TEST(GradScaler, TakesAClosureThatIsNone) {
  OneWeight one;
  set_gradient(one.x, {1});
  EXPECT_TRUE(one.scaler.step(one.optimizer, nullptr).ran());
}

TEST(GradScaler, MayStepAgainAfterAnOptimizerThatThrew) {
  for (const double max_norm : {100.0, double{kInfinity}}) {
    auto scaler = quiet_scaler({.init_scale = 4});
    auto x = parameter({1});
    ThrowingSgd optimizer({x}, torch::optim::SGDOptions(1.0));
    set_gradient(x, {4});
    optimizer.throws = true;
    EXPECT_THROW(scaler.step(optimizer, {.max_norm = max_norm}), std::runtime_error);
    EXPECT_EQ(x.grad().item<float>(), 1.0F) << "unscaled, as by torch.amp";
    optimizer.throws = false;
    EXPECT_TRUE(scaler.step(optimizer, {.max_norm = max_norm}).ran());
    EXPECT_EQ(x.item<float>(), 0.0F) << "unscaled once";
  }
}

// torch refuses it too: what came after is scaled, and would be taken for unscaled.
TEST(GradScaler, RefusesGradientsThatCameAfterUnscaleFoundNone) {
  auto scaler = quiet_scaler({.init_scale = 4});
  auto x = parameter({1});
  torch::optim::SGD of_torch({x}, 1.0);
  mezzo::optim::SGD of_mezzo({x}, 1.0);
  for (const mezzo::AnyOptimizer optimizer : {mezzo::AnyOptimizer(of_torch), {of_mezzo}}) {
    x.mutable_grad() = torch::Tensor();
    scaler.unscale_(optimizer);
    set_gradient(x, {4});
    EXPECT_THAT(error_of([&] { scaler.step(optimizer); }),
                StartsWith("No inf checks were recorded for this optimizer."));
  }
  EXPECT_EQ(x.item<float>(), 1);
}

TEST(GradScaler, WarnsOnceOfGradientsThatAreClippedWhileTheyCarryTheScale) {
  const c10::WarningUtils::WarnAlways warn_each_time;
  for (const bool unscales_after : {false, true}) {
    test_support::Warnings warnings;
    GradScaler scaler;
    auto x = parameter({0, 0, 0});
    mezzo::optim::SGD optimizer({x}, 1e-3);
    for (int i = 0; i < 20; ++i) {
      optimizer.zero_grad();
      scaler.scale((x * torch::tensor({1.0F + static_cast<float>(i), 2.0F, 3.0F})).sum())
          .backward();
      torch::nn::utils::clip_grad_norm_({x}, 0.5);
      if (unscales_after) scaler.unscale_(optimizer);
      scaler.step(optimizer);
      scaler.update();
    }
    ASSERT_EQ(warnings.texts.size(), 1U);
    EXPECT_THAT(warnings.texts[0],
                HasSubstr("GradScaler: the norm of the scaled gradients has been "
                          "0.5 for 5 steps in a row"));
    EXPECT_THAT(warnings.texts[0], HasSubstr("{.max_norm = ...}"));
  }
}

TEST(GradScaler, AccusesNoHealthyLoopOfScaledClipping) {
  const c10::WarningUtils::WarnAlways warn_each_time;
  enum class Loop { plain, clipped, eighth, one_batch, unit_inputs, no_gradient };
  for (const Loop loop : {Loop::plain, Loop::clipped, Loop::eighth, Loop::one_batch,
                          Loop::unit_inputs, Loop::no_gradient}) {
    SCOPED_TRACE(static_cast<int>(loop));
    test_support::Warnings warnings;
    const bool is_eighth = loop == Loop::eighth;  // of 128 it is 16
    GradScaler scaler({.init_scale = is_eighth ? 128.0 : 65536.0});
    auto x = parameter({0, 0, 0});
    mezzo::optim::SGD optimizer({x}, 1e-3);
    for (int i = 0; i < 20; ++i) {
      optimizer.zero_grad();
      auto input = torch::tensor({1.0F + static_cast<float>(i), 2.0F, 3.0F});
      if (loop == Loop::one_batch) input = torch::tensor({0.5F, 0.0F, 0.0F}) / 65536;
      if (loop == Loop::unit_inputs) input = input / input.norm();
      if (loop == Loop::no_gradient) input = torch::zeros({3});
      scaler.scale((x * input).sum()).backward();
      if (loop == Loop::clipped || is_eighth) {
        scaler.unscale_(optimizer);
        torch::nn::utils::clip_grad_norm_({x}, is_eighth ? 0.125 : 0.5);
      }
      scaler.step(optimizer);
      scaler.update();
    }
    EXPECT_EQ(warnings.texts, std::vector<std::string>());
  }
}

TEST(GradScaler, DisabledPassesEverythingThrough) {
  GradScaler scaler({.enabled = false});
  auto x = parameter({1});
  auto optimizer = sgd({x});
  const auto loss = torch::ones({});
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  set_gradient(x, {kInfinity});
  scaler.unscale_(optimizer);
  int closures = 0;
  const auto result = scaler.step(optimizer, [&] {
    ++closures;
    return torch::full({}, 5.0);
  });
  EXPECT_TRUE(result.ran());
  EXPECT_EQ(result.scale(), 1.0F);
  EXPECT_EQ(result.value().value().item<float>(), 5.0F);
  EXPECT_EQ(closures, 1);
  scaler.update();
  scaler.update(4.0);
  EXPECT_EQ(scaler.get_scale(), 1.0);
  EXPECT_TRUE(scaler.state_dict().empty());
  scaler.load_state_dict({{"nonsense", 1}});
}

TEST(GradScaler, SpreadsANanByClippingWhereItIsDisabledAsLibtorchsClippingDoes) {
  GradScaler scaler({.enabled = false});
  auto x = parameter({1, 1});
  auto optimizer = sgd({x});
  set_gradient(x, {std::nanf(""), 1});
  EXPECT_TRUE(scaler.step(optimizer, {.max_norm = 1}).ran());
  EXPECT_TRUE(x.isnan().all().item<bool>());
}

TEST(GradScaler, MovesWithItsState) {
  auto scaler = quiet_scaler({.init_scale = 4});
  auto x = parameter({0});
  auto optimizer = sgd({x});
  set_gradient(x, {4});
  scaler.unscale_(optimizer);
  GradScaler moved = std::move(scaler);
  EXPECT_TRUE(moved.step(optimizer).ran());
  EXPECT_EQ(x.item<float>(), -1.0F);
}

// --- Several scalers for one optimizer, errors in between, odd gradients.

/// libtorch's SGD and mezzo's, with a rate of 1: a step subtracts the gradient.
template <class Optimizer>
class UnplannedScalerCalls : public testing::Test {
 protected:
  static Optimizer sgd(std::vector<Tensor> parameters) {
    return Optimizer(std::move(parameters), torch::optim::SGDOptions(1.0));
  }
};

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

}  // namespace
