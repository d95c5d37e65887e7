#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mezzo/grad_scaler.h>

#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "error_of.h"

namespace {

using grad_scaler_test::error_of;
using mezzo::GradScaler;
using mezzo::GradScalerOptions;
using mezzo::LossScale;
using mezzo::LossScaleKind;
using testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

torch::Tensor parameter(std::vector<float> values) {
  return torch::tensor(values).requires_grad_(true);
}

torch::optim::SGD sgd(std::vector<torch::Tensor> parameters) {
  return torch::optim::SGD(std::move(parameters), torch::optim::SGDOptions(1.0));
}

void set_gradient(const torch::Tensor& parameter, std::vector<float> values) {
  parameter.mutable_grad() = torch::tensor(values);
}

/// A scaler that has seen a loss, and tells nobody of its skips.
GradScaler quiet_scaler(const GradScalerOptions& options) {
  GradScaler scaler(options);
  scaler.on_skip(nullptr);
  (void)scaler.scale(torch::zeros({}));
  return scaler;
}

TEST(GradScaler, HasTorchsDefaults) {
  const GradScaler scaler;
  EXPECT_TRUE(scaler.is_enabled());
  EXPECT_EQ(scaler.get_scale(), 65536.0);
  EXPECT_EQ(scaler.get_growth_factor(), 2.0);
  EXPECT_EQ(scaler.get_backoff_factor(), 0.5);
  EXPECT_EQ(scaler.get_growth_interval(), 2000);
}

TEST(GradScaler, RefusesOptionsOutOfRange) {
  const auto make = [](const GradScalerOptions& options) { GradScaler{options}; };
  EXPECT_THAT(error_of([&] { make(GradScalerOptions().init_scale(-1)); }), HasSubstr("init_scale"));
  EXPECT_THAT(error_of([&] { make(GradScalerOptions().growth_factor(1)); }),
              HasSubstr("The growth factor must be > 1.0."));
  EXPECT_THAT(error_of([&] { make(GradScalerOptions().backoff_factor(1)); }),
              HasSubstr("The backoff factor must be < 1.0."));
  EXPECT_THAT(error_of([&] { make(GradScalerOptions().growth_interval(0).enabled(false)); }),
              HasSubstr("growth_interval is 0"));
  EXPECT_THAT(error_of([&] { make(GradScalerOptions().hysteresis(0)); }),
              HasSubstr("hysteresis is 0"));
  EXPECT_THAT(error_of([&] { make(GradScalerOptions().min_scale(4).max_scale(2)); }),
              HasSubstr("max_scale is 2"));
}

TEST(GradScaler, ScalesATensorDifferentiablyAndLeavesItAlone) {
  GradScaler scaler(GradScalerOptions().init_scale(8));
  const auto x = parameter({3});
  const auto loss = (x * x).sum();
  const auto scaled = scaler.scale(loss);
  EXPECT_EQ(loss.item<float>(), 9.0F);
  EXPECT_EQ(scaled.item<float>(), 72.0F);
  scaled.backward();
  EXPECT_EQ(x.grad().item<float>(), 48.0F);
}

TEST(GradScaler, ScalesNestedContainersToTheSameType) {
  GradScaler scaler(GradScalerOptions().init_scale(4));
  const auto one = torch::ones({});
  using Outputs = std::tuple<torch::Tensor, std::vector<torch::Tensor>,
                             std::map<std::string, std::pair<torch::Tensor, torch::Tensor>>,
                             std::array<std::unordered_map<int, torch::Tensor>, 1>,
                             std::optional<torch::Tensor>, std::optional<torch::Tensor>>;
  const Outputs outputs{one, {one, one * 2}, {{"a", {one, one * 3}}}, {{{{7, one}}}}, one, {}};
  const Outputs scaled = scaler.scale(outputs);
  EXPECT_EQ(std::get<0>(scaled).item<float>(), 4.0F);
  EXPECT_EQ(std::get<1>(scaled).at(1).item<float>(), 8.0F);
  EXPECT_EQ(std::get<2>(scaled).at("a").second.item<float>(), 12.0F);
  EXPECT_EQ(std::get<3>(scaled).at(0).at(7).item<float>(), 4.0F);
  EXPECT_EQ(std::get<4>(scaled)->item<float>(), 4.0F);
  EXPECT_FALSE(std::get<5>(scaled).has_value());
  EXPECT_EQ(one.item<float>(), 1.0F);
}

TEST(GradScaler, KeepsTheDtypeOfAHalfOutput) {
  GradScaler scaler;
  EXPECT_EQ(scaler.scale(torch::ones({2}, torch::kHalf)).scalar_type(), torch::kHalf);
}

TEST(GradScaler, RefusesToGoBackwardThroughAScaleThatHasMoved) {
  auto scaler = quiet_scaler(GradScalerOptions().growth_interval(1));
  auto x = parameter({1});
  auto optimizer = sgd({x});
  const auto scaled = scaler.scale(x.sum());
  set_gradient(x, {1});
  scaler.step(optimizer);
  scaler.update();
  EXPECT_THAT(error_of([&] { scaled.backward(); }), HasSubstr("modified by an inplace operation"));
}

TEST(GradScaler, UnscalesStepsAndReturnsWhatTheOptimizerReturned) {
  auto scaler = quiet_scaler(GradScalerOptions().init_scale(4));
  auto x = parameter({10, 20});
  auto optimizer = sgd({x});
  set_gradient(x, {4, 8});
  const auto result = scaler.step(optimizer);
  EXPECT_TRUE(result.ready());
  EXPECT_TRUE(result.ran());
  EXPECT_FALSE(result.found_inf());
  EXPECT_EQ(result.scale(), 4.0F);
  ASSERT_TRUE(result.value().has_value());
  EXPECT_FALSE(result.value()->defined());
  EXPECT_TRUE(torch::equal(x, torch::tensor({9.0F, 18.0F})));
  EXPECT_TRUE(torch::equal(x.grad(), torch::tensor({1.0F, 2.0F})));
}

TEST(GradScaler, SkipsTheStepAndHalvesTheScaleOnInf) {
  for (const float bad : {kInfinity, -kInfinity, std::nanf("")}) {
    auto scaler = quiet_scaler(GradScalerOptions().init_scale(4));
    auto x = parameter({10, 20});
    auto optimizer = sgd({x});
    set_gradient(x, {4, bad});
    const auto result = scaler.step(optimizer);
    EXPECT_FALSE(result.ran());
    EXPECT_TRUE(result.found_inf());
    EXPECT_FALSE(result.value().has_value());
    EXPECT_TRUE(torch::equal(x, torch::tensor({10.0F, 20.0F})));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 2.0);
    EXPECT_EQ(result.scale(), 4.0F) << "the result is about its own step";
  }
}

TEST(GradScaler, LeavesUnscaledGradientsToTheUserBeforeTheStep) {
  auto scaler = quiet_scaler(GradScalerOptions().init_scale(1024));
  auto x = parameter({0, 0});
  auto optimizer = sgd({x});
  set_gradient(x, {3 * 1024, 4 * 1024});
  scaler.unscale_(optimizer);
  EXPECT_FLOAT_EQ(static_cast<float>(torch::nn::utils::clip_grad_norm_({x}, 1.0)), 5.0F);
  scaler.step(optimizer);
  EXPECT_TRUE(torch::allclose(x, torch::tensor({-0.6F, -0.8F})));
}

TEST(GradScaler, GrowsTheScaleAfterTheIntervalOfCleanIterations) {
  auto scaler = quiet_scaler(GradScalerOptions().init_scale(4).growth_interval(2));
  auto x = parameter({0});
  auto optimizer = sgd({x});
  std::vector<double> scales;
  for (const float gradient : {1.0F, 1.0F, kInfinity, 1.0F, 1.0F}) {
    set_gradient(x, {gradient});
    scaler.step(optimizer);
    scaler.update();
    scales.push_back(scaler.get_scale());
  }
  EXPECT_EQ(scales, (std::vector<double>{4, 8, 4, 4, 8}));
}

TEST(GradScaler, OnlyTheOptimizerWithTheInfSkipsAndTheSharedScaleBacksOffOnce) {
  auto scaler = quiet_scaler(GradScalerOptions().init_scale(4));
  std::vector<torch::Tensor> parameters{parameter({1}), parameter({1}), parameter({1})};
  std::vector<torch::optim::SGD> optimizers;
  for (const auto& x : parameters) optimizers.push_back(sgd({x}));
  set_gradient(parameters[0], {kInfinity});
  set_gradient(parameters[1], {4});
  set_gradient(parameters[2], {kInfinity});
  std::vector<bool> ran;
  for (auto& optimizer : optimizers) ran.push_back(scaler.step(optimizer).ran());
  EXPECT_EQ(ran, (std::vector<bool>{false, true, false}));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 2.0);
}

TEST(GradScaler, ReachesEveryParameterGroupAndEveryDtype) {
  auto scaler = quiet_scaler(GradScalerOptions().init_scale(2));
  const std::vector<torch::ScalarType> dtypes{torch::kFloat, torch::kDouble, torch::kBFloat16};
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const auto dtype : dtypes) {
    const auto x = torch::zeros({3}, torch::dtype(dtype).requires_grad(true));
    x.mutable_grad() = torch::full({3}, 6.0, dtype);
    groups.emplace_back(std::vector<torch::Tensor>{x});
  }
  torch::optim::SGD optimizer(groups, torch::optim::SGDOptions(1.0));
  EXPECT_TRUE(scaler.step(optimizer).ran());
  for (auto& group : optimizer.param_groups()) {
    EXPECT_TRUE(torch::equal(group.params()[0], torch::full_like(group.params()[0], -3.0)));
  }
  scaler.update();
  optimizer.param_groups()[2].params()[0].mutable_grad()[1] = kInfinity;
  EXPECT_FALSE(scaler.step(optimizer).ran());
}

TEST(GradScaler, LeavesOutUndefinedGradients) {
  auto scaler = quiet_scaler({});
  auto x = parameter({1});
  auto frozen = parameter({1});
  auto optimizer = sgd({frozen, x});
  set_gradient(x, {65536});
  EXPECT_TRUE(scaler.step(optimizer).ran());
  EXPECT_FALSE(frozen.grad().defined());
  EXPECT_EQ(x.item<float>(), 0.0F);
}

TEST(GradScaler, SaysSoWhenNoParameterHasAGradient) {
  auto scaler = quiet_scaler({});
  auto optimizer = sgd({parameter({1})});
  EXPECT_EQ(error_of([&] { scaler.step(optimizer); }),
            "No inf checks were recorded for this optimizer.");
  EXPECT_EQ(error_of([&] { scaler.update(); }), "No inf checks were recorded prior to update.");
}

TEST(GradScaler, CoalescesSparseGradientsBeforeItChecks) {
  auto scaler = quiet_scaler(GradScalerOptions().init_scale(2).allow_fp16_gradients(true));
  const auto x = torch::zeros({4}, torch::dtype(torch::kHalf).requires_grad(true));
  auto optimizer = sgd({x});
  const auto sparse = [](std::vector<int64_t> places, float value) {
    const auto count = static_cast<int64_t>(places.size());
    const auto values = torch::full({count}, value, torch::kHalf);
    return torch::sparse_coo_tensor(torch::tensor(places).unsqueeze(0), values, {4});
  };
  x.mutable_grad() = sparse({1, 1}, 64000);  // 128000 in one place: inf in half
  EXPECT_FALSE(scaler.step(optimizer).ran());
  scaler.update(2.0);
  x.mutable_grad() = sparse({1, 3}, 64000);
  EXPECT_TRUE(scaler.step(optimizer).ran());
  EXPECT_TRUE(torch::equal(x.to(torch::kFloat), torch::tensor({0.0F, -32000.0F, 0.0F, -32000.0F})));
}

TEST(GradScaler, RefusesHalfGradientsUnlessTheyAreAllowed) {
  auto scaler = quiet_scaler({});
  const auto x = torch::zeros({1}, torch::dtype(torch::kHalf).requires_grad(true));
  x.mutable_grad() = torch::ones({1}, torch::kHalf);
  auto optimizer = sgd({x});
  EXPECT_EQ(error_of([&] { scaler.unscale_(optimizer); }), "Attempting to unscale FP16 gradients.");
  auto allowing = quiet_scaler(GradScalerOptions().init_scale(4).allow_fp16_gradients(true));
  EXPECT_TRUE(allowing.step(optimizer).ran());
  EXPECT_EQ(x.grad().item<float>(), 0.25F);
}

TEST(GradScaler, RefusesComplexGradients) {
  auto scaler = quiet_scaler({});
  const auto x = torch::zeros({1}, torch::dtype(torch::kComplexFloat).requires_grad(true));
  x.mutable_grad() = torch::ones({1}, torch::kComplexFloat);
  auto optimizer = sgd({x});
  EXPECT_THAT(error_of([&] { scaler.step(optimizer); }), HasSubstr("dtype ComplexFloat"));
}

// torch tests the gradient before it multiplies, finds 1e30 finite, and steps with an inf.
TEST(GradScaler, FindsAnInfThatUnscalingItselfMakes) {
  auto scaler = quiet_scaler(GradScalerOptions().init_scale(1e-20));
  auto x = parameter({1});
  auto optimizer = sgd({x});
  set_gradient(x, {1e30F});
  EXPECT_FALSE(scaler.step(optimizer).ran());
  EXPECT_EQ(x.item<float>(), 1.0F);
}

TEST(GradScaler, ChecksOnceMoreAfterAnExplicitUnscale) {
  auto scaler = quiet_scaler(GradScalerOptions().init_scale(4));
  auto x = parameter({1});
  auto optimizer = sgd({x});
  set_gradient(x, {4});
  scaler.unscale_(optimizer);
  x.mutable_grad()[0] = kInfinity;
  EXPECT_FALSE(scaler.step(optimizer).ran());
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 2.0);
}

TEST(GradScaler, WithoutTheRecheckStepsWithABrokenGradientAsTorchDoes) {
  auto scaler = quiet_scaler(GradScalerOptions().init_scale(4).recheck(false));
  auto x = parameter({1});
  auto optimizer = sgd({x});
  set_gradient(x, {4});
  scaler.unscale_(optimizer);
  x.mutable_grad()[0] = kInfinity;
  EXPECT_TRUE(scaler.step(optimizer).ran());
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 4.0);
}

TEST(GradScaler, KeepsTorchsWordsForCallsInTheWrongOrder) {
  const std::string fix =
      " but _scale is None.  This may indicate your script did not use scaler.scale(loss or "
      "outputs) earlier in the iteration.";
  GradScaler fresh;
  auto x = parameter({1});
  auto optimizer = sgd({x});
  set_gradient(x, {1});
  EXPECT_EQ(error_of([&] { fresh.unscale_(optimizer); }), "Attempted unscale_" + fix);
  EXPECT_EQ(error_of([&] { fresh.step(optimizer); }), "Attempted step" + fix);
  EXPECT_EQ(error_of([&] { fresh.update(); }), "Attempted update" + fix);

  auto scaler = quiet_scaler({});
  scaler.unscale_(optimizer);
  EXPECT_EQ(error_of([&] { scaler.unscale_(optimizer); }),
            "unscale_() has already been called on this optimizer since the last update().");
  scaler.step(optimizer);
  EXPECT_EQ(error_of([&] { scaler.unscale_(optimizer); }),
            "unscale_() is being called after step().");
  EXPECT_EQ(error_of([&] { scaler.step(optimizer); }),
            "step() has already been called since the last update().");
  scaler.update();
  EXPECT_TRUE(scaler.step(optimizer).ran());
}

TEST(GradScaler, RefusesClosuresAndTakesNone) {
  auto scaler = quiet_scaler({});
  auto x = parameter({1});
  auto optimizer = sgd({x});
  set_gradient(x, {1});
  EXPECT_EQ(error_of([&] { scaler.step(optimizer, [] { return torch::zeros({}); }); }),
            "Closure use is not currently supported if GradScaler is enabled.");
  EXPECT_TRUE(scaler.step(optimizer, nullptr).ran());
}

class SgdWithArguments : public torch::optim::SGD {
 public:
  using SGD::SGD;
  using SGD::step;
  torch::Tensor step(int factor, std::unique_ptr<int> summand) {
    return torch::full({}, factor + *summand);
  }
};

TEST(GradScaler, ForwardsArgumentsAndReturnsWhatTheStepReturned) {
  auto scaler = quiet_scaler({});
  auto x = parameter({1});
  SgdWithArguments optimizer({x}, torch::optim::SGDOptions(1.0));
  set_gradient(x, {1});
  const auto result = scaler.step(optimizer, 3, std::make_unique<int>(4));
  EXPECT_EQ(result.value().value().item<int>(), 7);
}

TEST(GradScaler, MayStepAgainAfterAnOptimizerThatThrew) {
  class Failing : public torch::optim::SGD {
   public:
    using SGD::SGD;
    torch::Tensor step(LossClosure closure = nullptr) override {
      if (std::exchange(fails, false)) throw std::runtime_error("failed");
      return SGD::step(closure);
    }
    bool fails = true;
  };
  auto scaler = quiet_scaler(GradScalerOptions().init_scale(4));
  auto x = parameter({1});
  Failing optimizer({x}, torch::optim::SGDOptions(1.0));
  set_gradient(x, {4});
  EXPECT_THROW(scaler.step(optimizer), std::runtime_error);
  EXPECT_TRUE(scaler.step(optimizer).ran());
  EXPECT_EQ(x.item<float>(), 0.0F) << "unscaled once";
}

TEST(GradScaler, NeverTakesANewOptimizerForADeadOneAtItsAddress) {
  auto scaler = quiet_scaler(GradScalerOptions().init_scale(2));
  std::optional<torch::optim::SGD> optimizer;
  std::vector<torch::Tensor> kept;
  for (int i = 0; i < 3; ++i) {  // in one iteration, one place in memory
    auto x = parameter({0});
    set_gradient(x, {2});
    kept.push_back(x);
    optimizer.emplace(std::vector<torch::Tensor>{x}, torch::optim::SGDOptions(1.0));
    ASSERT_NO_THROW(scaler.unscale_(*optimizer)) << i;
    ASSERT_TRUE(scaler.step(*optimizer).ran()) << i;
    EXPECT_EQ(x.item<float>(), -1.0F);
  }
  EXPECT_THAT(error_of([&] { scaler.step(*optimizer); }), HasSubstr("already been called"));
}

TEST(GradScaler, KeepsNoParameterAliveAfterUpdate) {
  auto scaler = quiet_scaler({});
  auto x = parameter({1});
  set_gradient(x, {1});
  {
    auto optimizer = sgd({x});
    scaler.step(optimizer);
  }
  EXPECT_GT(x.use_count(), 1U);
  scaler.update();
  EXPECT_EQ(x.use_count(), 1U);
}

TEST(GradScaler, CopiesANewScaleThatItIsGiven) {
  auto scaler = quiet_scaler({});
  auto new_scale = torch::full({}, 3.0);
  scaler.update(new_scale);
  new_scale.fill_(7.0);
  EXPECT_EQ(scaler.get_scale(), 3.0);
  scaler.update(5.0);
  EXPECT_EQ(scaler.get_scale(), 5.0);
  scaler.update(torch::tensor({9}));
  EXPECT_EQ(scaler.get_scale(), 9.0);
}

TEST(GradScaler, RefusesANewScaleThatItCannotUse) {
  auto scaler = quiet_scaler(GradScalerOptions().min_scale(1).max_scale(1e6));
  for (const double bad : {0.0, -1.0, 0.5, 2e6, std::nan(""), 1e300}) {
    EXPECT_THAT(error_of([&] { scaler.update(bad); }), HasSubstr("new_scale is"));
  }
  for (const auto& bad :
       {torch::ones({2}), torch::ones({1}, torch::requires_grad()), torch::Tensor()}) {
    EXPECT_EQ(error_of([&] { scaler.update(bad); }),
              "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
              "torch.FloatTensor with requires_grad=False.");
  }
  EXPECT_EQ(scaler.get_scale(), 65536.0);
  scaler.update(torch::full({}, 1e9));
  EXPECT_EQ(scaler.get_scale(), 1e6);
}

TEST(GradScaler, DisabledPassesEverythingThrough) {
  GradScaler scaler(GradScalerOptions().enabled(false));
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

TEST(GradScaler, SettersChangeTheRuleAndValidate) {
  auto scaler = quiet_scaler(GradScalerOptions().init_scale(16));
  scaler.set_growth_factor(4);
  scaler.set_backoff_factor(0.25);
  scaler.set_growth_interval(1);
  EXPECT_EQ(scaler.get_growth_factor(), 4.0);
  EXPECT_EQ(scaler.get_backoff_factor(), 0.25);
  EXPECT_EQ(scaler.get_growth_interval(), 1);
  EXPECT_THAT(error_of([&] { scaler.set_growth_factor(0.5); }), HasSubstr("growth_factor is 0.5"));
  EXPECT_THAT(error_of([&] { scaler.set_backoff_factor(2); }), HasSubstr("backoff_factor is 2"));
  EXPECT_THAT(error_of([&] { scaler.set_growth_interval(-1); }),
              HasSubstr("growth_interval is -1"));
  auto x = parameter({0});
  auto optimizer = sgd({x});
  set_gradient(x, {1});
  scaler.step(optimizer);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 64.0);
}

TEST(GradScaler, SettersRefuseARuleThatHasNoGrowth) {
  GradScaler scaler(LossScale::fixed(2));
  EXPECT_THAT(error_of([&] { scaler.set_growth_factor(4); }), HasSubstr("dynamic"));
  EXPECT_THAT(error_of([&] { scaler.set_backoff_factor(0.1); }), HasSubstr("dynamic"));
  EXPECT_THAT(error_of([&] { scaler.set_growth_interval(4); }), HasSubstr("dynamic"));
}

TEST(GradScaler, AFixedScaleSkipsButNeverMoves) {
  auto scaler = quiet_scaler(LossScale::fixed(128));
  auto x = parameter({0});
  auto optimizer = sgd({x});
  set_gradient(x, {kInfinity});
  EXPECT_FALSE(scaler.step(optimizer).ran());
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 128.0);
  set_gradient(x, {128});
  EXPECT_TRUE(scaler.step(optimizer).ran());
  EXPECT_EQ(x.item<float>(), -1.0F);
}

TEST(GradScaler, WithoutAScaleChecksAndTouchesNeitherLossNorGradients) {
  auto scaler = quiet_scaler(LossScale::none());
  auto x = parameter({0});
  auto optimizer = sgd({x});
  const auto loss = x.sum();
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  set_gradient(x, {3});
  const auto version = x.grad()._version();
  EXPECT_TRUE(scaler.step(optimizer).ran());
  EXPECT_EQ(x.grad()._version(), version);
  scaler.update();
  set_gradient(x, {kInfinity});
  EXPECT_FALSE(scaler.step(optimizer).ran());
  EXPECT_THAT(error_of([&] { scaler.update(2.0); }), HasSubstr("LossScaleKind::none"));
}

TEST(GradScaler, HysteresisSkipsWithoutBackingOffAtOnce) {
  auto scaler = quiet_scaler(GradScalerOptions().init_scale(8).hysteresis(2));
  auto x = parameter({0});
  auto optimizer = sgd({x});
  std::vector<double> scales;
  for (int i = 0; i < 3; ++i) {
    set_gradient(x, {kInfinity});
    EXPECT_FALSE(scaler.step(optimizer).ran());
    scaler.update();
    scales.push_back(scaler.get_scale());
  }
  EXPECT_EQ(scales, (std::vector<double>{8, 4, 2}));
}

TEST(GradScaler, TellsOfASkipOnceInApexsWords) {
  std::vector<std::string> lines;
  auto scaler = quiet_scaler(GradScalerOptions().loss_id(0));
  scaler.on_skip([&](const mezzo::SkippedStep& skip) { lines.push_back(skip.message()); });
  auto x = parameter({0});
  auto y = parameter({0});
  auto first = sgd({x});
  auto second = sgd({y});
  set_gradient(x, {kInfinity});
  set_gradient(y, {kInfinity});
  scaler.step(first);
  scaler.step(second);
  EXPECT_TRUE(lines.empty());
  scaler.update();
  set_gradient(x, {1});
  scaler.step(first);
  scaler.update();
  EXPECT_EQ(lines, (std::vector<std::string>{
                       "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to "
                       "32768.0"}));
}

TEST(GradScaler, WritesSkipsToTheErrorStreamUnlessSilenced) {
  GradScaler scaler(GradScalerOptions().loss_id(3).init_scale(1));
  (void)scaler.scale(torch::zeros({}));
  auto x = parameter({0});
  auto optimizer = sgd({x});
  const auto skip = [&] {
    set_gradient(x, {kInfinity});
    testing::internal::CaptureStderr();
    scaler.step(optimizer);
    scaler.update();
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(skip(),
            "Gradient overflow.  Skipping step, loss scaler 3 reducing loss scale to 0.5\n");
  scaler.on_skip(nullptr);
  EXPECT_EQ(skip(), "");
}

TEST(SkippedStep, PrintsScalesAsPythonDoes) {
  const auto line = [](float scale, float next) {
    return mezzo::SkippedStep{.scale = scale, .next_scale = next}.message();
  };
  EXPECT_THAT(line(65536, 32768), HasSubstr("reducing loss scale to 32768.0"));
  EXPECT_THAT(line(6.103515625e-05F, 3.0517578125e-05F), HasSubstr(" to 3.0517578125e-05"));
  EXPECT_THAT(line(0x1p60F, 0x1p50F), HasSubstr(" to 1125899906842624.0"));
  EXPECT_THAT(line(0x1p61F, 0x1p60F), HasSubstr(" to 1.152921504606847e+18"));
  EXPECT_THAT(line(1, 0.5F), HasSubstr(" to 0.5"));
  EXPECT_THAT(line(128, 128), HasSubstr("keeping loss scale at 128.0"));
  EXPECT_THAT(line(128, 256), HasSubstr("setting loss scale to 256.0"));
}

TEST(GradScaler, MovesWithItsState) {
  auto scaler = quiet_scaler(GradScalerOptions().init_scale(4));
  auto x = parameter({0});
  auto optimizer = sgd({x});
  set_gradient(x, {4});
  scaler.unscale_(optimizer);
  GradScaler moved = std::move(scaler);
  EXPECT_TRUE(moved.step(optimizer).ran());
  EXPECT_EQ(x.item<float>(), -1.0F);
}

// Without a GPU the path through ATen's kernels can still be walked with CPU tensors.
TEST(AtenPath, UnscalesMixedDtypesAndChecksTheProducts) {
  const std::vector<torch::Tensor> gradients{
      torch::full({2}, 8.0F), torch::full({1}, 8.0).to(torch::kDouble), torch::full({3}, 16.0F)};
  auto found_inf = torch::zeros({});
  mezzo::detail::unscale_with_aten_(gradients, found_inf, torch::full({}, 0.5F));
  EXPECT_EQ(found_inf.item<float>(), 0.0F);
  EXPECT_TRUE(torch::equal(gradients[0], torch::full({2}, 4.0F)));
  EXPECT_EQ(gradients[1].item<double>(), 4.0);
  EXPECT_TRUE(torch::equal(gradients[2], torch::full({3}, 8.0F)));
  gradients[1][0] = std::numeric_limits<double>::infinity();
  mezzo::detail::unscale_with_aten_(gradients, found_inf, torch::ones({}));
  EXPECT_EQ(found_inf.item<float>(), 1.0F);
}

TEST(AtenPath, UpdatesAndClampsAsTheRuleDoes) {
  const auto rule = LossScale::dynamic(
      {.init_scale = 4, .growth_factor = 8, .growth_interval = 2, .min_scale = 2, .max_scale = 16});
  auto state = rule.initial_state();
  const auto scale = torch::full({}, state.scale);
  const auto tracker = torch::zeros({}, torch::kInt);
  for (const bool found_inf : {false, false, true, true, true, true, false, false}) {
    state = rule.next(state, found_inf);
    mezzo::detail::update_scale_with_aten_(rule, scale, tracker,
                                           torch::full({}, found_inf ? 1.0F : 0.0F));
    EXPECT_EQ(scale.item<float>(), state.scale);
    EXPECT_EQ(tracker.item<int32_t>(), state.growth_tracker);
  }
}

TEST(AtenPath, RefusesHysteresisAndNamesTheTargetThatHasIt) {
  const auto refused = [] {
    mezzo::detail::require_update_kernel(LossScale::dynamic({.hysteresis = 2}), torch::kXPU);
  };
  EXPECT_THAT(error_of(refused), HasSubstr("mezzo::cuda"));
  EXPECT_NO_THROW(mezzo::detail::require_update_kernel(LossScale::dynamic(), torch::kXPU));
}

// "meta" tensors stand in for a second device.
TEST(DeviceCopies, CopiesOnceADeviceUntilTheOriginalChanges) {
  mezzo::detail::DeviceCopies copies(torch::ones({}));
  EXPECT_TRUE(copies.on(torch::kCPU).is_same(copies.original()));
  const auto copy = copies.on(torch::kMeta);
  EXPECT_TRUE(copy.is_meta());
  EXPECT_TRUE(copies.on(torch::kMeta).is_same(copy));
  copies.drop_copies();
  EXPECT_FALSE(copies.on(torch::kMeta).is_same(copy));
}

TEST(Gradients, AreGroupedByDevice) {
  const auto on = [](torch::Device device) {
    const auto x = torch::zeros({2}, torch::device(device).requires_grad(true));
    x.mutable_grad() = torch::zeros({2}, device);
    return x;
  };
  auto optimizer = sgd({on(torch::kCPU), on(torch::kMeta), on(torch::kCPU)});
  const auto groups = mezzo::detail::gradients_by_device(optimizer, false);
  ASSERT_EQ(groups.size(), 2U);
  EXPECT_EQ(groups[0].device, torch::kCPU);
  EXPECT_EQ(groups[0].tensors.size(), 2U);
  EXPECT_EQ(groups[1].device, torch::kMeta);
}

}  // namespace
