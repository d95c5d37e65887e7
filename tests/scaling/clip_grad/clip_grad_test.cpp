// Clipping that knows whether gradients still carry the loss scale.

#include <mezzo/optim/master_weights.h>
#include <mezzo/scaling/clip_grad.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "../../support/error_of.h"
#include "../../support/tiny_optimizer.h"

namespace {

using namespace test_support;
using mezzo::clip_grad_norm_;
using mezzo::clip_grad_value_;
using testing::HasSubstr;

/// One parameter with the scaled gradient {3, 4} * 1024, whose true norm is 5.
class ClipGrad : public testing::Test {
 protected:
  ClipGrad() { set_gradient(weight_, {3 * kScale, 4 * kScale}); }

  void expect_gradient(float first, float second) const {
    const auto gradient = weight_.grad();
    EXPECT_FLOAT_EQ(gradient[0].item<float>(), first);
    EXPECT_FLOAT_EQ(gradient[1].item<float>(), second);
  }

  static constexpr float kScale = 1024;
  torch::Tensor weight_ = parameter({10, 10});
  torch::optim::SGD optimizer_ = sgd({weight_});
  mezzo::GradScaler scaler_ = quiet_scaler({.init_scale = kScale});
};

TEST_F(ClipGrad, UnscalesBeforeItMeasures) {
  const auto norm = clip_grad_norm_(scaler_, optimizer_, 1.0);
  EXPECT_EQ(norm.item<float>(), 5.0F);
  EXPECT_EQ(norm.scalar_type(), torch::kFloat);
  EXPECT_EQ(norm.dim(), 0);
  const auto coefficient = static_cast<float>(1.0 / (5.0 + 1e-6));
  expect_gradient(3 * coefficient, 4 * coefficient);
  EXPECT_TRUE(scaler_.step(optimizer_).ran());
  EXPECT_FLOAT_EQ(weight_[0].item<float>(), 10 - 3 * coefficient);
  EXPECT_EQ(scaler_.get_scale(), kScale);
}

TEST_F(ClipGrad, DoesNotUnscaleTwice) {
  scaler_.unscale_(optimizer_);
  EXPECT_EQ(clip_grad_norm_(scaler_, optimizer_, 2.5).item<float>(), 5.0F);
  EXPECT_FLOAT_EQ(clip_grad_norm_(scaler_, optimizer_, 9.0).item<float>(), 2.5F);
  clip_grad_value_(scaler_, optimizer_, 1.75);
  expect_gradient(1.5F, 1.75F);
}

TEST_F(ClipGrad, UnscalesAnewInTheNextIteration) {
  for (int iteration = 0; iteration < 3; ++iteration) {
    set_gradient(weight_, {3 * kScale, 4 * kScale});
    EXPECT_EQ(clip_grad_norm_(scaler_, optimizer_, 1.0).item<float>(), 5.0F);
    scaler_.step(optimizer_);
    scaler_.update();
  }
}

TEST_F(ClipGrad, LeavesSmallGradientsAsTheyAre) {
  EXPECT_EQ(clip_grad_norm_(scaler_, optimizer_, 6.0).item<float>(), 5.0F);
  expect_gradient(3, 4);
  clip_grad_value_(scaler_, optimizer_, 4.0);
  expect_gradient(3, 4);
}

TEST_F(ClipGrad, OnlyMeasuresForAnInfiniteNorm) {
  set_gradient(weight_, {3 * kScale, kInfinity});
  const double unbounded = std::numeric_limits<double>::infinity();
  EXPECT_EQ(clip_grad_norm_(scaler_, optimizer_, unbounded).item<float>(), kInfinity);
  expect_gradient(3, kInfinity);
}

TEST_F(ClipGrad, OfNormZeroMakesZeros) {
  EXPECT_EQ(clip_grad_norm_(scaler_, optimizer_, 0.0).item<float>(), 5.0F);
  expect_gradient(0, 0);
}

TEST_F(ClipGrad, ClampsToTheValueOnBothSides) {
  set_gradient(weight_, {-3 * kScale, 4 * kScale});
  clip_grad_value_(scaler_, optimizer_, 0.5);
  expect_gradient(-0.5F, 0.5F);
}

TEST_F(ClipGrad, AnOverflowThatClampingHidesIsSkippedAllTheSame) {
  set_gradient(weight_, {3 * kScale, kInfinity});
  clip_grad_value_(scaler_, optimizer_, 0.5);
  expect_gradient(0.5F, 0.5F);
  EXPECT_FALSE(scaler_.step(optimizer_).ran());
  scaler_.update();
  EXPECT_EQ(scaler_.get_scale(), kScale / 2);
}

TEST_F(ClipGrad, AnOverflowGivesANormThatIsNotFiniteAndIsSkipped) {
  set_gradient(weight_, {3 * kScale, kInfinity});
  EXPECT_EQ(clip_grad_norm_(scaler_, optimizer_, 1.0).item<float>(), kInfinity);
  EXPECT_FALSE(scaler_.step(optimizer_).ran());
  EXPECT_EQ(weight_[0].item<float>(), 10.0F);
}

TEST_F(ClipGrad, ThrowsForANonfiniteNormWhereAskedAndClipsNothing) {
  set_gradient(weight_, {3 * kScale, kInfinity});
  EXPECT_THAT(error_of([&] { clip_grad_norm_(scaler_, optimizer_, 1.0, 2.0, true); }),
              HasSubstr("The total norm of order 2 for gradients from `parameters` is non-finite"));
  expect_gradient(3, kInfinity);
}

TEST_F(ClipGrad, AfterStepIsAnError) {
  scaler_.step(optimizer_);
  EXPECT_THAT(error_of([&] { clip_grad_norm_(scaler_, optimizer_, 1.0); }),
              HasSubstr("unscale_() is being called after step()."));
  EXPECT_THAT(error_of([&] { clip_grad_value_(scaler_, optimizer_, 1.0); }),
              HasSubstr("unscale_() is being called after step()."));
}

TEST_F(ClipGrad, NamesABadArgumentAndTouchesNothing) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double bad : {-1.0, nan}) {
    EXPECT_THAT(error_of([&] { clip_grad_norm_(scaler_, optimizer_, bad); }),
                HasSubstr("max_norm is"));
  }
  for (const double bad : {0.0, -2.0, nan}) {
    EXPECT_THAT(error_of([&] { clip_grad_norm_(scaler_, optimizer_, 1.0, bad); }),
                HasSubstr("norm_type is"));
    EXPECT_THAT(error_of([&] { clip_grad_value_(scaler_, optimizer_, bad); }),
                HasSubstr("clip_value is"));
  }
  expect_gradient(3 * kScale, 4 * kScale);
}

TEST_F(ClipGrad, WithADisabledScalerJustClips) {
  mezzo::GradScaler off({.enabled = false});
  set_gradient(weight_, {3, 4});
  EXPECT_EQ(clip_grad_norm_(off, optimizer_, 2.5).item<float>(), 5.0F);
  EXPECT_EQ(clip_grad_norm_(off, optimizer_, 9).item<float>(), weight_.grad().norm().item<float>());
  clip_grad_value_(off, optimizer_, 1.75);
  expect_gradient(1.5F, 1.75F);
}

TEST_F(ClipGrad, StepsAsTheStepThatClipsByItself) {
  const auto other = parameter({10, 10});
  set_gradient(other, {3 * kScale, 4 * kScale});
  auto other_optimizer = sgd({other});
  clip_grad_norm_(scaler_, optimizer_, 1.0);
  scaler_.step(optimizer_);
  scaler_.step(other_optimizer, {.max_norm = 1.0});
  EXPECT_TRUE(torch::allclose(weight_, other, /*rtol=*/1e-7, /*atol=*/0));
}

TEST(ClipGradParameters, WithoutGradientsAreLeftOut) {
  const auto used = parameter({1, 1});
  const auto unused = parameter({1});
  auto optimizer = sgd({unused, used});
  auto scaler = quiet_scaler({.init_scale = 2});
  set_gradient(used, {6, 8});
  EXPECT_EQ(clip_grad_norm_(scaler, optimizer, 1.0).item<float>(), 5.0F);
  EXPECT_FALSE(unused.grad().defined());

  auto nothing = sgd({parameter({1})});
  EXPECT_EQ(clip_grad_norm_(scaler, nothing, 1.0).item<float>(), 0.0F);
  EXPECT_NO_THROW(clip_grad_value_(scaler, nothing, 1.0));
}

TEST(ClipGradParameters, InDoubleAreClippedInDouble) {
  const auto weight = torch::zeros({2}, torch::kDouble).requires_grad_();
  weight.mutable_grad() = torch::tensor({3.0, 4.0}, torch::kDouble) * 1024;
  auto optimizer = sgd({weight});
  auto scaler = quiet_scaler({.init_scale = 1024});
  EXPECT_EQ(clip_grad_norm_(scaler, optimizer, 1.0).scalar_type(), torch::kDouble);
  EXPECT_NEAR(weight.grad()[0].item<double>(), 3 / (5 + 1e-6), 1e-14);
}

TEST(ClipGradParameters, ThatShareAGradientClipItOnce) {
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16}) {
    const auto x = torch::zeros({4}, dtype).requires_grad_();
    const auto y = torch::zeros({4}, dtype).requires_grad_();
    x.mutable_grad() = torch::full({4}, 8.0, dtype);
    y.mutable_grad() = x.grad();
    auto optimizer = sgd({x, y});
    auto scaler = quiet_scaler({.init_scale = 1});
    const auto norm = clip_grad_norm_(scaler, optimizer, 1.0).item<double>();
    EXPECT_NEAR(x.grad()[0].item<double>(), 8 / norm, 1e-3) << dtype;
  }
}

TEST(ClipGradParameters, OfEveryGroupCountTogether) {
  auto optimizer = sgd({parameter({1})});
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({parameter({1})}));
  set_gradient(optimizer.param_groups()[0].params()[0], {6});
  set_gradient(optimizer.param_groups()[1].params()[0], {8});
  auto scaler = quiet_scaler({.init_scale = 2});
  EXPECT_EQ(clip_grad_norm_(scaler, optimizer, 1.0).item<float>(), 5.0F);
}

TEST(ClipGradParameters, WithSparseGradientsAreCoalescedFirst) {
  const auto table = torch::ones({4, 2}).requires_grad_();
  auto optimizer = sgd({table});
  auto scaler = quiet_scaler({.init_scale = 2});
  table.mutable_grad() =
      torch::sparse_coo_tensor(torch::tensor({{1, 3, 1}}),
                               torch::tensor({{3.0F, 0.0F}, {0.0F, 8.0F}, {3.0F, 0.0F}}), {4, 2});
  EXPECT_EQ(clip_grad_norm_(scaler, optimizer, 2.5).item<float>(), 5.0F);
  EXPECT_TRUE(table.grad().is_coalesced());
  EXPECT_FLOAT_EQ(table.grad().to_dense()[1][0].item<float>(), 1.5F);
  EXPECT_FLOAT_EQ(table.grad().to_dense()[3][1].item<float>(), 2.0F);
  clip_grad_value_(scaler, optimizer, 1.75);
  EXPECT_FLOAT_EQ(table.grad().to_dense()[3][1].item<float>(), 1.75F);
}

TEST(ClipGradParameters, InHalfMayHaveANormThatHalfCannotHold) {
  const auto weight = torch::ones({10000}, torch::kHalf).requires_grad_();
  auto optimizer = sgd({weight});
  auto scaler = quiet_scaler({.init_scale = 1, .allow_fp16_gradients = true});
  weight.mutable_grad() = torch::full({10000}, 1000.0, torch::kHalf);
  EXPECT_EQ(clip_grad_norm_(scaler, optimizer, 50.0).item<float>(), 100000.0F);
  EXPECT_EQ(weight.grad().scalar_type(), torch::kHalf);
  EXPECT_FLOAT_EQ(weight.grad()[0].item<float>(), 0.5F);
}

TEST(ClipGradMasters, AreWhatIsClippedWhereParametersKeepThem) {
  for (const bool enabled : {true, false}) {
    const auto weight = torch::ones({2}, torch::kHalf).requires_grad_();
    auto inner = sgd({weight});
    mezzo::MasterWeights optimizer(inner);
    auto scaler = quiet_scaler({.init_scale = 2, .enabled = enabled});
    weight.mutable_grad() = torch::tensor({6.0F, 8.0F}).to(torch::kHalf);
    const float norm = enabled ? 5.0F : 10.0F;
    EXPECT_EQ(clip_grad_norm_(scaler, optimizer, 0.5).item<float>(), norm);
    EXPECT_NEAR(clip_grad_norm_(scaler, optimizer, 0.25).item<float>(), 0.5, 1e-6);
    EXPECT_NEAR(weight.grad()[1].item<float>(), 0.2, 1e-6) << "the weight's own, in float";
    scaler.step(optimizer);
    scaler.update();
    EXPECT_NEAR(weight[0].item<float>(), 1 - 0.15, 1e-3);
    EXPECT_NEAR(mezzo::master_params(optimizer)[0][1].item<float>(), 1 - 0.2, 1e-6);
  }
}

/// torch's grid of norms, over gradients of several dtypes, layouts and sizes.
class ClipGradNorms : public testing::TestWithParam<double> {};

std::vector<torch::Tensor> mixed_parameters() {
  std::vector<torch::Tensor> all;
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kDouble, torch::kHalf}) {
    for (const int64_t size : {0, 1, 7, 1000}) {
      all.push_back(torch::zeros({size}, dtype));
      all.back().mutable_grad() = torch::randn({size}).to(dtype);
    }
    all.push_back(torch::zeros({5, 3}, dtype).t());
    all.back().mutable_grad() = torch::randn({5, 3}).to(dtype).t();
  }
  return all;
}

TEST_P(ClipGradNorms, OfMixedGradientsAreThoseOfOneVectorInDouble) {
  torch::manual_seed(3);
  const double order = GetParam();
  const auto parameters = mixed_parameters();
  std::vector<torch::Tensor> true_gradients, flat;
  for (const auto& parameter : parameters) {
    true_gradients.push_back(parameter.grad().to(torch::kDouble, false, /*copy=*/true));
    flat.push_back(true_gradients.back().flatten());
    parameter.mutable_grad().mul_(4.0);
  }
  const double expected = torch::linalg_vector_norm(torch::cat(flat), order).item<double>();
  auto optimizer = sgd(parameters);
  auto scaler = quiet_scaler({.init_scale = 4, .allow_fp16_gradients = true});

  const auto norm = clip_grad_norm_(scaler, optimizer, expected / 3, order);

  EXPECT_EQ(norm.scalar_type(), torch::kDouble);
  EXPECT_NEAR(norm.item<double>(), expected, 1e-9 * expected);
  const double coefficient = expected / 3 / (expected + 1e-6);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto dtype = parameters[i].scalar_type();
    const double tolerance = dtype == torch::kDouble ? 1e-12 : dtype == torch::kFloat ? 2e-7 : 4e-3;
    EXPECT_TRUE(torch::allclose(parameters[i].grad().to(torch::kDouble),
                                true_gradients[i] * coefficient, tolerance, /*atol=*/1e-7))
        << i << " of " << dtype;
  }
}

INSTANTIATE_TEST_SUITE_P(Orders, ClipGradNorms,
                         testing::Values(0.5, 1.0, 1.5, 2.0, 4.0,
                                         std::numeric_limits<double>::infinity()));

}  // namespace
