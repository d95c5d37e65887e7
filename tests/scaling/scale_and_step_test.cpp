// One iteration: what scale, unscale_ and step do to losses, gradients and parameters.
#include <mezzo/autocast/autocast.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../support/error_of.h"
#include "../support/tiny_optimizer.h"

namespace {

using namespace test_support;
using mezzo::GradScaler;
using mezzo::LossScale;
using mezzo::LossScaleKind;
using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(GradScaler, HasTorchsDefaults) {
  const GradScaler scaler;
  EXPECT_TRUE(scaler.is_enabled());
  EXPECT_EQ(scaler.get_scale(), 65536.0);
  EXPECT_EQ(scaler.get_growth_factor(), 2.0);
  EXPECT_EQ(scaler.get_backoff_factor(), 0.5);
  EXPECT_EQ(scaler.get_growth_interval(), 2000);
}

// A number alone might be any option; an aggregate in braces names it.
static_assert(!std::is_constructible_v<GradScaler, double>);
static_assert(!std::is_constructible_v<GradScaler, int>);
static_assert(!std::is_constructible_v<GradScaler, bool>);
static_assert(std::is_aggregate_v<LossScale>);

TEST(GradScaler, TakesOptionsInBracesAsTorchTakesArguments) {
  const GradScaler scaler({.init_scale = 1024, .growth_factor = 4, .backoff_factor = 0.25});
  EXPECT_EQ(scaler.get_scale(), 1024);
  EXPECT_EQ(scaler.get_growth_factor(), 4);
  EXPECT_EQ(scaler.get_backoff_factor(), 0.25);
  EXPECT_FALSE(GradScaler({.enabled = false}).is_enabled());
}

TEST(GradScaler, RefusesOptionsOutOfRange) {
  const auto make = [](const LossScale& options) { GradScaler{options}; };
  EXPECT_THAT(error_of([&] { make({.init_scale = -1}); }), HasSubstr("init_scale"));
  EXPECT_THAT(error_of([&] { make({.growth_factor = 1}); }),
              HasSubstr("The growth factor must be > 1.0."));
  EXPECT_THAT(error_of([&] { make({.backoff_factor = 1}); }),
              HasSubstr("The backoff factor must be < 1.0."));
  EXPECT_THAT(error_of([&] { make({.growth_interval = 0, .enabled = false}); }),
              HasSubstr("growth_interval is 0"));
  EXPECT_THAT(error_of([&] { make({.hysteresis = 0}); }), HasSubstr("hysteresis is 0"));
  EXPECT_THAT(error_of([&] { make({.min_scale = 4, .max_scale = 2}); }),
              HasSubstr("max_scale is 2"));
}

TEST(GradScaler, ScalesATensorDifferentiablyAndLeavesItAlone) {
  GradScaler scaler({.init_scale = 8});
  const auto x = parameter({3});
  const auto loss = (x * x).sum();
  const auto scaled = scaler.scale(loss);
  EXPECT_EQ(loss.item<float>(), 9.0F);
  EXPECT_EQ(scaled.item<float>(), 72.0F);
  scaled.backward();
  EXPECT_EQ(x.grad().item<float>(), 48.0F);
}

TEST(GradScaler, ScalesNestedContainersToTheSameType) {
  GradScaler scaler({.init_scale = 4});
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

TEST(GradScaler, RefusesToGoBackwardThroughAScaleThatHasMoved) {
  auto scaler = quiet_scaler({.growth_interval = 1});
  auto x = parameter({1});
  auto optimizer = sgd({x});
  const auto scaled = scaler.scale(x.sum());
  set_gradient(x, {1});
  scaler.step(optimizer);
  scaler.update();
  EXPECT_THAT(error_of([&] { scaled.backward(); }), HasSubstr("modified by an inplace operation"));
}

TEST(GradScaler, UnscalesStepsAndReturnsWhatTheOptimizerReturned) {
  auto scaler = quiet_scaler({.init_scale = 4});
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
    auto scaler = quiet_scaler({.init_scale = 4});
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

TEST(GradScaler, ReachesEveryParameterGroupAndEveryDtype) {
  auto scaler = quiet_scaler({.init_scale = 2});
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

// A tied weight: libtorch's Module::parameters() names it as often as the model has it.
TEST(GradScaler, UnscalesOnceWhatIsGivenTwice) {
  for (const bool explicitly : {false, true}) {
    auto scaler = quiet_scaler({.init_scale = 4});
    auto x = parameter({3, 4});
    auto optimizer = sgd({x, x});
    set_gradient(x, {12, 16});
    if (explicitly) {
      scaler.unscale_(optimizer);
      EXPECT_TRUE(torch::equal(x.grad(), torch::tensor({3.0F, 4.0F})));
    }
    const auto result = scaler.step(optimizer, {.max_norm = 100});
    EXPECT_EQ(result.grad_norm(), 5.0);
    EXPECT_EQ(result.grad_max_abs(), 4.0);
    EXPECT_EQ(result.was_unscaled(), explicitly);
    EXPECT_TRUE(torch::equal(x, torch::tensor({-3.0F, -4.0F}))) << "libtorch's SGD steps twice";
  }
}

TEST(GradScaler, CoalescesSparseGradientsBeforeItChecks) {
  auto scaler = quiet_scaler({.init_scale = 2, .allow_fp16_gradients = true});
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
  const auto x = torch::zeros({1}, torch::dtype(torch::kHalf).requires_grad(true));
  auto optimizer = sgd({x});
  const auto refused = [&](const auto& call) {
    auto scaler = quiet_scaler({});
    x.mutable_grad() = torch::full({1}, 6.6e-5, torch::kHalf);  // 1e-9 without the scale: 0 in half
    EXPECT_THAT(error_of([&] { call(scaler); }),
                testing::AllOf(testing::StartsWith("Attempting to unscale FP16 gradients."),
                               HasSubstr("mezzo::Autocast"), HasSubstr("MasterWeights")));
  };
  refused([&](GradScaler& scaler) { scaler.unscale_(optimizer); });
  for (const mezzo::StepOptions& options :
       {mezzo::StepOptions{}, mezzo::StepOptions{.max_norm = 1.0}, {.zero_grad = true}}) {
    refused([&](GradScaler& scaler) { scaler.step(optimizer, options); });
  }
  EXPECT_EQ(x.item<float>(), 0.0F);
  x.mutable_grad() = torch::ones({1}, torch::kHalf);
  auto allowing = quiet_scaler({.init_scale = 4, .allow_fp16_gradients = true});
  EXPECT_TRUE(allowing.step(optimizer).ran());
  EXPECT_EQ(x.grad().item<float>(), 0.25F);
}

// Divided by a scale below 1 it overflows in half and not in float, which is what the check
// computes in.
TEST(GradScaler, FindsAnInfThatUnscalingMakesInHalf) {
  for (const bool zero_grad : {false, true}) {
    for (const double max_norm : {1e9, std::numeric_limits<double>::infinity()}) {
      auto scaler = quiet_scaler(
          LossScale{.init_scale = 0.25, .min_scale = 0.0625, .allow_fp16_gradients = true});
      const auto x = torch::ones({3}, torch::dtype(torch::kHalf).requires_grad(true));
      auto optimizer = sgd({x});
      (void)scaler.scale(torch::zeros({}));
      x.mutable_grad() = torch::full({3}, 30000, torch::kHalf);
      const auto result = scaler.step(optimizer, {.max_norm = max_norm, .zero_grad = zero_grad});
      EXPECT_FALSE(result.ran());
      EXPECT_TRUE(result.found_inf());
      EXPECT_FALSE(result.value().has_value());
      if (max_norm == 1e9) {
        EXPECT_EQ(result.grad_norm(), kInfinity);
        EXPECT_EQ(result.grad_max_abs(), kInfinity);
      }
      EXPECT_TRUE(x.equal(torch::ones({3}, torch::kHalf)));
      EXPECT_EQ(x.grad()[0].item<float>(), zero_grad ? 0.0F : kInfinity);
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), 0.125);
    }
  }
}

// --- Bounds, and memory that is shared.

TEST(GradScalerBounds, RefusesWhatRoundsToZeroAsAFloat) {
  EXPECT_THAT([] { GradScaler({.init_scale = 1e-60, .min_scale = 0}); },
              ThrowsMessage<c10::Error>(HasSubstr("init_scale is 1e-60")));
  EXPECT_THAT([] { GradScaler({.min_scale = 1e-60}); },
              ThrowsMessage<c10::Error>(HasSubstr("min_scale is 1e-60")));
  GradScaler scaler({.min_scale = 0});
  (void)scaler.scale(torch::zeros({}));
  EXPECT_THAT([&] { scaler.update(1e-60); },
              ThrowsMessage<c10::Error>(HasSubstr("new_scale is 1e-60")));
}

TEST(GradScalerBounds, HoldForAFixedScaleToo) {
  GradScaler scaler({.init_scale = 128, .max_scale = 1024, .kind = LossScaleKind::fixed});
  (void)scaler.scale(torch::zeros({}));
  EXPECT_EQ(scaler.rule().max_scale, 1024.0F);
  EXPECT_THAT([&] { scaler.update(4096.0); },
              ThrowsMessage<c10::Error>(HasSubstr("new_scale is 4096")));
  EXPECT_EQ(scaler.get_scale(), 128.0);
}

class GradScalerSharing : public testing::Test {
 protected:
  GradScaler scaler_{{.init_scale = 4}};
  torch::Tensor x_ = torch::zeros({4}).requires_grad_();
  torch::optim::SGD sgd_{{x_}, torch::optim::SGDOptions(1.0)};
};

TEST_F(GradScalerSharing, UnscalesACopyOnWriteGradientAndLeavesTheOtherAlone) {
  const auto shared = torch::ones({4});
  x_.mutable_grad() = at::_lazy_clone(shared);
  (void)scaler_.scale(torch::zeros({}));
  scaler_.unscale_(sgd_);
  EXPECT_TRUE(torch::equal(shared, torch::ones({4})));
  EXPECT_TRUE(torch::equal(x_.grad(), torch::full({4}, 0.25)));
}

TEST_F(GradScalerSharing, ReadsAZeroTensorWithoutMemory) {
  x_.mutable_grad() = at::_efficientzerotensor({4}, torch::kFloat);
  GradScaler constant{mezzo::LossScale::none()};
  (void)constant.scale(torch::zeros({}));
  EXPECT_TRUE(constant.step(sgd_).ran());
  EXPECT_TRUE(torch::equal(x_, torch::zeros({4})));
}

TEST_F(GradScalerSharing, ASkipCallbackMaySilenceItself) {
  const auto calls = std::make_shared<int>(0);
  scaler_.on_skip([this, calls](const mezzo::SkippedStep&) {
    scaler_.on_skip(nullptr);
    ++*calls;  // owned by the callback
  });
  for (int i = 0; i < 2; ++i) {
    (void)scaler_.scale(torch::zeros({}));
    x_.mutable_grad() = torch::full({4}, std::numeric_limits<float>::infinity());
    scaler_.step(sgd_);
    scaler_.update();
  }
  EXPECT_EQ(*calls, 1);
}

// --- A small model in half on the CPU, whose first scaled gradients overflow.

struct TrainingRun {
  int skipped = 0;
  int ran = 0;
  bool always_finite = true;
  float first_loss = 0;
  float last_loss = 0;
  std::vector<double> scales;
};

bool all_finite(const torch::nn::Module& module) {
  for (const auto& parameter : module.parameters()) {
    if (!torch::isfinite(parameter).all().item<bool>()) return false;
  }
  return true;
}

TrainingRun train(const mezzo::LossScale& options, int steps) {
  torch::manual_seed(5);
  torch::nn::Sequential model(torch::nn::Linear(8, 16), torch::nn::ReLU(),
                              torch::nn::Linear(16, 1));
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(1e-2));
  const auto inputs = torch::randn({32, 8});
  const auto targets = inputs.sum(1, /*keepdim=*/true) * 3;
  mezzo::GradScaler scaler(options);
  scaler.on_skip(nullptr);
  TrainingRun run;
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    torch::Tensor output;
    {
      mezzo::Autocast<torch::kCPU, torch::kHalf> autocast;
      output = model->forward(inputs);
    }
    EXPECT_EQ(output.scalar_type(), torch::kHalf);
    const auto loss = torch::mse_loss(output.to(torch::kFloat), targets);
    scaler.scale(loss).backward();
    scaler.unscale_(optimizer);
    torch::nn::utils::clip_grad_norm_(model->parameters(), 10.0);
    const auto result = scaler.step(optimizer);
    scaler.update();
    ++(result.ran() ? run.ran : run.skipped);
    run.always_finite &= all_finite(*model);
    run.scales.push_back(scaler.get_scale());
    (step == 0 ? run.first_loss : run.last_loss) = loss.item<float>();
  }
  return run;
}

// 150 steps of a model of 161 parameters: half a second, for half is slow on most CPUs.
TEST(HalfTraining, OverflowsSkipsRecoversAndTrainsOn) {
  const TrainingRun run = train({.init_scale = 0x1p22, .growth_interval = 30}, 150);
  EXPECT_GE(run.skipped, 3);
  EXPECT_GE(run.ran, 130);
  EXPECT_TRUE(run.always_finite);
  EXPECT_LT(run.last_loss, run.first_loss / 5);
  EXPECT_LT(run.scales.front(), 0x1p22) << "the first step overflowed";
  bool grew = false;
  for (std::size_t i = 1; i < run.scales.size(); ++i) grew |= run.scales[i] > run.scales[i - 1];
  EXPECT_TRUE(grew) << "and the scale came back";
}

}  // namespace
