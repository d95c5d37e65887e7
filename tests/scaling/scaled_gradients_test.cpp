// Gradients that were not scaled by the scale that the scaler divides them by.

#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "../support/message_of.h"
#include "../support/tiny_optimizer.h"
#include "../support/warning_recorder.h"

namespace {

using namespace test_support;
using mezzo::GradScaler;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using torch::Tensor;

/// torch::optim::SGD and mezzo::optim::SGD with a learning rate of 1.
template <class Optimizer>
class GradScalerScaledGradients : public testing::Test {
 protected:
  static Optimizer sgd(const std::vector<Tensor>& parameters) {
    return Optimizer(parameters, torch::optim::SGDOptions(1.0));
  }
  /// Runs a backward pass after which the gradient of `parameter` is `slope` times the scale.
  void backward(const Tensor& parameter, float slope = 1) {
    scaler.scale((parameter * slope).sum()).backward();
  }
  void SetUp() override { scaler.on_skip(nullptr); }

  GradScaler scaler{{.init_scale = 4, .growth_interval = 1}};
  Tensor x = parameter({0}), y = parameter({0});
  WarningRecorder warnings;
};

using Optimizers = testing::Types<torch::optim::SGD, mezzo::optim::SGD>;
TYPED_TEST_SUITE(GradScalerScaledGradients, Optimizers);

TYPED_TEST(GradScalerScaledGradients, UpdateBetweenTwoStepsWarnsOnce) {
  auto first = this->sgd({this->x}), second = this->sgd({this->y});
  for (int i = 0; i < 3; ++i) {
    first.zero_grad();
    second.zero_grad();
    this->backward(this->x + this->y);
    this->scaler.step(first);
    this->scaler.update();
    this->scaler.step(second);
    this->scaler.update();
  }
  EXPECT_THAT(this->warnings.texts,
              ElementsAre(AllOf(HasSubstr("step() is called, but no loss was scaled since the last "
                                          "update()"),
                                HasSubstr("scaler.update() once at its end"))));
}

TYPED_TEST(GradScalerScaledGradients, StepWithoutScaleWarnsOnce) {
  auto optimizer = this->sgd({this->x});
  for (int i = 0; i < 4; ++i) {
    optimizer.zero_grad();
    const auto loss = this->x.sum();
    (i == 0 ? this->scaler.scale(loss) : loss).backward();
    if (i == 2) this->scaler.unscale_(optimizer);
    this->scaler.step(optimizer);
    this->scaler.update();
  }
  EXPECT_THAT(this->warnings.texts, ElementsAre(HasSubstr("no loss was scaled")));
}

TYPED_TEST(GradScalerScaledGradients, ManualScalingDoesNotWarn) {
  auto optimizer = this->sgd({this->x});
  (void)this->scaler.scale(torch::ones({}));
  for (const bool reads_state : {false, true, false}) {
    optimizer.zero_grad();
    const double scale =
        reads_state ? this->scaler.state_dict().at("scale") : this->scaler.get_scale();
    (this->x * scale).sum().backward();
    this->scaler.step(optimizer);
    this->scaler.update();
  }
  EXPECT_EQ(this->x.template item<float>(), -3);
  EXPECT_THAT(this->warnings.texts, IsEmpty());
}

TYPED_TEST(GradScalerScaledGradients, ConstantScaleDoesNotWarn) {
  auto optimizer = this->sgd({this->x});
  this->scaler = GradScaler(mezzo::GradScalerOptions::fixed(8));
  (void)this->scaler.scale(torch::ones({}));
  for (int i = 0; i < 2; ++i) {
    set_grad(this->x, {8});
    this->scaler.step(optimizer);
    this->scaler.update();
  }
  EXPECT_THAT(this->warnings.texts, IsEmpty());
}

// A new optimizer may have the address of a destroyed one.
TYPED_TEST(GradScalerScaledGradients, ReusedOptimizerAddressIsNotUnscaled) {
  alignas(TypeParam) unsigned char memory[sizeof(TypeParam)];
  auto* optimizer = new (memory) TypeParam(this->sgd({this->x}));
  this->backward(this->x, std::numeric_limits<float>::infinity());
  this->scaler.unscale_(*optimizer);
  std::destroy_at(optimizer);
  for (const bool unscales : {true, false}) {
    auto* next = new (memory) TypeParam(this->sgd({this->y}));
    this->y.mutable_grad() = Tensor();
    this->backward(this->y);
    if (unscales) {
      this->scaler.unscale_(*next);
      EXPECT_EQ(this->y.grad().template item<float>(), 1);
    } else {
      EXPECT_TRUE(this->scaler.step(*next).applied());
      EXPECT_EQ(this->y.template item<float>(), -1);
    }
    std::destroy_at(next);
    if (unscales) this->y = parameter({0});
  }
  this->scaler.update();
  EXPECT_EQ(this->scaler.get_scale(), 2) << "the first optimizer's inf counts";
}

// As in SAM: unscale_, a perturbation, and a second backward pass.
TYPED_TEST(GradScalerScaledGradients, SecondBackwardAfterUnscaleThrows) {
  auto optimizer = this->sgd({this->x});
  this->backward(this->x);
  this->scaler.unscale_(optimizer);
  optimizer.zero_grad();
  this->backward(this->x);
  EXPECT_THAT(
      message_of([&] { this->scaler.step(optimizer); }),
      AllOf(HasSubstr("the gradient of parameter 0 of group 0"),
            HasSubstr("by the backward pass of a scaled loss"), HasSubstr("discard_iteration()")));
  EXPECT_EQ(this->x.template item<float>(), 0);
  this->scaler.discard_iteration();
  optimizer.zero_grad();
  this->backward(this->x);
  this->scaler.step(optimizer);
  this->scaler.update();
  EXPECT_EQ(this->x.template item<float>(), -1);
}

TYPED_TEST(GradScalerScaledGradients, GradientClippedOutOfPlaceSteps) {
  auto first = this->sgd({this->x}), second = this->sgd({this->y});
  this->backward(this->x);
  this->scaler.unscale_(first);
  this->x.mutable_grad() = this->x.grad() * 0.5;
  this->backward(this->y);
  this->x.mutable_grad() = this->x.grad() * 0.5;
  this->scaler.step(first);
  this->scaler.step(second);
  this->scaler.update();
  EXPECT_EQ(this->x.template item<float>(), -0.25);
}

// Both losses are scaled before the first step.
TYPED_TEST(GradScalerScaledGradients, SharedGradientZeroedInPlaceSteps) {
  auto first = this->sgd({this->x}), second = this->sgd({this->x});
  const Tensor loss = this->scaler.scale(this->x.sum()),
               other_loss = this->scaler.scale(this->x.sum());
  loss.backward();
  this->scaler.unscale_(first);
  this->scaler.step(first);
  this->x.mutable_grad().zero_();
  other_loss.backward();
  this->scaler.step(second);
  this->scaler.update();
  EXPECT_EQ(this->x.template item<float>(), -2);
}

TYPED_TEST(GradScalerScaledGradients, ReusedOptimizerAddressSteps) {
  alignas(TypeParam) unsigned char memory[sizeof(TypeParam)];
  for (const bool finds_gradients : {true, false}) {
    for (const Tensor& weight : {parameter({0}), parameter({0})}) {
      auto* optimizer = new (memory) TypeParam(this->sgd({weight}));
      if (!finds_gradients) this->scaler.unscale_(*optimizer);
      this->backward(weight);
      if (finds_gradients) {
        EXPECT_TRUE(this->scaler.step(*optimizer).applied());
      }
      std::destroy_at(optimizer);
    }
    this->scaler.discard_iteration();
  }
}

TYPED_TEST(GradScalerScaledGradients, CallersScaleDoesNotWarn) {
  auto optimizer = this->sgd({this->x});
  (void)this->scaler.scale(torch::ones({}));
  for (int i = 0; i < 3; ++i) {
    this->x.mutable_grad() = Tensor();
    (this->x * 16.0).sum().backward();
    if (i == 0) this->scaler.update(16.0);
    this->scaler.step(optimizer);
    this->scaler.update(16.0);
  }
  EXPECT_EQ(this->x.template item<float>(), -3);
  EXPECT_THAT(this->warnings.texts, IsEmpty());
}

TYPED_TEST(GradScalerScaledGradients, OtherOptimizersBackwardAfterUnscaleSteps) {
  auto first = this->sgd({this->x}), second = this->sgd({this->y});
  this->backward(this->x);
  this->scaler.unscale_(first);
  torch::nn::utils::clip_grad_norm_({this->x}, 0.5);
  this->backward(this->y);
  this->scaler.step(first);
  this->scaler.step(second);
  this->scaler.update();
  EXPECT_NEAR(this->x.template item<float>(), -0.5, 1e-4);
  EXPECT_EQ(this->y.template item<float>(), -1);
  EXPECT_THAT(this->warnings.texts, IsEmpty());
}

TYPED_TEST(GradScalerScaledGradients, SharedParameterThrowsForSecondOptimizer) {
  auto first = this->sgd({this->x}), second = this->sgd({this->y, this->x});
  this->backward(this->x + this->y);
  this->scaler.unscale_(first);
  for (const bool unscales : {true, false}) {
    EXPECT_THAT(message_of([&] {
                  if (unscales) this->scaler.unscale_(second);
                  this->scaler.step(second);
                }),
                AllOf(HasSubstr("parameter 1 of group 0 (float32 [1] on cpu) is in two optimizers"),
                      HasSubstr("pass it to one optimizer")));
  }
  EXPECT_EQ(this->x.grad().template item<float>(), 1) << "unscaled once";
  EXPECT_EQ(this->y.grad().template item<float>(), 4) << "not unscaled";
}

// Each backward pass creates new gradients, as in a GAN whose networks share layers.
TYPED_TEST(GradScalerScaledGradients, SharedParameterWithSeparateBackwardSteps) {
  auto first = this->sgd({this->x}), second = this->sgd({this->y, this->x});
  for (const auto& optimizer : {mezzo::OptimizerRef(first), mezzo::OptimizerRef(second)}) {
    first.zero_grad(/*set_to_none=*/false);
    second.zero_grad(/*set_to_none=*/false);
    this->backward(this->x + this->y);
    this->scaler.step(optimizer);
  }
  this->scaler.update();
  EXPECT_EQ(this->x.template item<float>(), -2);
  EXPECT_THAT(this->warnings.texts, IsEmpty());
}

TYPED_TEST(GradScalerScaledGradients, UnscaleReturnsFoundInf) {
  auto optimizer = this->sgd({this->x});
  for (const float slope : {1.0F, std::numeric_limits<float>::infinity()}) {
    this->x.mutable_grad() = Tensor();
    this->backward(this->x, slope);
    EXPECT_EQ(this->scaler.unscale_(optimizer).template item<float>() != 0, std::isinf(slope));
    this->scaler.discard_iteration();
  }
  GradScaler disabled({.enabled = false});
  EXPECT_FALSE(disabled.unscale_(optimizer).defined());
}

TYPED_TEST(GradScalerScaledGradients, ErrorNamesParameterOfBadGradient) {
  const auto z = torch::ones({3}, torch::kComplexFloat).requires_grad_();
  torch::optim::SGD optimizer({this->x, z}, 1.0);
  (void)this->scaler.scale(torch::ones({}));
  z.mutable_grad() = torch::ones_like(z);
  EXPECT_THAT(
      message_of([&] { this->scaler.unscale_(optimizer); }),
      HasSubstr(
          "the gradient of parameter 1 of group 0 (ComplexFloat [3] on cpu) is ComplexFloat"));
  z.mutable_grad() = Tensor();
  auto expanded = this->sgd({this->y, torch::zeros({3}).requires_grad_()});
  const auto& wide = expanded.param_groups()[0].params()[1];
  wide.mutable_grad() = torch::ones({}).expand({3});
  this->y.mutable_grad() = torch::ones({1});
  EXPECT_THAT(message_of([&] { this->scaler.unscale_(expanded); }),
              AllOf(HasSubstr("the gradient of parameter 1 of group 0 (float32 [3] on cpu) has "
                              "overlapping elements"),
                    HasSubstr("clone() it")));
  EXPECT_EQ(this->y.grad().template item<float>(), 1) << "not modified";
}

TYPED_TEST(GradScalerScaledGradients, NewScaleReportsUnscaledInf) {
  auto optimizer = this->sgd({this->x});
  std::vector<double> scales;
  this->scaler.on_skip([&](const mezzo::SkippedStep& skipped) { scales.push_back(skipped.scale); });
  this->backward(this->x, std::numeric_limits<float>::infinity());
  this->scaler.unscale_(optimizer);
  this->scaler.update(16.0);
  EXPECT_THAT(scales, ElementsAre(4));
}

TEST(GradScalerStateDict, LoadKeepsOptionsNotInState) {
  GradScaler scaler({.allow_fp16_gradients = true, .loss_id = 3});
  scaler.load_state_dict(GradScaler({.init_scale = 2}).state_dict());
  EXPECT_TRUE(scaler.options().allow_fp16_gradients);
  EXPECT_EQ(scaler.options().loss_id, 3);
  EXPECT_EQ(scaler.get_scale(), 2);
}

// From 2^120 on, 1 / scale times the clip coefficient is subnormal in float32.
TYPED_TEST(GradScalerScaledGradients, HugeScaleClipsAccurately) {
  for (const int exponent : {100, 120, 126}) {
    for (const bool unscales : {false, true}) {
      auto weight = parameter({0});
      auto optimizer = this->sgd({weight});
      GradScaler large({.init_scale = std::ldexp(1.0, exponent)});
      large.scale(weight.sum()).backward();
      if (unscales) large.unscale_(optimizer);
      large.step(optimizer, {.max_norm = 1e-5});
      EXPECT_NEAR(weight.item<float>(), -1e-5, 2e-11) << exponent << " " << unscales;
    }
  }
}

TYPED_TEST(GradScalerScaledGradients, GrownScaleTrainsUnderFlushToZero) {
  at::globalContext().setFlushDenormal(true);
  auto optimizer = this->sgd({this->x});
  for (int i = 0; i < 140; ++i) {
    optimizer.zero_grad();
    this->backward(this->x);
    this->scaler.step(optimizer, {.max_norm = 1e3});
    this->scaler.update();
  }
  at::globalContext().setFlushDenormal(false);
  EXPECT_EQ(this->x.template item<float>(), -140);
  EXPECT_EQ(this->scaler.get_scale(), std::ldexp(1.0, 126));
}

/// Training loops of twenty steps.
enum class Loop {
  clipped_scaled,
  clipped_before_unscale,
  plain,
  clipped,
  eighth,
  one_batch,
  unit_inputs,
  no_gradient
};

std::vector<std::string> warnings_of(Loop loop) {
  const c10::WarningUtils::WarnAlways warn_each_time;
  WarningRecorder warnings;
  const bool is_eighth = loop == Loop::eighth;  // 0.125 * 128 is the round number 16
  const bool is_clipped = is_eighth || loop == Loop::clipped;
  const bool is_early = loop == Loop::clipped_before_unscale;
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
    if (is_early || loop == Loop::clipped_scaled) torch::nn::utils::clip_grad_norm_({x}, 0.5);
    if (is_early || is_clipped) scaler.unscale_(optimizer);
    if (is_clipped) torch::nn::utils::clip_grad_norm_({x}, is_eighth ? 0.125 : 0.5);
    scaler.step(optimizer);
    scaler.update();
  }
  return warnings.texts;
}

TEST(GradScaler, WarnsOnceForClippedScaledGradients) {
  for (const Loop loop : {Loop::clipped_scaled, Loop::clipped_before_unscale}) {
    EXPECT_THAT(warnings_of(loop),
                ElementsAre(AllOf(HasSubstr("GradScaler: the norm of the scaled gradients has been "
                                            "0.5 for 5 consecutive steps"),
                                  HasSubstr("{.max_norm = ...}"))));
  }
}

TEST(GradScaler, DoesNotWarnForUnscaledClipping) {
  for (const Loop loop : {Loop::plain, Loop::clipped, Loop::eighth, Loop::one_batch,
                          Loop::unit_inputs, Loop::no_gradient}) {
    EXPECT_THAT(warnings_of(loop), ElementsAre()) << static_cast<int>(loop);
  }
}

}  // namespace
