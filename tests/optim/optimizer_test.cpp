// plan, grad_stats and apply; GradScaler::step with options; ATen's kernels; float32 accumulation.
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/optimizer_ref.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../support/aten_optimizer.h"
#include "../support/get_param_state.h"
#include "../support/tiny_optimizer.h"

namespace {

using mezzo::accumulate_in_float;
using mezzo::GradScaler;
using mezzo::GradStats;
using mezzo::StepOptions;
using mezzo::optim::AdamW;
using mezzo::optim::AdamWOptions;
using mezzo::optim::SGD;
using mezzo::optim::SGDOptions;
using mezzo::optim::WeightStorage;
using test_support::AtenOptimizer;
using test_support::get_param_state;
using test_support::make_silent_scaler;
using testing::HasSubstr;
using testing::ThrowsMessage;

torch::Tensor make_parameter(std::vector<float> gradient, at::ScalarType dtype = torch::kFloat) {
  const auto size = static_cast<int64_t>(gradient.size());
  const auto parameter = torch::ones({size}, dtype).requires_grad_();
  parameter.mutable_grad() = torch::tensor(gradient).to(dtype);
  return parameter;
}

const torch::Tensor& make_inv_scale() {
  static const torch::Tensor make_scalar = torch::full({}, 0.25F);
  return make_scalar;
}

TEST(StepPlan, HasParamForEachGradient) {
  const auto x = make_parameter({12, 0}), y = make_parameter({-16}), unused = torch::ones({3});
  SGD optimizer({x, unused, y}, SGDOptions(1.0));
  const auto plan = optimizer.plan();
  ASSERT_EQ(plan.params.size(), 2U);
  EXPECT_TRUE(plan.params[1].gradient.is_same(y.grad()));
  EXPECT_EQ(plan.params[1].param_index, 2U) << "among all parameters";
  EXPECT_FALSE(plan.has_fp16_without_master);
  EXPECT_TRUE(SGD({unused}, SGDOptions(1.0)).plan().params.empty());
}

TEST(StepPlan, GradStatsReadGradientsOnce) {
  const auto x = make_parameter({12, 0}), y = make_parameter({-16});
  SGD optimizer({x, y}, SGDOptions(1.0));
  const auto stats = optimizer.grad_stats(optimizer.plan(), make_inv_scale());
  EXPECT_EQ(stats.inv_scale.item<float>(), 0.25F);
  EXPECT_EQ(stats.found_inf.item<float>(), 0.0F);
  EXPECT_EQ(stats.norm_sq.item<double>(), 25.0);
  EXPECT_EQ(stats.max_abs.item<double>(), 4.0);
  x.mutable_grad()[1] = std::numeric_limits<float>::infinity();
  EXPECT_EQ(optimizer.grad_stats(optimizer.plan(), make_inv_scale()).found_inf.item<float>(), 1.0F);
}

TEST(StepPlan, ApplyMatchesGradScalerStep) {
  const auto ours = make_parameter({3, -7, 11}), theirs = make_parameter({3, -7, 11});
  AdamW left({ours}, AdamWOptions(0.1)), right({theirs}, AdamWOptions(0.1));
  mezzo::GradScaler scaler({.init_scale = 4});
  (void)scaler.scale(torch::zeros({}));
  for (int i = 0; i < 3; ++i) {
    auto plan = left.plan();
    const auto stats = left.grad_stats(plan, make_inv_scale());
    left.apply(std::move(plan), stats, {.max_norm = 1.0});
    scaler.step(right, {.max_norm = 1.0});
    scaler.update();
    EXPECT_TRUE(torch::equal(ours, theirs)) << i;
  }
  EXPECT_EQ(left.applied_steps(), 3);
}

TEST(StepPlan, ThrowingPlanWritesNothing) {
  const auto x = make_parameter({4}), y = make_parameter({8});
  AdamW optimizer({x, y}, AdamWOptions(1.0));
  y.mutable_grad() = torch::ones({2});
  EXPECT_THROW((void)optimizer.plan(), c10::Error);
  EXPECT_EQ(x.item<float>(), 1.0F);
  EXPECT_TRUE(optimizer.state().empty());
  EXPECT_EQ(optimizer.applied_steps(), 0);
}

TEST(StepPlan, ReportsFloat16WithoutMaster) {
  const auto half = make_parameter({1}, torch::kHalf);
  EXPECT_TRUE(SGD({half}, SGDOptions(1.0)).plan().has_fp16_without_master);
  SGD with_master({half}, SGDOptions(1.0), {.weight_storage = WeightStorage::fp32_master});
  EXPECT_FALSE(with_master.plan().has_fp16_without_master);
}

TEST(StepPlan, AcceptsFloat32GradientsOf16BitWeights) {
  for (const auto storage : {WeightStorage::plain, WeightStorage::fp32_master,
                             WeightStorage::split_master, WeightStorage::stochastic_rounding}) {
    const auto wide = make_parameter({1.5, -2}, torch::kBFloat16);
    const auto narrow = make_parameter({1.5, -2}, torch::kBFloat16);
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

TEST(StepPlan, IgnoresMismatchedMasterWithoutGradient) {
  const auto p = torch::ones({4}, torch::kBFloat16).requires_grad_();
  const auto q = torch::ones({4}, torch::kBFloat16).requires_grad_();
  SGD optimizer({p, q}, SGDOptions(1.0), {.weight_storage = WeightStorage::fp32_master});
  (p.sum() + q.sum()).backward();
  optimizer.step();
  optimizer.zero_grad();
  p.set_data(torch::ones({6}, torch::kBFloat16));
  q.sum().backward();
  optimizer.step();
  EXPECT_EQ(q[0].item<float>(), -1.0F);
}

TEST(StepPlan, ChecksAllDevicesBeforeStepping) {
  const auto on_cpu = torch::ones({2}).requires_grad_();
  const auto elsewhere = torch::ones({2}, torch::kMeta).requires_grad_();
  SGD optimizer({on_cpu, elsewhere}, SGDOptions(0.1).momentum(0.9).dampening(0.5));
  on_cpu.mutable_grad() = torch::ones({2});
  elsewhere.mutable_grad() = torch::ones({2}, torch::kMeta);
  EXPECT_THROW(optimizer.step(), c10::Error);
  EXPECT_EQ(on_cpu[0].item<float>(), 1.0F);
}

// --- GradScaler::step with mezzo's optimizers and with options.

class FusedStep : public testing::Test {
 protected:
  void set_grad(std::vector<float> values) { x_.mutable_grad() = torch::tensor(values) * 1024; }

  torch::Tensor x_ = torch::zeros({2}).requires_grad_();
  AdamW optimizer_{{x_}, AdamWOptions(0.1).weight_decay(0.01)};
  GradScaler scaler_ = make_silent_scaler();
};

TEST_F(FusedStep, ReportsResult) {
  set_grad({3, 4});
  const auto result = scaler_.step(optimizer_, {.max_norm = 1.0});
  EXPECT_TRUE(result.ready());
  EXPECT_TRUE(result.applied());
  EXPECT_FALSE(result.found_inf());
  EXPECT_EQ(result.scale(), 1024.0F);
  EXPECT_DOUBLE_EQ(result.grad_norm().value(), 5.0);
  EXPECT_EQ(result.grad_max_abs(), 4.0);
  EXPECT_FALSE(result.was_unscaled());
  ASSERT_TRUE(result.step_return().has_value()) << "as from any optimizer's step without closure";
  EXPECT_FALSE(result.step_return()->defined());
  scaler_.update();
  set_grad({3, kInfinity});
  EXPECT_FALSE(scaler_.step(optimizer_, {.max_norm = 1.0}).step_return().has_value());
}

TEST_F(FusedStep, SkippedStepChangesNothing) {
  set_grad({3, 4});
  scaler_.step(optimizer_);
  scaler_.update();
  const auto& state = get_param_state<const mezzo::optim::AdamWParamState>(optimizer_, x_);
  const std::vector<torch::Tensor> before{x_.detach().clone(), state.exp_avg().clone(),
                                          state.exp_avg_sq().clone()};
  const auto version = x_._version();
  x_.mutable_grad() = torch::tensor({1.0F, kInfinity});
  const auto result = scaler_.step(optimizer_);
  scaler_.update();
  EXPECT_FALSE(result.applied());
  EXPECT_TRUE(result.found_inf());
  EXPECT_TRUE(torch::equal(x_, before[0]));
  EXPECT_TRUE(torch::equal(state.exp_avg(), before[1]));
  EXPECT_TRUE(torch::equal(state.exp_avg_sq(), before[2]));
  EXPECT_EQ(state.step(), 1);
  EXPECT_EQ(x_._version(), version);
  EXPECT_TRUE(torch::equal(x_.grad(), torch::tensor({1.0F, kInfinity})));
  EXPECT_EQ(scaler_.get_scale(), 512.0);
}

TEST_F(FusedStep, SkippedFirstStepCreatesNoState) {
  set_grad({kInfinity, 0});
  scaler_.step(optimizer_);
  EXPECT_TRUE(optimizer_.state().empty());
}

// A thread must not zero the gradient before another thread has read it.
TEST_F(FusedStep, ZeroesSharedGradientAfterAllReads) {
  const std::vector<torch::Tensor> all{torch::ones({40000}).requires_grad_(),
                                       torch::ones({40000}).requires_grad_()};
  const auto gradient = torch::full({40000}, 1024.0F);
  for (const auto& one : all) one.mutable_grad() = gradient;
  AdamW optimizer(all, AdamWOptions(0.1));
  EXPECT_TRUE(scaler_.step(optimizer, {.zero_grad = true}).applied());
  EXPECT_TRUE(torch::equal(all[0], all[1]));
  EXPECT_NEAR(all[1][39999].item<double>(), 0.899, 1e-6);
  EXPECT_EQ(gradient.abs().max().item<float>(), 0.0F);
}

TEST_F(FusedStep, ZeroesOverlappingGradient) {
  const auto y = torch::ones({5}).requires_grad_();
  y.mutable_grad() = torch::full({1}, 1024.0F).expand({5});
  AdamW optimizer({y}, AdamWOptions(0.1));
  EXPECT_TRUE(scaler_.step(optimizer, {.zero_grad = true}).applied());
  EXPECT_TRUE(torch::allclose(y, torch::full({5}, 0.899F)));
  EXPECT_TRUE(torch::equal(y.grad(), torch::zeros({5})));
}

TEST_F(FusedStep, ThrowsForNonPositiveMaxNorm) {
  set_grad({3, 4});
  for (const double bad : {0.0, -1.0, std::nan("")}) {
    EXPECT_THAT([&] { scaler_.step(optimizer_, {.max_norm = bad}); },
                ThrowsMessage<c10::Error>(HasSubstr("max_norm is")));
  }
  EXPECT_TRUE(scaler_.step(optimizer_, {.max_norm = 1.0}).applied());
}

TEST_F(FusedStep, DisabledScalerStepsOnInf) {
  GradScaler disabled({.enabled = false});
  x_.mutable_grad() = torch::tensor({3.0F, kInfinity});
  const auto result = disabled.step(optimizer_, {.max_norm = 1.0});
  EXPECT_TRUE(result.applied());
  EXPECT_FALSE(result.found_inf());
  EXPECT_FALSE(std::isfinite(result.grad_norm().value()));
  EXPECT_TRUE(x_.isnan().any().item<bool>());  // inf / inf, as after clip_grad_norm_
}

TEST_F(FusedStep, DisabledScalerClipsWithoutGradients) {
  GradScaler disabled({.enabled = false});
  const auto result = disabled.step(optimizer_, {.max_norm = 1.0});
  EXPECT_TRUE(result.applied());
  EXPECT_EQ(result.grad_norm(), std::nullopt);
  EXPECT_EQ(result.grad_max_abs(), std::nullopt);
  EXPECT_TRUE(torch::equal(x_, torch::zeros({2})));
}

/// A float64 gradient scaled by 4, with an optimizer that subtracts gradients.
torch::Tensor make_float64_parameter() {
  const auto x = torch::zeros({3}, torch::kDouble).requires_grad_();
  x.mutable_grad() = torch::tensor({3.0, 4.0, 12.0}, torch::kDouble) * 4;
  return x;
}

TEST(StepOptions, ClipsFloat64InFloat64) {
  const auto ours = make_float64_parameter(), theirs = make_float64_parameter();
  mezzo::optim::SGD fused({ours}, mezzo::optim::SGDOptions(1.0));
  torch::optim::SGD plain({theirs}, torch::optim::SGDOptions(1.0));
  GradScaler scaler = make_silent_scaler({.init_scale = 4});
  scaler.step(fused, {.max_norm = 1.0});
  scaler.step(plain, {.max_norm = 1.0});
  const double coefficient = 1.0 / (13.0 + 1e-6);
  EXPECT_NEAR(ours[2].item<double>(), -12.0 * coefficient, 1e-15);
  EXPECT_NEAR(theirs[2].item<double>(), -12.0 * coefficient, 1e-15);
}

// --- ATen's fused optimizers (for devices without mezzo kernels), on the CPU.

std::vector<torch::Tensor> make_parameters() {
  torch::manual_seed(1);
  return {torch::randn({17, 9}), torch::randn({6, 4}).t(), torch::ones({6, 4}),
          torch::randn({5}, torch::kDouble), torch::randn({3})};
}

GradStats make_grad_stats(bool found_inf, double norm) {
  return {torch::full({}, 0.25F), torch::full({}, found_inf ? 1.0F : 0.0F),
          torch::full({}, norm * norm, torch::kDouble)};
}

/// Runs twelve steps both ways; every third is skipped.
template <class Optimizer, class Options>
void expect_same_steps(const Options& options, at::ScalarType dtype = torch::kFloat) {
  const auto cast = [dtype](std::vector<torch::Tensor> all) {
    for (torch::Tensor& one : all) one = one.detach().to(dtype);
    return all;
  };
  const auto ours = cast(make_parameters());
  const auto aten = cast(make_parameters());
  const mezzo::optim::WeightStorageOptions masters{.weight_storage = WeightStorage::fp32_master};
  Optimizer left(ours, options, masters);
  AtenOptimizer<Optimizer> right(aten, options, masters);
  for (int i = 0; i < 12; ++i) {
    std::vector<torch::Tensor> given;
    for (std::size_t k = 0; k < ours.size(); ++k) {
      const bool is_left_out = k == 4 && i % 2 == 0;
      const auto gradient = torch::randn(ours[k].sizes(), ours[k].options());
      given.push_back(is_left_out ? torch::Tensor() : gradient);
      ours[k].mutable_grad() = is_left_out ? torch::Tensor() : gradient.clone();
      aten[k].mutable_grad() = is_left_out ? torch::Tensor() : gradient.clone();
    }
    const auto stats = i % 5 == 4 ? GradStats() : make_grad_stats(i % 3 == 0, i);
    const StepOptions step_options{.max_norm = 2.0, .zero_grad = i == 7};
    left.apply(left.plan(), stats, step_options);
    right.apply(right.plan(), stats, step_options);
    for (std::size_t k = 0; k < ours.size(); ++k) {
      if (!given[k].defined()) continue;
      const auto wanted = i == 7 ? torch::zeros_like(given[k]) : given[k];
      EXPECT_TRUE(ours[k].grad().equal(wanted)) << k;
      EXPECT_TRUE(aten[k].grad().equal(wanted)) << k;
    }
  }
  for (std::size_t k = 0; k < ours.size(); ++k) {
    const auto master = left.master_param(ours[k]), of_aten = right.master_param(aten[k]);
    EXPECT_EQ(of_aten.scalar_type(), torch::kFloat);
    EXPECT_TRUE(torch::allclose(master, of_aten, 1e-5, 1e-5)) << k;
    EXPECT_TRUE(aten[k].equal(of_aten.to(dtype))) << k;
  }
  std::stringstream archive;  // moves the counts to the host
  torch::save(right, archive);
  torch::load(left, archive);
  for (const auto& parameter : aten) {
    const auto found = right.state().find(parameter.unsafeGetTensorImpl());
    if (found == right.state().end()) continue;
    using State = typename Optimizer::State;
    const auto& counted = static_cast<const State&>(*found->second);
    const int64_t expected = parameter.is_same(aten[4]) ? 5 : 9;
    EXPECT_EQ(counted.step(), expected);
  }
}

TEST(AtenStep, MatchesMezzoKernelsForAdamW) {
  using mezzo::optim::AdamWOptions;
  expect_same_steps<mezzo::optim::AdamW>(AdamWOptions(1e-2));
  expect_same_steps<mezzo::optim::AdamW>(AdamWOptions(1e-2).amsgrad(true).weight_decay(0.1));
}

TEST(AtenStep, MatchesMezzoKernelsForAdam) {
  using mezzo::optim::AdamOptions;
  expect_same_steps<mezzo::optim::Adam>(AdamOptions(1e-2));
  expect_same_steps<mezzo::optim::Adam>(AdamOptions(1e-2).amsgrad(true).weight_decay(0.1));
}

TEST(AtenStep, MatchesMezzoKernelsForSgd) {
  using mezzo::optim::SGDOptions;
  expect_same_steps<mezzo::optim::SGD>(SGDOptions(1e-2).weight_decay(0.1));
  expect_same_steps<mezzo::optim::SGD>(SGDOptions(1e-2).momentum(0.9));
  expect_same_steps<mezzo::optim::SGD>(SGDOptions(1e-2).momentum(0.9).nesterov(true));
}

TEST(AtenStep, MatchesMezzoKernelsForMasters) {
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    expect_same_steps<mezzo::optim::AdamW>(AdamWOptions(1e-2).amsgrad(true), dtype);
    expect_same_steps<mezzo::optim::Adam>(mezzo::optim::AdamOptions(1e-2), dtype);
    expect_same_steps<mezzo::optim::SGD>(SGDOptions(1e-2).momentum(0.9), dtype);
    expect_same_steps<mezzo::optim::SGD>(SGDOptions(1e-2), dtype);
  }
}

TEST(AtenStep, ThrowsForUnsupportedWeightStorage) {
  const auto expect_throws = [](auto optimizer, const torch::Tensor& x) {
    EXPECT_THAT([&] { optimizer.apply(optimizer.plan()); },
                ThrowsMessage<c10::Error>(
                    HasSubstr("split_master and stochastic_rounding need mezzo's k")));
    EXPECT_TRUE(x.equal(torch::ones({2}, torch::kBFloat16)));
    EXPECT_EQ(optimizer.applied_steps(), 0);
  };
  for (const auto storage : {WeightStorage::split_master, WeightStorage::stochastic_rounding}) {
    const mezzo::optim::WeightStorageOptions weights{.weight_storage = storage};
    const auto x = make_parameter({1, 2}, torch::kBFloat16);
    expect_throws(AtenOptimizer<AdamW>({x}, AdamWOptions(0.5), weights), x);
    expect_throws(AtenOptimizer<mezzo::optim::Adam>({x}, mezzo::optim::AdamOptions(0.5), weights),
                  x);
    expect_throws(AtenOptimizer<SGD>({x}, SGDOptions(0.5), weights), x);
  }
}

TEST(AtenStep, UnscalesSharedGradientOncePerParam) {
  const auto gradient = torch::full({3}, 8.0F);
  const auto x = torch::ones({3});
  const auto y = torch::ones({3});
  x.mutable_grad() = gradient;
  y.mutable_grad() = gradient;
  AtenOptimizer<SGD> optimizer({x, y}, mezzo::optim::SGDOptions(0.5).momentum(0.9));
  const auto make_scalar = [](double value) { return torch::full({}, value, torch::kFloat); };
  optimizer.apply(optimizer.plan(), {make_scalar(0.125), make_scalar(0)});
  EXPECT_TRUE(torch::equal(x, torch::full({3}, 0.5F)));
  EXPECT_TRUE(torch::equal(y, x));
}

template <class Optimizer>
int64_t steps_of(Optimizer& optimizer, const torch::Tensor& parameter) {
  auto& state = *optimizer.state().at(parameter.unsafeGetTensorImpl());
  return static_cast<typename Optimizer::State&>(state).step();
}

TEST(AtenStep, ThrowingStepIsNotCounted) {
  const auto x = torch::ones({2});
  const auto y = torch::ones({2});
  x.mutable_grad() = torch::ones({2});
  y.mutable_grad() = torch::ones({2});
  using mezzo::optim::SGDOptions;
  AtenOptimizer<SGD> sgd(
      {torch::optim::OptimizerParamGroup({x}), torch::optim::OptimizerParamGroup({y})},
      SGDOptions(0.5).momentum(0.5));
  sgd.apply(sgd.plan());
  static_cast<SGDOptions&>(sgd.param_groups()[1].options()).dampening(0.1);
  EXPECT_THROW(sgd.apply(sgd.plan()), c10::Error);
  EXPECT_EQ(steps_of(sgd, x), 1);
  EXPECT_EQ(steps_of(sgd, y), 1);
  EXPECT_EQ(sgd.applied_steps(), 1);
  EXPECT_TRUE(torch::equal(x, torch::full({2}, 0.5F))) << "no group is stepped";

  AtenOptimizer<mezzo::optim::Lion> lion({x});
  EXPECT_THROW(lion.apply(lion.plan()), c10::Error);
  EXPECT_TRUE(lion.state().empty());
}

/// SGD whose second call of ATen's kernel throws.
struct FailingSgd : AtenOptimizer<SGD> {
  using AtenOptimizer::AtenOptimizer;
  void aten_step(const mezzo::detail::GroupHyperParams& hyper_params,
                 const mezzo::detail::AtenTensorLists& lists,
                 const mezzo::detail::AtenAmpArgs& amp_args) const override {
    if (++calls == 2) throw std::runtime_error("out of memory");
    SGD::aten_step(hyper_params, lists, amp_args);
  }
  mutable int calls = 0;
};

TEST(AtenStep, ThrowingGroupIsNotCounted) {
  const auto x = torch::ones({2}), y = torch::ones({2});
  FailingSgd sgd({torch::optim::OptimizerParamGroup({x}), torch::optim::OptimizerParamGroup({y})},
                 mezzo::optim::SGDOptions(0.5).momentum(0.5));
  for (const auto& each : {x, y}) each.mutable_grad() = torch::ones({2});
  EXPECT_THROW(sgd.apply(sgd.plan()), std::runtime_error);
  EXPECT_EQ(steps_of(sgd, x), 1);
  EXPECT_EQ(steps_of(sgd, y), 0);
}

// found_inf is summed over checks (unscale_ and step) and devices.
TEST(AtenStep, SkipsForFoundInfAboveOne) {
  const auto parameter = torch::ones({5});
  AtenOptimizer<AdamW> optimizer({parameter}, mezzo::optim::AdamWOptions(1e-2));
  parameter.mutable_grad() = torch::full({5}, std::numeric_limits<float>::infinity());
  optimizer.apply(optimizer.plan(), {torch::ones({}), torch::full({}, 2.0F)});
  EXPECT_TRUE(torch::equal(parameter, torch::ones({5})));
}

// Otherwise backward would use other weights than forward.
TEST(AtenStep, BumpsVersionCounters) {
  const auto parameter = torch::ones({5}).requires_grad_();
  AtenOptimizer<AdamW> adam({parameter}, mezzo::optim::AdamWOptions(1e-2));
  AtenOptimizer<SGD> sgd({parameter}, mezzo::optim::SGDOptions(1e-2));
  const auto expect_bump = [&](auto& optimizer) {
    const auto loss = (parameter * parameter).sum();
    parameter.mutable_grad() = torch::ones({5});
    optimizer.apply(optimizer.plan());
    EXPECT_THROW(loss.backward(), c10::Error);
  };
  expect_bump(adam);
  expect_bump(sgd);
}

// --- accumulate_in_float.

TEST(AccumulateInFloat, AccumulatesGradientsOf16BitWeights) {
  for (const bool in_float : {false, true}) {
    const auto weight = torch::zeros({2}, torch::kBFloat16).requires_grad_();
    if (in_float) accumulate_in_float({weight});
    SGD optimizer({weight}, 1.0);
    for (int i = 0; i < 1000; ++i) weight.sum().backward();
    EXPECT_EQ(weight.grad().scalar_type(), in_float ? torch::kFloat : torch::kBFloat16);
    optimizer.step();
    EXPECT_EQ(weight[0].item<float>(), in_float ? -1000.0F : -256.0F);
  }
}

TEST(AccumulateInFloat, AppliesToUnfrozenWeight) {
  const auto weight = torch::zeros({2}, torch::kBFloat16);
  accumulate_in_float({weight});
  SGD optimizer({weight}, 1.0);
  weight.set_requires_grad(true);
  for (int i = 0; i < 1000; ++i) weight.sum().backward();
  optimizer.step();
  EXPECT_EQ(weight[0].item<float>(), -1000.0F);
}

TEST(AccumulateInFloat, ConvertsExistingGradients) {
  const auto weight = torch::zeros({2}, torch::kBFloat16).requires_grad_();
  weight.sum().backward();
  accumulate_in_float({weight});
  for (int i = 0; i < 999; ++i) weight.sum().backward();
  EXPECT_TRUE(torch::equal(weight.grad(), torch::full({2}, 1000.0)));
}

TEST(AccumulateInFloat, PreservesFloat64Gradients) {
  const auto weight = torch::zeros({2}, torch::kDouble).requires_grad_();
  accumulate_in_float({weight});
  (weight * 1e300).sum().backward();
  EXPECT_EQ(weight.grad()[0].item<double>(), 1e300);
}

double relative_error(const torch::Tensor& gradient, const torch::Tensor& exact) {
  return ((gradient.to(torch::kDouble) - exact).norm() / exact.norm()).item<double>();
}

// The gain of a product with float32 output (as in cuBLAS) is small, since backward computes in 16
// bits.
TEST(AccumulateInFloat, RoundingErrorStaysSmall) {
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
  mezzo::accumulate_in_float(weights);
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
  const double by_16_bits = relative_error(in_16_bits.grad(), exact.front().grad());
  const double by_float = relative_error(weights.front().grad(), exact.front().grad());
  const double by_products = relative_error(float_products, exact.front().grad());
  EXPECT_LT(by_float, 0.5 * by_16_bits);
  EXPECT_LT(by_float, 1.15 * by_products);
}

}  // namespace
