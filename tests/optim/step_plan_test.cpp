// The three calls that a step is made of, without a GradScaler: plan, read and apply.

#include <mezzo/optim/adamw.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <sstream>
#include <utility>
#include <vector>

namespace {

using mezzo::optim::AdamW;
using mezzo::optim::AdamWOptions;
using mezzo::optim::SGD;
using mezzo::optim::SGDOptions;
using mezzo::optim::WeightStorage;

torch::Tensor with_gradient(std::vector<float> gradient, at::ScalarType dtype = torch::kFloat) {
  const auto size = static_cast<int64_t>(gradient.size());
  const auto parameter = torch::ones({size}, dtype).requires_grad_();
  parameter.mutable_grad() = torch::tensor(gradient).to(dtype);
  return parameter;
}

const torch::Tensor& inverse() {
  static const torch::Tensor number = torch::full({}, 0.25F);
  return number;
}

TEST(StepPlan, HasARowForEachGradient) {
  const auto x = with_gradient({12, 0}), y = with_gradient({-16}), unused = torch::ones({3});
  SGD optimizer({x, unused, y}, SGDOptions(1.0));
  const auto plan = optimizer.plan();
  ASSERT_EQ(plan.rows.size(), 2U);
  EXPECT_TRUE(plan.rows[1].gradient.is_same(y.grad()));
  EXPECT_EQ(plan.rows[1].number, 2U) << "among all parameters";
  EXPECT_FALSE(plan.has_bare_half);
  EXPECT_TRUE(SGD({unused}, SGDOptions(1.0)).plan().rows.empty());
}

TEST(StepPlan, IsReadOnceForAVerdict) {
  const auto x = with_gradient({12, 0}), y = with_gradient({-16});
  SGD optimizer({x, y}, SGDOptions(1.0));
  const auto verdict = optimizer.read(optimizer.plan(), inverse());
  EXPECT_EQ(verdict.inv_scale.item<float>(), 0.25F);
  EXPECT_EQ(verdict.found_inf.item<float>(), 0.0F);
  EXPECT_EQ(verdict.sum_of_squares.item<double>(), 25.0);
  EXPECT_EQ(verdict.max_abs.item<double>(), 4.0);
  x.mutable_grad()[1] = std::numeric_limits<float>::infinity();
  EXPECT_EQ(optimizer.read(optimizer.plan(), inverse()).found_inf.item<float>(), 1.0F);
}

TEST(StepPlan, IsAppliedAsGradScalerAppliesIt) {
  const auto ours = with_gradient({3, -7, 11}), theirs = with_gradient({3, -7, 11});
  AdamW left({ours}, AdamWOptions(0.1)), right({theirs}, AdamWOptions(0.1));
  mezzo::GradScaler scaler({.init_scale = 4});
  (void)scaler.scale(torch::zeros({}));
  for (int i = 0; i < 3; ++i) {
    auto plan = left.plan();
    const auto verdict = left.read(plan, inverse());
    left.apply(std::move(plan), verdict, {.max_norm = 1.0});
    scaler.step(right, {.max_norm = 1.0});
    scaler.update();
    EXPECT_TRUE(torch::equal(ours, theirs)) << i;
  }
  EXPECT_EQ(left.applied_steps(), 3);
}

TEST(StepPlan, WritesNothingWhereItIsRefused) {
  const auto x = with_gradient({4}), y = with_gradient({8});
  AdamW optimizer({x, y}, AdamWOptions(1.0));
  y.mutable_grad() = torch::ones({2});
  EXPECT_THROW((void)optimizer.plan(), c10::Error);
  EXPECT_EQ(x.item<float>(), 1.0F);
  EXPECT_TRUE(optimizer.state().empty());
  EXPECT_EQ(optimizer.applied_steps(), 0);
}

TEST(StepPlan, TellsOfHalfThatNoMasterWidens) {
  const auto half = with_gradient({1}, torch::kHalf);
  EXPECT_TRUE(SGD({half}, SGDOptions(1.0)).plan().has_bare_half);
  SGD with_master({half}, SGDOptions(1.0), {.weight_storage = WeightStorage::master});
  EXPECT_FALSE(with_master.plan().has_bare_half);
}

TEST(StepPlan, TakesGradientsOfFloatForWeightsOf16Bits) {
  for (const auto storage : {WeightStorage::plain, WeightStorage::master,
                             WeightStorage::split_master, WeightStorage::stochastic}) {
    const auto wide = with_gradient({1.5, -2}, torch::kBFloat16);
    const auto narrow = with_gradient({1.5, -2}, torch::kBFloat16);
    wide.mutable_grad() = wide.grad().to(torch::kFloat);
    AdamW left({wide}, AdamWOptions(0.1), {.weight_storage = storage});
    AdamW right({narrow}, AdamWOptions(0.1), {.weight_storage = storage});
    for (int i = 0; i < 3; ++i) {
      left.step();
      right.step();
    }
    EXPECT_TRUE(torch::equal(wide, narrow)) << static_cast<int>(storage);
  }
}

TEST(StepPlan, PassesOverAParameterWithoutGradientWhoseMasterIsOfAnotherShape) {
  const auto p = torch::ones({4}, torch::kBFloat16).requires_grad_();
  const auto q = torch::ones({4}, torch::kBFloat16).requires_grad_();
  SGD optimizer({p, q}, SGDOptions(1.0), {.weight_storage = WeightStorage::master});
  (p.sum() + q.sum()).backward();
  optimizer.step();
  optimizer.zero_grad();
  p.set_data(torch::ones({6}, torch::kBFloat16));
  q.sum().backward();
  optimizer.step();
  EXPECT_EQ(q[0].item<float>(), -1.0F);
}

TEST(StepPlan, ChecksTheRowsOfAllDevicesBeforeItStepsOnAny) {
  const auto on_cpu = torch::ones({2}).requires_grad_();
  const auto elsewhere = torch::ones({2}, torch::kMeta).requires_grad_();
  SGD optimizer({on_cpu, elsewhere}, SGDOptions(0.1).momentum(0.9).dampening(0.5));
  on_cpu.mutable_grad() = torch::ones({2});
  elsewhere.mutable_grad() = torch::ones({2}, torch::kMeta);
  EXPECT_THROW(optimizer.step(), c10::Error);
  EXPECT_EQ(on_cpu[0].item<float>(), 1.0F);
}

}  // namespace
