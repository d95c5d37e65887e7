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
  const auto masters = SGDOptions(1.0).weight_storage(WeightStorage::master);
  EXPECT_FALSE(SGD({half}, masters).plan().has_bare_half);
}

TEST(StepPlan, TakesGradientsOfFloatForWeightsOf16Bits) {
  for (const auto storage : {WeightStorage::plain, WeightStorage::master,
                             WeightStorage::split_master, WeightStorage::stochastic}) {
    const auto wide = with_gradient({1.5, -2}, torch::kBFloat16);
    const auto narrow = with_gradient({1.5, -2}, torch::kBFloat16);
    wide.mutable_grad() = wide.grad().to(torch::kFloat);
    AdamW left({wide}, AdamWOptions(0.1).weight_storage(storage));
    AdamW right({narrow}, AdamWOptions(0.1).weight_storage(storage));
    for (int i = 0; i < 3; ++i) {
      left.step();
      right.step();
    }
    EXPECT_TRUE(torch::equal(wide, narrow)) << static_cast<int>(storage);
  }
}

TEST(StepPlan, AddsUpGradientsInFloatWhereTheOptionsAskForIt) {
  for (const bool in_float : {false, true}) {
    const auto weight = torch::zeros({2}, torch::kBFloat16).requires_grad_();
    SGD optimizer({weight}, SGDOptions(1.0).accumulate_in_float(in_float));
    for (int i = 0; i < 1000; ++i) weight.sum().backward();
    EXPECT_EQ(weight.grad().scalar_type(), in_float ? torch::kFloat : torch::kBFloat16);
    optimizer.step();
    EXPECT_EQ(weight[0].item<float>(), in_float ? -1000.0F : -256.0F);
  }
}

/// The gradient of 1,000 micro-batches of 1.
double accumulated(const torch::Tensor& weight) {
  weight.mutable_grad() = torch::Tensor();
  for (int i = 0; i < 1000; ++i) weight.sum().backward();
  return weight.grad()[0].item<double>();
}

/// Relative distance of `gradient` from `exact`.
double distance(const torch::Tensor& gradient, const torch::Tensor& exact) {
  return ((gradient.to(torch::kDouble) - exact).norm() / exact.norm()).item<double>();
}

// What a product with float output (cuBLAS has one) would save: the backward pass computes in 16
// bits all the same.
TEST(StepPlan, LosesLittleToTheRoundingOfEachMicroBatchsGradient) {
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
  const SGD optimizer(weights, SGDOptions(1.0).accumulate_in_float(true));
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

TEST(StepPlan, AddsUpInFloatWhatWasAddedUpIn16BitsBefore) {
  const auto weight = torch::zeros({2}, torch::kBFloat16).requires_grad_();
  weight.sum().backward();
  SGD optimizer({weight}, SGDOptions(1.0).accumulate_in_float(true));
  for (int i = 0; i < 999; ++i) weight.sum().backward();
  EXPECT_TRUE(torch::equal(weight.grad(), torch::full({2}, 1000.0)));
}

TEST(StepPlan, LeavesTheGradientsOfADoubleModelDouble) {
  torch::nn::Linear layer(2, 2);
  SGD optimizer(layer->parameters(), SGDOptions(1.0).accumulate_in_float(true));
  layer->to(torch::kDouble);
  (layer->bias * 1e300).sum().backward();
  EXPECT_EQ(layer->bias.grad()[0].item<double>(), 1e300);
}

TEST(StepPlan, PassesOverAParameterWithoutGradientWhoseMasterIsOfAnotherShape) {
  const auto p = torch::ones({4}, torch::kBFloat16).requires_grad_();
  const auto q = torch::ones({4}, torch::kBFloat16).requires_grad_();
  SGD optimizer({p, q}, SGDOptions(1.0).weight_storage(WeightStorage::master));
  (p.sum() + q.sum()).backward();
  optimizer.step();
  optimizer.zero_grad();
  p.set_data(torch::ones({6}, torch::kBFloat16));
  q.sum().backward();
  optimizer.step();
  EXPECT_EQ(q[0].item<float>(), -1.0F);
}

TEST(StepPlan, ForgetsAShownGradientWithTheMasterThatShowedIt) {
  const auto p = torch::ones({4}, torch::kBFloat16).requires_grad_();
  SGD optimizer({p}, SGDOptions(0.25).weight_storage(WeightStorage::master));
  p.sum().backward();
  for (const bool replaced : {false, true}) {
    (void)optimizer.master_param(0, p);
    auto& state =
        static_cast<mezzo::optim::SGDParamState&>(*optimizer.state().at(p.unsafeGetTensorImpl()));
    state.master(replaced ? state.master().clone() : torch::Tensor());
    optimizer.step();
  }
  EXPECT_EQ(p[0].item<float>(), 0.5F);
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

TEST(StepPlan, AddsUpGradientsInFloatFromTheGroupTheFileOrTheStepOnThatAskForIt) {
  const auto weight = [] { return torch::zeros({2}, torch::kBFloat16).requires_grad_(); };
  const auto first = weight(), added = weight();
  SGD optimizer({first}, SGDOptions(1.0));
  torch::optim::OptimizerParamGroup group({added});
  group.set_options(std::make_unique<SGDOptions>(SGDOptions(1.0).accumulate_in_float(true)));
  optimizer.add_param_group(group);
  EXPECT_EQ(accumulated(added), 1000);
  EXPECT_EQ(accumulated(first), 256);
  static_cast<SGDOptions&>(optimizer.param_groups()[0].options()).accumulate_in_float(true);
  optimizer.step();
  EXPECT_EQ(accumulated(first), 1000);

  SGD saved({weight()}, SGDOptions(1.0).accumulate_in_float(true));
  std::stringstream file;
  torch::save(saved, file);
  const auto other = weight();
  SGD loaded({other}, SGDOptions(1.0));
  torch::load(loaded, file);
  EXPECT_EQ(accumulated(other), 1000);
}

}  // namespace
