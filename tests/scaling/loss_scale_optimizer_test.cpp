#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/loss_scale_optimizer.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "../support/save_to_string.h"
#include "../support/special_values.h"
#include "../support/throwing_sgd.h"

namespace {

using mezzo::LossScaleOptimizer;
using testing::HasSubstr;
using testing::ThrowsMessage;

torch::Tensor make_weight() { return torch::ones({3}, torch::requires_grad()); }

/// Factories of an inner optimizer of libtorch and one of mezzo, for one weight.
std::vector<std::function<std::unique_ptr<torch::optim::Optimizer>(const torch::Tensor&)>>
make_inner_optimizers() {
  return {[](const torch::Tensor& weight) {
            return std::make_unique<torch::optim::SGD>(std::vector{weight},
                                                       torch::optim::SGDOptions(1).momentum(0.5));
          },
          [](const torch::Tensor& weight) {
            return std::make_unique<mezzo::optim::SGD>(std::vector{weight},
                                                       mezzo::optim::SGDOptions(1).momentum(0.5));
          }};
}

bool step_with(LossScaleOptimizer& optimizer, const torch::Tensor& weight, double factor) {
  optimizer.zero_grad();
  optimizer.scale_loss((weight * factor).sum()).backward();
  return optimizer.step().applied();
}

TEST(LossScaleOptimizer, DefaultsMatchKeras) {
  const torch::Tensor weight = make_weight();
  torch::optim::SGD sgd({weight}, 1.0);
  LossScaleOptimizer optimizer(sgd);
  EXPECT_EQ(optimizer.loss_scale(), 32768);
  EXPECT_EQ(optimizer.initial_scale(), 32768);
  EXPECT_EQ(optimizer.dynamic_growth_steps(), 2000);
  EXPECT_EQ(optimizer.scaler().get_growth_factor(), 2);
  EXPECT_EQ(optimizer.scaler().get_backoff_factor(), 0.5);
  EXPECT_EQ(&optimizer.inner_optimizer(), &sgd);
}

TEST(LossScaleOptimizer, ReportsOptionsAfterLoad) {
  const torch::Tensor weight = make_weight();
  torch::optim::SGD sgd({weight}, 1.0), of_other({weight}, 1.0);
  LossScaleOptimizer optimizer(sgd, {.init_scale = 64});
  optimizer.scaler().set_growth_interval(7);
  EXPECT_EQ(optimizer.dynamic_growth_steps(), 7);
  const std::string file = test_support::save_to_string(optimizer);
  LossScaleOptimizer resumed(of_other);
  test_support::load_from_string(resumed, file);
  EXPECT_EQ(resumed.dynamic_growth_steps(), 7);
  EXPECT_TRUE(resumed.dynamic());
  LossScaleOptimizer fixed(sgd, mezzo::GradScalerOptions::fixed(8));
  EXPECT_FALSE(fixed.dynamic());
  test_support::load_from_string(resumed, test_support::save_to_string(fixed));
  EXPECT_FALSE(resumed.dynamic());
}

TEST(LossScaleOptimizer, FailedLoadKeepsInnerOptimizer) {
  const torch::Tensor weight = make_weight();
  torch::optim::SGD sgd({weight}, 1.0), of_other({weight}, 0.5);
  torch::serialize::OutputArchive inner, scaler, whole;
  sgd.save(inner);
  for (const auto& [key, value] : mezzo::GradScaler().state_dict()) {
    scaler.write(key, c10::IValue(key == "scale" ? -1.0 : value));
  }
  whole.write("inner_optimizer", inner);
  whole.write("scaler", scaler);
  whole.write("iterations", c10::IValue(int64_t{1}));
  std::stringstream file;
  whole.save_to(file);
  LossScaleOptimizer optimizer(of_other);
  EXPECT_THROW(torch::load(optimizer, file), c10::Error);
  EXPECT_EQ(of_other.param_groups()[0].options().get_lr(), 0.5);
}

// A bare number could be the initial scale or a constant one.
static_assert(!std::is_constructible_v<LossScaleOptimizer, mezzo::OptimizerRef, double>);

TEST(LossScaleOptimizer, StepUnscalesUpdatesScaleAndCounts) {
  for (const auto& make : make_inner_optimizers()) {
    const torch::Tensor weight = make_weight();
    const auto inner = make(weight);
    LossScaleOptimizer optimizer(*inner, {.init_scale = 64, .growth_interval = 2});
    optimizer.scaler().on_skip(nullptr);
    EXPECT_TRUE(step_with(optimizer, weight, 0.25));
    EXPECT_EQ(weight[0].item<float>(), 0.75F);
    EXPECT_FALSE(step_with(optimizer, weight, kInfinity));
    EXPECT_EQ(optimizer.loss_scale(), 32);
    EXPECT_EQ(weight[0].item<float>(), 0.75F);
    EXPECT_EQ(optimizer.iterations(), 1);
    EXPECT_TRUE(step_with(optimizer, weight, 0.25));
    EXPECT_TRUE(step_with(optimizer, weight, 0.25));
    EXPECT_EQ(optimizer.loss_scale(), 64);
    EXPECT_EQ(optimizer.iterations(), 3);
  }
}

TEST(LossScaleOptimizer, ClipsAfterUnscaleOrInStep) {
  for (const bool explicitly : {false, true}) {
    const torch::Tensor weight = torch::ones({4}, torch::requires_grad());
    torch::optim::SGD sgd({weight}, 1.0);
    LossScaleOptimizer optimizer(sgd);
    optimizer.scale_loss((weight * 0.5).sum()).backward();
    if (explicitly) {
      optimizer.unscale_();
      EXPECT_EQ(torch::nn::utils::clip_grad_norm_({weight}, 0.5), 1.0);
      optimizer.step();
    } else {
      EXPECT_EQ(optimizer.step({.max_norm = 0.5}).grad_norm(), 1.0);
    }
    EXPECT_NEAR(weight[0].item<double>(), 0.75, 1e-5);
  }
}

TEST(LossScaleOptimizer, FixedScaleTrainsFloat16WithMasters) {
  const torch::Tensor weight = torch::ones({3}, torch::kHalf).requires_grad_();
  torch::optim::SGD sgd({weight}, 1.0);
  mezzo::MasterWeights masters(sgd);
  LossScaleOptimizer optimizer(masters, mezzo::GradScalerOptions::fixed(1024));
  optimizer.scaler().on_skip(nullptr);
  EXPECT_TRUE(step_with(optimizer, weight, 0.25));
  EXPECT_FALSE(step_with(optimizer, weight, kInfinity));
  EXPECT_EQ(optimizer.loss_scale(), 1024);
  EXPECT_EQ(optimizer.iterations(), 1);
  EXPECT_EQ(weight[0].item<float>(), 0.75F);
}

TEST(LossScaleOptimizer, ResumesFromArchive) {
  for (const auto& make : make_inner_optimizers()) {
    const torch::Tensor weight = make_weight();
    const auto inner = make(weight);
    LossScaleOptimizer optimizer(*inner);
    optimizer.scaler().on_skip(nullptr);
    step_with(optimizer, weight, kInfinity);
    step_with(optimizer, weight, 0.25);
    const std::string file = test_support::save_to_string(optimizer);
    const torch::Tensor other = weight.detach().clone().requires_grad_();
    const auto of_other = make(other);
    LossScaleOptimizer resumed(*of_other);
    test_support::load_from_string(resumed, file);
    EXPECT_EQ(resumed.iterations(), 1);
    EXPECT_EQ(resumed.loss_scale(), 16384);
    step_with(optimizer, weight, 0.125);
    step_with(resumed, other, 0.125);
    EXPECT_TRUE(weight.equal(other));  // the archive has the momentum

    const std::string foreign = test_support::save_to_string(*inner);
    EXPECT_THAT([&] { test_support::load_from_string(resumed, foreign); },
                ThrowsMessage<c10::Error>(HasSubstr("the archive is not a LossScaleOptimizer's")));
  }
}

/// An archive of torch::optim::SGD has no step count.
TEST(LossScaleOptimizer, LoadSetsIterationsOfInnerOptimizer) {
  const torch::Tensor weight = make_weight(), other = make_weight();
  torch::optim::SGD sgd({weight}, torch::optim::SGDOptions(1).momentum(0.5));
  mezzo::optim::SGD of_mezzo({other}, mezzo::optim::SGDOptions(1).momentum(0.5));
  LossScaleOptimizer optimizer(sgd);
  LossScaleOptimizer resumed(of_mezzo);
  for (int i = 0; i < 3; ++i) step_with(optimizer, weight, 0.25);
  test_support::load_from_string(resumed, test_support::save_to_string(optimizer));
  EXPECT_EQ(resumed.iterations(), 3);
  EXPECT_EQ(of_mezzo.applied_steps(), 3);
}

TEST(LossScaleOptimizer, DisabledStepsWithoutScaleAndResumes) {
  for (const auto& make : make_inner_optimizers()) {
    const torch::Tensor weight = make_weight();
    const auto inner = make(weight);
    LossScaleOptimizer optimizer(*inner, {.enabled = false});
    EXPECT_TRUE(step_with(optimizer, weight, 0.25));
    EXPECT_EQ(weight[0].item<float>(), 0.75F);
    EXPECT_EQ(optimizer.loss_scale(), 1);
    const std::string file = test_support::save_to_string(optimizer);
    const torch::Tensor other = weight.detach().clone().requires_grad_();
    const auto of_other = make(other);
    LossScaleOptimizer resumed(*of_other, {.enabled = false});
    test_support::load_from_string(resumed, file);
    EXPECT_EQ(resumed.iterations(), 1);
  }
}

TEST(LossScaleOptimizer, UnscalesNextBatchAfterStepThrew) {
  for (const double max_norm : {double{kInfinity}, 100.0}) {
    for (const bool again : {false, true}) {
      const torch::Tensor weight = make_weight();
      test_support::ThrowingSgd sgd({weight}, 1.0);
      LossScaleOptimizer optimizer(sgd);
      optimizer.scale_loss((weight * 0.25).sum()).backward();
      sgd.throws = true;
      EXPECT_THROW(optimizer.step({.max_norm = max_norm}), std::runtime_error);
      sgd.throws = false;
      if (!again) {
        optimizer.zero_grad();
        optimizer.scale_loss((weight * 0.25).sum()).backward();
      }
      EXPECT_TRUE(optimizer.step({.max_norm = max_norm}).applied());
      EXPECT_EQ(weight[0].item<float>(), 0.75F) << max_norm << again;
      EXPECT_EQ(optimizer.iterations(), 1);
    }
  }
}

TEST(LossScaleOptimizer, ThrowsForMissingLossOrInvalidOptions) {
  const torch::Tensor weight = make_weight();
  torch::optim::SGD sgd({weight}, 1.0);
  LossScaleOptimizer optimizer(sgd);
  EXPECT_THAT([&] { optimizer.step(); }, ThrowsMessage<c10::Error>(HasSubstr("_scale is None")));
  EXPECT_THROW(LossScaleOptimizer(sgd, {.init_scale = -1}), c10::Error);
  EXPECT_THROW(LossScaleOptimizer(sgd, {.growth_interval = 0}), c10::Error);
}

}  // namespace
