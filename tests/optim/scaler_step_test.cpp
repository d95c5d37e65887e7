// GradScaler::step with mezzo's optimizers and with options.

#include <mezzo/optim/adamw.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "../support/state_of.h"
#include "../support/tiny_optimizer.h"

namespace {

using mezzo::GradScaler;
using mezzo::optim::AdamW;
using mezzo::optim::AdamWOptions;
using test_support::quiet_scaler;
using test_support::state_of;
using testing::HasSubstr;
using testing::ThrowsMessage;

class OneFusedStep : public testing::Test {
 protected:
  void set_gradient(std::vector<float> values) { x_.mutable_grad() = torch::tensor(values) * 1024; }

  torch::Tensor x_ = torch::zeros({2}).requires_grad_();
  AdamW optimizer_{{x_}, AdamWOptions(0.1).weight_decay(0.01)};
  GradScaler scaler_ = quiet_scaler();
};

TEST_F(OneFusedStep, TellsWhatBecameOfIt) {
  set_gradient({3, 4});
  const auto result = scaler_.step(optimizer_, {.max_norm = 1.0});
  EXPECT_TRUE(result.ready());
  EXPECT_TRUE(result.ran());
  EXPECT_FALSE(result.found_inf());
  EXPECT_EQ(result.scale(), 1024.0F);
  EXPECT_DOUBLE_EQ(result.grad_norm().value(), 5.0);
  EXPECT_EQ(result.grad_max_abs(), 4.0);
  EXPECT_FALSE(result.was_unscaled());
  ASSERT_TRUE(result.value().has_value()) << "as from any optimizer's step without closure";
  EXPECT_FALSE(result.value()->defined());
  scaler_.update();
  set_gradient({3, kInfinity});
  EXPECT_FALSE(scaler_.step(optimizer_, {.max_norm = 1.0}).value().has_value());
}

TEST_F(OneFusedStep, LeavesEverythingAsItIsWhenItIsSkipped) {
  set_gradient({3, 4});
  scaler_.step(optimizer_);
  scaler_.update();
  const auto& state = state_of<const mezzo::optim::AdamWParamState>(optimizer_, x_);
  const std::vector<torch::Tensor> before{x_.detach().clone(), state.exp_avg().clone(),
                                          state.exp_avg_sq().clone()};
  const auto version = x_._version();
  x_.mutable_grad() = torch::tensor({1.0F, kInfinity});
  const auto result = scaler_.step(optimizer_);
  scaler_.update();
  EXPECT_FALSE(result.ran());
  EXPECT_TRUE(result.found_inf());
  EXPECT_TRUE(torch::equal(x_, before[0]));
  EXPECT_TRUE(torch::equal(state.exp_avg(), before[1]));
  EXPECT_TRUE(torch::equal(state.exp_avg_sq(), before[2]));
  EXPECT_EQ(state.step(), 1);
  EXPECT_EQ(x_._version(), version);
  EXPECT_TRUE(torch::equal(x_.grad(), torch::tensor({1.0F, kInfinity})));
  EXPECT_EQ(scaler_.get_scale(), 512.0);
}

TEST_F(OneFusedStep, ASkippedFirstStepLeavesNoStateBehind) {
  set_gradient({kInfinity, 0});
  scaler_.step(optimizer_);
  EXPECT_TRUE(optimizer_.state().empty());
}

// A thread that cleared one before another thread read it would lose half of the step.
TEST_F(OneFusedStep, ClearsAGradientOfSeveralParametersAfterAllHaveReadIt) {
  const std::vector<torch::Tensor> all{torch::ones({40000}).requires_grad_(),
                                       torch::ones({40000}).requires_grad_()};
  const auto gradient = torch::full({40000}, 1024.0F);
  for (const auto& one : all) one.mutable_grad() = gradient;
  AdamW optimizer(all, AdamWOptions(0.1));
  EXPECT_TRUE(scaler_.step(optimizer, {.zero_grad = true}).ran());
  EXPECT_TRUE(torch::equal(all[0], all[1]));
  EXPECT_NEAR(all[1][39999].item<double>(), 0.899, 1e-6);
  EXPECT_EQ(gradient.abs().max().item<float>(), 0.0F);
}

TEST_F(OneFusedStep, ClearsGradientsWhoseElementsShareMemory) {
  const auto y = torch::ones({5}).requires_grad_();
  y.mutable_grad() = torch::full({1}, 1024.0F).expand({5});
  AdamW optimizer({y}, AdamWOptions(0.1));
  EXPECT_TRUE(scaler_.step(optimizer, {.zero_grad = true}).ran());
  EXPECT_TRUE(torch::allclose(y, torch::full({5}, 0.899F)));
  EXPECT_TRUE(torch::equal(y.grad(), torch::zeros({5})));
}

TEST_F(OneFusedStep, RefusesNormsThatAreNotPositive) {
  set_gradient({3, 4});
  for (const double bad : {0.0, -1.0, std::nan("")}) {
    EXPECT_THAT([&] { scaler_.step(optimizer_, {.max_norm = bad}); },
                ThrowsMessage<c10::Error>(HasSubstr("max_norm is")));
  }
  EXPECT_TRUE(scaler_.step(optimizer_, {.max_norm = 1.0}).ran());
}

TEST_F(OneFusedStep, ADisabledScalerStepsWhateverTheGradientsAre) {
  GradScaler disabled({.enabled = false});
  x_.mutable_grad() = torch::tensor({3.0F, kInfinity});
  const auto result = disabled.step(optimizer_, {.max_norm = 1.0});
  EXPECT_TRUE(result.ran());
  EXPECT_FALSE(result.found_inf());
  EXPECT_FALSE(std::isfinite(result.grad_norm().value()));
  EXPECT_TRUE(x_.isnan().any().item<bool>());  // inf / inf, as after clip_grad_norm_
}

TEST_F(OneFusedStep, ADisabledScalerHasNothingToClipWithoutGradients) {
  GradScaler disabled({.enabled = false});
  const auto result = disabled.step(optimizer_, {.max_norm = 1.0});
  EXPECT_TRUE(result.ran());
  EXPECT_EQ(result.grad_norm(), std::nullopt);
  EXPECT_EQ(result.grad_max_abs(), std::nullopt);
  EXPECT_TRUE(torch::equal(x_, torch::zeros({2})));
}

/// A gradient of double that is scaled by 4, for an optimizer whose step subtracts gradients.
torch::Tensor double_parameter() {
  const auto x = torch::zeros({3}, torch::kDouble).requires_grad_();
  x.mutable_grad() = torch::tensor({3.0, 4.0, 12.0}, torch::kDouble) * 4;
  return x;
}

TEST(ScalerStepWithOptions, ClipsDoublesInDoubleWhoeverSteps) {
  const auto ours = double_parameter(), theirs = double_parameter();
  mezzo::optim::SGD fused({ours}, mezzo::optim::SGDOptions(1.0));
  torch::optim::SGD plain({theirs}, torch::optim::SGDOptions(1.0));
  GradScaler scaler = quiet_scaler({.init_scale = 4});
  scaler.step(fused, {.max_norm = 1.0});
  scaler.step(plain, {.max_norm = 1.0});
  const double coefficient = 1.0 / (13.0 + 1e-6);
  EXPECT_NEAR(ours[2].item<double>(), -12.0 * coefficient, 1e-15);
  EXPECT_NEAR(theirs[2].item<double>(), -12.0 * coefficient, 1e-15);
}

}  // namespace
