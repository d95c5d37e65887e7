#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../support/message_of.h"
#include "../support/throwing_sgd.h"
#include "../support/tiny_optimizer.h"
#include "../support/warning_recorder.h"

namespace {

using namespace test_support;
using mezzo::GradScaler;
using mezzo::GradScalerOptions;
using mezzo::LossScaleMode;
using mezzo::OptimizerRef;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;
using testing::ThrowsMessage;
using torch::Tensor;

TEST(GradScaler, DefaultsMatchTorch) {
  const GradScaler scaler;
  EXPECT_TRUE(scaler.is_enabled());
  EXPECT_EQ(scaler.get_scale(), 65536.0);
  EXPECT_EQ(scaler.get_growth_factor(), 2.0);
  EXPECT_EQ(scaler.get_backoff_factor(), 0.5);
  EXPECT_EQ(scaler.get_growth_interval(), 2000);
}

// A bare number does not name its option; an aggregate in braces does.
static_assert(!std::is_constructible_v<GradScaler, double>);
static_assert(!std::is_constructible_v<GradScaler, double, double>);
static_assert(!std::is_constructible_v<GradScaler, const char*, double>);
static_assert(!std::is_constructible_v<GradScaler, int>);
static_assert(!std::is_constructible_v<GradScaler, bool>);
static_assert(std::is_aggregate_v<GradScalerOptions>);

TEST(GradScaler, AcceptsOptionsInBraces) {
  const GradScaler scaler({.init_scale = 1024, .growth_factor = 4, .backoff_factor = 0.25});
  EXPECT_EQ(scaler.get_scale(), 1024);
  EXPECT_EQ(scaler.get_growth_factor(), 4);
  EXPECT_EQ(scaler.get_backoff_factor(), 0.25);
}

TEST(GradScaler, AcceptsDeviceAsTorchAmp) {
  EXPECT_TRUE(GradScaler("cpu").is_enabled());
  EXPECT_TRUE(GradScaler(torch::kCPU, GradScalerOptions{}).is_enabled());
  const GradScaler scaler(torch::Device("cpu"), {.init_scale = 1024, .growth_interval = 100});
  EXPECT_EQ(scaler.get_scale(), 1024);
  EXPECT_EQ(scaler.get_growth_interval(), 100);
  EXPECT_FALSE(GradScaler(std::string("cpu"), {.enabled = false}).is_enabled());
}

TEST(GradScaler, DisabledForCudaWithoutCuda) {
  if (torch::cuda::is_available()) GTEST_SKIP() << "CUDA is available";
  const WarningRecorder warnings;
  EXPECT_FALSE(GradScaler("cuda").is_enabled());
  EXPECT_FALSE(GradScaler(torch::kCUDA, {.init_scale = 1024}).is_enabled());
  EXPECT_FALSE(GradScaler("cuda:0", {.enabled = false}).is_enabled());
  ASSERT_EQ(warnings.texts.size(), 2) << "the disabled scaler does not warn";
  EXPECT_THAT(warnings.texts[0], StartsWith("torch.cuda.amp.GradScaler is enabled, but CUDA is not "
                                            "available.  Disabling."));
}

TEST(GradScaler, ThrowsForUnknownDeviceListingChoices) {
  EXPECT_THAT(message_of([] { GradScaler("gpu"); }),
              AllOf(HasSubstr("cpu, cuda, "), HasSubstr("device string: gpu")));
}

TEST(GradScaler, ScalesNestedContainers) {
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

TEST(GradScaler, BackwardThrowsAfterScaleChanged) {
  auto scaler = make_silent_scaler({.growth_interval = 1});
  auto x = parameter({1});
  auto optimizer = sgd({x});
  const auto scaled = scaler.scale(x.sum());
  set_grad(x, {1});
  scaler.step(optimizer);
  scaler.update();
  EXPECT_THAT(message_of([&] { scaled.backward(); }),
              HasSubstr("modified by an inplace operation"));
}

TEST(GradScaler, StepUnscalesAndReturnsOptimizerValue) {
  auto scaler = make_silent_scaler({.init_scale = 4});
  auto x = parameter({10, 20});
  auto optimizer = sgd({x});
  set_grad(x, {4, 8});
  const auto result = scaler.step(optimizer);
  EXPECT_TRUE(result.ready());
  EXPECT_TRUE(result.applied());
  EXPECT_FALSE(result.found_inf());
  EXPECT_EQ(result.scale(), 4.0F);
  ASSERT_TRUE(result.step_return().has_value());
  EXPECT_FALSE(result.step_return()->defined());
  EXPECT_TRUE(torch::equal(x, torch::tensor({9.0F, 18.0F})));
  EXPECT_TRUE(torch::equal(x.grad(), torch::tensor({1.0F, 2.0F})));
}

// Module::parameters() returns a tied weight several times.
TEST(GradScaler, UnscalesDuplicateParamOnce) {
  for (const bool explicitly : {false, true}) {
    auto scaler = make_silent_scaler({.init_scale = 4});
    auto x = parameter({3, 4});
    auto optimizer = sgd({x, x});
    set_grad(x, {12, 16});
    if (explicitly) {
      scaler.unscale_(optimizer);
      EXPECT_TRUE(torch::equal(x.grad(), torch::tensor({3.0F, 4.0F})));
    }
    const auto result = scaler.step(optimizer, {.max_norm = 100});
    EXPECT_EQ(result.grad_norm(), 5.0);
    EXPECT_EQ(result.grad_max_abs(), 4.0);
    EXPECT_EQ(result.was_unscaled(), explicitly);
    EXPECT_TRUE(torch::equal(x, torch::tensor({-3.0F, -4.0F}))) << "torch::optim::SGD steps twice";
  }
}

TEST(GradScaler, CoalescesSparseGradientsBeforeCheck) {
  auto scaler = make_silent_scaler({.init_scale = 2, .allow_fp16_gradients = true});
  const auto x = torch::zeros({4}, torch::dtype(torch::kHalf).requires_grad(true));
  auto optimizer = sgd({x});
  const auto sparse = [](std::vector<int64_t> places, float value) {
    const auto count = static_cast<int64_t>(places.size());
    const auto values = torch::full({count}, value, torch::kHalf);
    return torch::sparse_coo_tensor(torch::tensor(places).unsqueeze(0), values, {4});
  };
  x.mutable_grad() = sparse({1, 1}, 64000);  // duplicate index: the sum of 128000 is inf in float16
  EXPECT_FALSE(scaler.step(optimizer).applied());
  scaler.update(2.0);
  x.mutable_grad() = sparse({1, 3}, 64000);
  EXPECT_TRUE(scaler.step(optimizer).applied());
  EXPECT_TRUE(torch::equal(x.to(torch::kFloat), torch::tensor({0.0F, -32000.0F, 0.0F, -32000.0F})));
}

TEST(GradScaler, ThrowsForFloat16GradientsUnlessAllowed) {
  const auto x = torch::zeros({1}, torch::dtype(torch::kHalf).requires_grad(true));
  auto optimizer = sgd({x});
  const auto expect_throws = [&](const auto& call) {
    auto scaler = make_silent_scaler({});
    x.mutable_grad() =
        torch::full({1}, 6.6e-5, torch::kHalf);  // 1e-9 without the scale: 0 in float16
    EXPECT_THAT(message_of([&] { call(scaler); }),
                testing::AllOf(testing::StartsWith("Attempting to unscale FP16 gradients."),
                               HasSubstr("mezzo::AutocastGuard"), HasSubstr("MasterWeights")));
  };
  expect_throws([&](GradScaler& scaler) { scaler.unscale_(optimizer); });
  for (const mezzo::StepOptions& options :
       {mezzo::StepOptions{}, mezzo::StepOptions{.max_norm = 1.0}, {.zero_grad = true}}) {
    expect_throws([&](GradScaler& scaler) { scaler.step(optimizer, options); });
  }
  EXPECT_EQ(x.item<float>(), 0.0F);
  x.mutable_grad() = torch::ones({1}, torch::kHalf);
  auto scaler = make_silent_scaler({.init_scale = 4, .allow_fp16_gradients = true});
  EXPECT_TRUE(scaler.step(optimizer).applied());
  EXPECT_EQ(x.grad().item<float>(), 0.25F);
}

// The quotient by a scale below 1 overflows in float16 but not in float32.
TEST(GradScaler, FindsInfFromUnscalingFloat16) {
  for (const bool zero_grad : {false, true}) {
    for (const double max_norm : {1e9, std::numeric_limits<double>::infinity()}) {
      auto scaler = make_silent_scaler(
          GradScalerOptions{.init_scale = 0.25, .min_scale = 0.0625, .allow_fp16_gradients = true});
      const auto x = torch::ones({3}, torch::dtype(torch::kHalf).requires_grad(true));
      auto optimizer = sgd({x});
      (void)scaler.scale(torch::zeros({}));
      x.mutable_grad() = torch::full({3}, 30000, torch::kHalf);
      const auto result = scaler.step(optimizer, {.max_norm = max_norm, .zero_grad = zero_grad});
      EXPECT_FALSE(result.applied());
      EXPECT_TRUE(result.found_inf());
      EXPECT_FALSE(result.step_return().has_value());
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

// --- Bounds and shared storage

TEST(GradScalerBounds, ThrowsForScaleRoundingToZero) {
  EXPECT_THAT([] { GradScaler({.init_scale = 1e-60, .min_scale = 0}); },
              ThrowsMessage<c10::Error>(HasSubstr("init_scale is 1e-60")));
  EXPECT_THAT([] { GradScaler({.min_scale = 1e-60}); },
              ThrowsMessage<c10::Error>(HasSubstr("min_scale is 1e-60")));
  GradScaler scaler({.min_scale = 0});
  (void)scaler.scale(torch::zeros({}));
  EXPECT_THAT([&] { scaler.update(1e-60); },
              ThrowsMessage<c10::Error>(HasSubstr("new_scale is 1e-60")));
}

TEST(GradScalerBounds, ApplyToFixedScale) {
  GradScaler scaler({.init_scale = 128, .max_scale = 1024, .mode = LossScaleMode::fixed});
  (void)scaler.scale(torch::zeros({}));
  EXPECT_EQ(scaler.options().max_scale, 1024.0F);
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

TEST_F(GradScalerSharing, UnscaleKeepsCopyOnWriteSource) {
  const auto shared = torch::ones({4});
  x_.mutable_grad() = at::_lazy_clone(shared);
  (void)scaler_.scale(torch::zeros({}));
  scaler_.unscale_(sgd_);
  EXPECT_TRUE(torch::equal(shared, torch::ones({4})));
  EXPECT_TRUE(torch::equal(x_.grad(), torch::full({4}, 0.25)));
}

TEST_F(GradScalerSharing, AcceptsZeroTensor) {
  x_.mutable_grad() = at::_efficientzerotensor({4}, torch::kFloat);
  GradScaler constant{mezzo::GradScalerOptions::none()};
  (void)constant.scale(torch::zeros({}));
  EXPECT_TRUE(constant.step(sgd_).applied());
  EXPECT_TRUE(torch::equal(x_, torch::zeros({4})));
}

TEST_F(GradScalerSharing, CallbackCanRemoveItself) {
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

// A float16 model of 161 parameters on the CPU whose first scaled gradients overflow.
TEST(GradScalerFloat16Training, RecoversFromOverflow) {
  torch::manual_seed(5);
  torch::nn::Sequential model(torch::nn::Linear(8, 16), torch::nn::ReLU(),
                              torch::nn::Linear(16, 1));
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(1e-2));
  const auto inputs = torch::randn({32, 8});
  const auto targets = inputs.sum(1, /*keepdim=*/true) * 3;
  auto scaler = make_silent_scaler({.init_scale = 0x1p22, .growth_interval = 30});
  int skipped = 0;
  bool grew = false;
  std::vector<float> losses;
  for (int step = 0; step < 150; ++step) {
    optimizer.zero_grad();
    const double scale = scaler.get_scale();
    torch::Tensor output;
    {
      mezzo::AutocastGuard<torch::kCPU, torch::kHalf> autocast;
      output = model->forward(inputs);
    }
    EXPECT_EQ(output.scalar_type(), torch::kHalf);
    const auto loss = torch::mse_loss(output.to(torch::kFloat), targets);
    scaler.scale(loss).backward();
    scaler.unscale_(optimizer);
    torch::nn::utils::clip_grad_norm_(model->parameters(), 10.0);
    if (!scaler.step(optimizer).applied()) ++skipped;
    scaler.update();
    grew |= scaler.get_scale() > scale;
    losses.push_back(loss.item<float>());
    for (const auto& weight : model->parameters())
      ASSERT_TRUE(weight.isfinite().all().item<bool>());
  }
  EXPECT_GE(skipped, 3) << "the first step overflowed";
  EXPECT_LE(skipped, 20);
  EXPECT_TRUE(grew) << "the scale grows again";
  EXPECT_LT(losses.back(), losses.front() / 5);
}

// --- Updating the scale and reporting skips

TEST(GradScaler, UpdateCopiesNewScale) {
  auto scaler = make_silent_scaler({});
  auto new_scale = torch::full({}, 3.0);
  scaler.update(new_scale);
  new_scale.fill_(7.0);
  EXPECT_EQ(scaler.get_scale(), 3.0);
  scaler.update(torch::tensor({9}));
  EXPECT_EQ(scaler.get_scale(), 9.0);
}

TEST(GradScaler, UpdateThrowsForInvalidScale) {
  auto scaler = make_silent_scaler({.min_scale = 1, .max_scale = 1e6});
  for (const double bad : {0.0, -1.0, 0.5, 2e6, std::nan(""), 1e300}) {
    EXPECT_THAT(message_of([&] { scaler.update(bad); }), HasSubstr("new_scale is"));
  }
  for (const auto& bad :
       {torch::ones({2}), torch::ones({1}, torch::requires_grad()), torch::Tensor()}) {
    EXPECT_THAT(
        message_of([&] { scaler.update(bad); }),
        testing::StartsWith("new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
                            "torch.FloatTensor with requires_grad=False."));
  }
  EXPECT_EQ(scaler.get_scale(), 65536.0);
  scaler.update(torch::full({}, 1e9));
  EXPECT_EQ(scaler.get_scale(), 1e6);
}

TEST(GradScaler, ThrowsForInvalidOptionsWhenDisabled) {
  GradScaler scaler;
  EXPECT_THAT(message_of([&] { scaler = GradScaler({.growth_interval = 0, .enabled = false}); }),
              HasSubstr("growth_interval is 0"));
  EXPECT_THAT(message_of([&] { scaler.set_growth_factor(0.5); }),
              HasSubstr("growth_factor is 0.5"));
  EXPECT_THAT(message_of([&] { scaler.set_backoff_factor(2); }), HasSubstr("backoff_factor is 2"));
  EXPECT_THAT(message_of([&] { scaler.set_growth_interval(-1); }),
              HasSubstr("growth_interval is -1"));
}

TEST(GradScaler, UpdateThrowsForModeNone) {
  auto scaler = make_silent_scaler(GradScalerOptions::none());
  for (const auto& error : {message_of([&] { scaler.update(2.0); }),
                            message_of([&] { scaler.update(torch::full({}, 2.0)); })}) {
    EXPECT_THAT(error, HasSubstr("this scaler has LossScaleMode::none"));
  }
  EXPECT_EQ(scaler.get_scale(), 1);
}

TEST(GradScaler, SettersThrowForConstantScale) {
  GradScaler scaler(GradScalerOptions::fixed(2));
  EXPECT_THAT(message_of([&] { scaler.set_growth_factor(4); }), HasSubstr("dynamic"));
  EXPECT_THAT(message_of([&] { scaler.set_backoff_factor(0.1); }), HasSubstr("dynamic"));
  EXPECT_THAT(message_of([&] { scaler.set_growth_interval(4); }), HasSubstr("dynamic"));
}

TEST(GradScaler, FixedScaleSkipsWithoutBackoff) {
  SingleParamTraining training(GradScalerOptions::fixed(128));
  EXPECT_FALSE(training.step(kInfinity).applied());
  EXPECT_EQ(training.scaler.get_scale(), 128.0);
  EXPECT_TRUE(training.step(128).applied());
  EXPECT_EQ(training.x.item<float>(), -1.0F);
}

TEST(GradScaler, ModeNoneChecksWithoutScaling) {
  SingleParamTraining training(GradScalerOptions::none());
  const auto loss = training.x.sum();
  EXPECT_TRUE(training.scaler.scale(loss).is_same(loss));
  set_grad(training.x, {3});
  const auto version = training.x.grad()._version();
  EXPECT_TRUE(training.scaler.step(training.optimizer).applied());
  EXPECT_EQ(training.x.grad()._version(), version);
  training.scaler.update();
  EXPECT_FALSE(training.step(kInfinity).applied());
  EXPECT_THAT(message_of([&] { training.scaler.update(2.0); }), HasSubstr("LossScaleMode::none"));
}

TEST(GradScaler, HysteresisDelaysBackoff) {
  SingleParamTraining training({.init_scale = 8, .hysteresis = 2});
  EXPECT_THAT(training.scales({kInfinity, kInfinity, kInfinity}), ElementsAre(8, 4, 2));
}

TEST(GradScaler, CallbackReportsSkipOnce) {
  std::vector<std::string> lines;
  auto scaler = make_silent_scaler({.loss_id = 0});
  scaler.on_skip([&](const mezzo::SkippedStep& skip) { lines.push_back(skip.message()); });
  auto x = parameter({0}), y = parameter({0});
  auto first = sgd({x}), second = sgd({y});
  const auto train = [&](float gradient, float second_gradient) {
    set_grad(x, {gradient});
    set_grad(y, {second_gradient});
    scaler.step(first);
    if (second_gradient != 0) scaler.step(second);
    scaler.update();
  };
  const std::string message =
      "Gradient overflow or NaN.  Skipping step, loss scaler 0 reducing loss scale to ";
  train(kInfinity, 0);
  EXPECT_EQ(lines.back(), message + "32768.0");
  train(kInfinity, kInfinity);
  EXPECT_EQ(lines.back(), message +
                              "16384.0: optimizer 1 of 2 (SGD, 1 parameter), optimizer 2 of 2 "
                              "(SGD, 1 parameter)");
  train(1, 0);
  EXPECT_EQ(lines.size(), 2U);
}

// As in SAC: two critics, an actor and a temperature.
TEST(GradScaler, CallbackReportsOptimizersThatSkipped) {
  std::vector<mezzo::SkippedStep> skips;
  auto scaler = make_silent_scaler({});
  scaler.on_skip([&](const mezzo::SkippedStep& skip) { skips.push_back(skip); });
  std::vector<torch::Tensor> weights;
  for (int i = 0; i < 4; ++i) weights.push_back(parameter({0}));
  auto first_critic = sgd({weights[0]}), second_critic = sgd({weights[1]});
  mezzo::optim::AdamW actor({weights[2]}, 0.1);
  torch::optim::SGD temperature_sgd({weights[3]}, 0.1);
  mezzo::MasterWeights temperature(temperature_sgd);
  const auto train = [&](std::vector<float> gradients) {
    for (std::size_t i = 0; i < 4; ++i) set_grad(weights[i], {gradients[i]});
    scaler.step(first_critic);
    scaler.step(second_critic);
    scaler.step(actor);
    scaler.unscale_(temperature);
    if (gradients[3] == 1) scaler.step(temperature);
    scaler.update();
  };
  train({1, kInfinity, kNan, 1});
  EXPECT_THAT(skips.back().optimizers, ElementsAre(&second_critic, &actor));
  EXPECT_TRUE(skips.back().has_optimizer(actor));
  EXPECT_FALSE(skips.back().has_optimizer(first_critic));
  EXPECT_EQ(skips.back().description,
            "optimizer 2 of 4 (SGD, 1 parameter), optimizer 3 of 4 (AdamW, 1 parameter)");
  train({1, 1, 1, 1});
  EXPECT_EQ(skips.size(), 1U);
  train({1, 1, 1, kInfinity});
  EXPECT_THAT(skips.back().optimizers, ElementsAre(&temperature_sgd)) << "only unscaled";
}

// As in a GAN whose update() follows the step of each network.
TEST(GradScaler, CallbackDescribesOptimizersThatAlternate) {
  std::vector<std::string> descriptions;
  auto scaler = make_silent_scaler({});
  scaler.on_skip([&](const auto& skip) { descriptions.push_back(skip.description); });
  auto x = parameter({0}), y = parameter({0});
  auto generator = sgd({x});
  for (int i = 0; i < 2; ++i) {
    auto discriminator = std::make_unique<mezzo::optim::AdamW>(std::vector{y}, 0.1);
    set_grad(i == 0 ? y : x, {kInfinity});
    i == 0 ? scaler.step(*discriminator) : scaler.step(generator);
    discriminator.reset();
    scaler.update();
  }
  EXPECT_THAT(descriptions, ElementsAre("", "optimizer 1 of 1 (SGD, 1 parameter)"));
}

TEST(GradScaler, CallbackReportsInfFromUnscale) {
  int reported_skips = 0;
  SingleParamTraining training;
  training.scaler.on_skip([&reported_skips](const mezzo::SkippedStep&) { ++reported_skips; });
  set_grad(training.x, {kInfinity});
  training.scaler.unscale_(training.optimizer);
  training.scaler.update();
  EXPECT_EQ(reported_skips, 1);
  EXPECT_EQ(training.scaler.get_scale(), 512);
}

TEST(GradScaler, CallbackRunsInCallersGradMode) {
  std::vector<bool> modes;
  SingleParamTraining training;
  training.scaler.on_skip(
      [&](const mezzo::SkippedStep&) { modes.push_back(torch::GradMode::is_enabled()); });
  for (const bool mode : {true, false}) {
    const torch::AutoGradMode grad_mode(mode);
    training.step(kInfinity);
  }
  EXPECT_THAT(modes, ElementsAre(true, false));
}

/// Runs `steps` iterations and returns the lines that they print to stderr.
std::vector<std::string> stderr_lines(SingleParamTraining& training, int steps, float gradient) {
  testing::internal::CaptureStderr();
  for (int i = 0; i < steps; ++i) training.step(gradient);
  std::istringstream text(testing::internal::GetCapturedStderr());
  std::vector<std::string> lines;
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

TEST(GradScaler, PrintsSkipsToStderrByDefault) {
  SingleParamTraining training(GradScaler({.init_scale = 1, .loss_id = 3}));
  EXPECT_THAT(stderr_lines(training, 1, kInfinity),
              ElementsAre("Gradient overflow or NaN.  Skipping step, loss scaler 3 reducing loss "
                          "scale to 0.5"));
  training.scaler.on_skip(nullptr);
  EXPECT_THAT(stderr_lines(training, 1, kInfinity), ElementsAre());
}

TEST(GradScaler, PrintsSkipsAtMinScaleRarely) {
  SingleParamTraining training(GradScaler({.init_scale = 4, .min_scale = 1}));
  EXPECT_EQ(stderr_lines(training, 2, kInfinity).size(), 2U) << "4 to 2, and 2 to 1";
  EXPECT_THAT(stderr_lines(training, 1, kInfinity),
              ElementsAre(AllOf(HasSubstr("keeping loss scale at 1.0"),
                                HasSubstr("which is min_scale (consecutive skips: 1;"))));
  EXPECT_EQ(stderr_lines(training, 998, kInfinity).size(), 0U);
  EXPECT_EQ(stderr_lines(training, 1, kInfinity).size(), 1U) << "the 1000th";
  training.scaler.update(2.0);
  EXPECT_EQ(stderr_lines(training, 1, kInfinity).size(), 1U) << "backs off from 2 to 1";
  EXPECT_EQ(stderr_lines(training, 1, kInfinity).size(), 1U) << "at min_scale again";
}

// A loss that is always NaN once printed a line for each step, down to a scale of 5.7e-14.
TEST(GradScaler, PrintsAdviceAfterTenSkips) {
  SingleParamTraining training{GradScaler()};
  const auto first = stderr_lines(training, 60, std::numeric_limits<float>::quiet_NaN());
  ASSERT_EQ(first.size(), 11U);
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(first[static_cast<std::size_t>(i)],
              "Gradient overflow or NaN.  Skipping step, loss scaler 0 reducing loss scale to " +
                  mezzo::detail::format_python_float(std::ldexp(1.0, 15 - i)));
  }
  EXPECT_EQ(
      first[10],
      "Gradient overflow or NaN.  Skipping step, loss scaler 0 reducing loss scale to 32.0 "
      "(consecutive skips: 11; from now on every 1000th is printed). No loss scale removes an "
      "inf or NaN in the data, the loss or the weights; mezzo::DivergenceMonitor "
      "(mezzo/diagnostics.h) finds it");
  training.scaler.update(65536.0);
  EXPECT_EQ(stderr_lines(training, 10, kInfinity).size(), 10U)
      << "update(new_scale) resets the count";
  EXPECT_EQ(stderr_lines(training, 1, 1).size(), 0U);
  EXPECT_EQ(stderr_lines(training, 10, kInfinity).size(), 10U) << "so does an applied step";
  EXPECT_EQ(stderr_lines(training, 1, kInfinity).size(), 1U);
  EXPECT_EQ(stderr_lines(training, 1, kInfinity).size(), 0U);
}

TEST(GradScaler, CallbackReportsConsecutiveSkips) {
  std::vector<int64_t> times;
  SingleParamTraining training({.min_scale = 32768});
  training.scaler.on_skip(
      [&](const mezzo::SkippedStep& skip) { times.push_back(skip.consecutive_skips); });
  for (const float gradient : {kInfinity, kInfinity, kInfinity, 1.0F, kInfinity}) {
    training.step(gradient);
  }
  EXPECT_THAT(times, ElementsAre(1, 2, 3, 1));
}

TEST(SkippedStep, FormatsScaleAsPython) {
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

// --- Call order and errors

TEST(GradScaler, AcceptsNullClosure) {
  SingleParamTraining training;
  set_grad(training.x, {1});
  EXPECT_TRUE(training.scaler.step(training.optimizer, nullptr).applied());
}

TEST(GradScaler, StepSucceedsAfterOptimizerThrew) {
  for (const double max_norm : {100.0, double{kInfinity}}) {
    auto scaler = make_silent_scaler({.init_scale = 4});
    auto x = parameter({1});
    ThrowingSgd optimizer({x}, torch::optim::SGDOptions(1.0));
    set_grad(x, {4});
    optimizer.throws = true;
    EXPECT_THROW(scaler.step(optimizer, {.max_norm = max_norm}), std::runtime_error);
    EXPECT_EQ(x.grad().item<float>(), 1.0F) << "unscaled, as by torch.amp";
    optimizer.throws = false;
    EXPECT_TRUE(scaler.step(optimizer, {.max_norm = max_norm}).applied());
    EXPECT_EQ(x.item<float>(), 0.0F) << "unscaled once";
  }
}

// As in torch: gradients created later are scaled, but would be used as unscaled.
TEST(GradScaler, ThrowsForGradientsCreatedAfterUnscale) {
  auto scaler = make_silent_scaler({.init_scale = 4});
  auto x = parameter({1});
  torch::optim::SGD of_torch({x}, 1.0);
  mezzo::optim::SGD of_mezzo({x}, 1.0);
  for (const mezzo::OptimizerRef optimizer : {mezzo::OptimizerRef(of_torch), {of_mezzo}}) {
    x.mutable_grad() = torch::Tensor();
    scaler.unscale_(optimizer);
    set_grad(x, {4});
    EXPECT_THAT(message_of([&] { scaler.step(optimizer); }),
                StartsWith("No inf checks were recorded for this optimizer."));
  }
  EXPECT_EQ(x.item<float>(), 1);
}

TEST(GradScaler, DisabledPassesThrough) {
  GradScaler scaler({.enabled = false});
  auto x = parameter({1});
  auto optimizer = sgd({x});
  const auto loss = torch::ones({});
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  set_grad(x, {kInfinity});
  scaler.unscale_(optimizer);
  int closures = 0;
  const auto result = scaler.step(optimizer, [&] {
    ++closures;
    return torch::full({}, 5.0);
  });
  EXPECT_TRUE(result.applied());
  EXPECT_EQ(result.scale(), 1.0F);
  EXPECT_EQ(result.step_return().value().item<float>(), 5.0F);
  EXPECT_EQ(closures, 1);
  scaler.update();
  scaler.update(4.0);
  EXPECT_EQ(scaler.get_scale(), 1.0);
  EXPECT_TRUE(scaler.state_dict().empty());
  scaler.load_state_dict({{"nonsense", 1}});
}

TEST(GradScaler, MovePreservesState) {
  auto scaler = make_silent_scaler({.init_scale = 4});
  auto x = parameter({0});
  auto optimizer = sgd({x});
  set_grad(x, {4});
  scaler.unscale_(optimizer);
  GradScaler moved = std::move(scaler);
  EXPECT_TRUE(moved.step(optimizer).applied());
  EXPECT_EQ(x.item<float>(), -1.0F);
}

// --- Multiple scalers, errors, unusual gradients

/// torch::optim::SGD and mezzo::optim::SGD with a learning rate of 1.
template <class Optimizer>
class GradScalerEdgeCases : public testing::Test {
 protected:
  static Optimizer sgd(std::vector<Tensor> parameters) {
    return Optimizer(std::move(parameters), torch::optim::SGDOptions(1.0));
  }
};

using Optimizers = testing::Types<torch::optim::SGD, mezzo::optim::SGD>;
TYPED_TEST_SUITE(GradScalerEdgeCases, Optimizers);

TYPED_TEST(GradScalerEdgeCases, TwoScalersUnscaleInSequence) {
  auto x = parameter({0});
  auto optimizer = this->sgd({x});
  auto first = make_silent_scaler({.init_scale = 4});
  auto second = make_silent_scaler({.init_scale = 8});
  set_grad(x, {32});
  first.unscale_(optimizer);
  second.unscale_(optimizer);
  EXPECT_TRUE(first.step(optimizer).applied());
  EXPECT_EQ(x.item<float>(), -1);
  first.update();
  second.update();
  EXPECT_EQ(first.get_scale(), 4);
  EXPECT_EQ(second.get_scale(), 8);
}

TYPED_TEST(GradScalerEdgeCases, FoundInfCountsAfterOptimizerDestroyed) {
  auto x = parameter({0});
  auto scaler = make_silent_scaler({.init_scale = 4});
  {
    auto optimizer = std::make_unique<TypeParam>(this->sgd({x}));
    set_grad(x, {kInfinity});
    scaler.unscale_(*optimizer);
  }
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 2);
}

TYPED_TEST(GradScalerEdgeCases, LossScaledTwiceKeepsOneScale) {
  auto x = parameter({0});
  auto optimizer = this->sgd({x});
  GradScaler scaler({.init_scale = 4});
  scaler.scale(scaler.scale(x.sum())).backward();
  scaler.step(optimizer);
  EXPECT_EQ(x.item<float>(), -4);
}

TYPED_TEST(GradScalerEdgeCases, AcceptsEmptyParameters) {
  auto x = parameter({});
  auto optimizer = this->sgd({x});
  auto scaler = make_silent_scaler({});
  set_grad(x, {});
  EXPECT_TRUE(scaler.step(optimizer).applied());
  scaler.update();
}

TYPED_TEST(GradScalerEdgeCases, ThrowsWithoutGradients) {
  auto x = parameter({1});
  auto without_gradients = this->sgd({x});
  // mezzo::optim::SGD throws without parameters.
  torch::optim::SGD without_parameters(std::vector<torch::Tensor>{}, /*lr=*/1.0);
  auto scaler = make_silent_scaler({});
  for (const OptimizerRef optimizer :
       {OptimizerRef(without_gradients), OptimizerRef(without_parameters)}) {
    EXPECT_THAT(message_of([&] { scaler.step(optimizer); }),
                HasSubstr("No inf checks were recorded for this optimizer."));
  }
  EXPECT_THAT(message_of([&] { scaler.update(); }),
              HasSubstr("No inf checks were recorded prior to update."));
}

TYPED_TEST(GradScalerEdgeCases, SharedGradientUnscaledOnce) {
  for (const bool unscales_before : {false, true}) {
    auto x = parameter({0}), y = parameter({0});
    auto optimizer = this->sgd({x, y});
    auto scaler = make_silent_scaler({.init_scale = 4});
    set_grad(x, {4});
    y.mutable_grad() = x.grad();
    if (unscales_before) scaler.unscale_(optimizer);
    scaler.step(optimizer);
    EXPECT_EQ(x.item<float>(), -1);
    EXPECT_EQ(y.item<float>(), -1);
  }
}

TYPED_TEST(GradScalerEdgeCases, AliasedGradientsUnscaledSeparately) {
  auto x = parameter({0}), y = parameter({0});
  auto optimizer = this->sgd({x, y});
  auto scaler = make_silent_scaler({.init_scale = 4});
  set_grad(x, {16});
  y.mutable_grad() = x.grad().detach();
  scaler.unscale_(optimizer);
  EXPECT_EQ(x.grad().item<float>(), 1);
}

TYPED_TEST(GradScalerEdgeCases, RemovingFirstGroupKeepsState) {
  auto x = parameter({0}), y = parameter({0}), z = parameter({0});
  auto optimizer = this->sgd({x});
  for (const auto& other : {y, z}) {
    optimizer.add_param_group(torch::optim::OptimizerParamGroup({other}));
  }
  auto& groups = optimizer.param_groups();
  auto scaler = make_silent_scaler({.init_scale = 4});
  for (const auto& each : {x, y, z}) set_grad(each, {4});
  scaler.unscale_(optimizer);
  groups.erase(groups.begin());
  EXPECT_THAT(message_of([&] { scaler.unscale_(optimizer); }), HasSubstr("already been called"));
  scaler.step(optimizer);
  EXPECT_EQ(y.item<float>(), -1) << "unscaled once";
  groups.erase(groups.begin());
  EXPECT_THAT(message_of([&] { scaler.step(optimizer); }), HasSubstr("already been called"));
  EXPECT_EQ(z.item<float>(), -1) << "stepped once";
}

TEST(GradScaler, ScalesLossInItsDtype) {
  auto scaler = make_silent_scaler({.init_scale = 4});
  for (const auto dtype :
       {torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kHalf, torch::kComplexFloat}) {
    const Tensor scaled = scaler.scale(torch::full({2}, 3, dtype));
    EXPECT_EQ(scaled.scalar_type(), dtype);
    EXPECT_TRUE(torch::equal(scaled, torch::full({2}, 12, dtype))) << dtype;
  }
}

// --- State dict, archives, torch.amp

/// Runs an iteration of `scaler` for each gradient.
void run(GradScaler& scaler, const std::vector<float>& gradients) {
  const torch::Tensor x = test_support::parameter({0});
  torch::optim::SGD optimizer = test_support::sgd({x});
  for (const float gradient : gradients) {
    (void)scaler.scale(torch::zeros({}));
    test_support::set_grad(x, {gradient});
    scaler.step(optimizer);
    scaler.update();
  }
}

GradScalerOptions unusual_options() {
  return {.init_scale = 64,
          .growth_factor = 3,
          .backoff_factor = 0.25,
          .growth_interval = 5,
          .min_scale = 0.5,
          .max_scale = 1024,
          .hysteresis = 3};
}

/// torch.amp throws for a growth_interval that is a float.
TEST(GradScalerStateDict, ArchiveStoresCountsAsIntegers) {
  GradScaler scaler(unusual_options());
  std::stringstream file;
  torch::save(scaler, file);
  torch::serialize::InputArchive archive;
  archive.load_from(file);
  for (const auto& [key, number] : scaler.state_dict()) {
    torch::Tensor value;
    archive.read(key, value, /*is_buffer=*/true);
    EXPECT_EQ(value.item<double>(), number) << key;
    const bool is_count = key.find("interval") != std::string::npos ||
                          key.find("hysteresis") != std::string::npos || key == "_growth_tracker" ||
                          key == "_loss_scale_mode";
    EXPECT_EQ(value.scalar_type(), is_count ? torch::kLong : torch::kDouble) << key;
  }
}

TEST(GradScalerStateDict, LoadAcceptsCountsAsFloats) {
  std::stringstream file;
  torch::serialize::OutputArchive written;
  for (const auto& [key, value] : GradScaler(unusual_options()).state_dict()) {
    written.write(key, torch::tensor(value, torch::kDouble), /*is_buffer=*/true);
  }
  written.save_to(file);
  GradScaler scaler;
  torch::load(scaler, file);
  EXPECT_EQ(scaler.state_dict(), GradScaler(unusual_options()).state_dict());
}

TEST(GradScalerStateDict, LoadRestoresAllValues) {
  GradScaler source(unusual_options());
  source.on_skip(nullptr);
  run(source, {kInfinity, kInfinity, kInfinity, 1, 1, kInfinity});
  for (const bool has_scaled : {false, true}) {
    GradScaler restored;
    restored.on_skip(nullptr);
    if (has_scaled) run(restored, {1, 1, 1});
    restored.load_state_dict(source.state_dict());
    EXPECT_EQ(restored.state_dict(), source.state_dict());
    const std::vector<float> gradients{kInfinity, kInfinity, 1, 1, 1, 1, 1, 1, kInfinity};
    auto continued = GradScaler(unusual_options());
    continued.load_state_dict(source.state_dict());
    continued.on_skip(nullptr);
    run(restored, gradients);
    run(continued, gradients);
    EXPECT_EQ(restored.state_dict(), continued.state_dict());
  }
}

TEST(GradScalerStateDict, LoadKeepsFixedMode) {
  GradScaler restored;
  restored.load_state_dict(GradScaler(GradScalerOptions::fixed(128)).state_dict());
  EXPECT_EQ(restored.options().mode, mezzo::LossScaleMode::fixed);
  EXPECT_EQ(restored.get_scale(), 128.0);
}

TEST(GradScalerStateDict, LoadOfTorchStateKeepsBounds) {
  GradScaler scaler(unusual_options());
  scaler.load_state_dict({{"scale", 512},
                          {"growth_factor", 2},
                          {"backoff_factor", 0.5},
                          {"growth_interval", 7},
                          {"_growth_tracker", 4}});
  const auto state = scaler.state_dict();
  EXPECT_EQ(state.at("scale"), 512);
  EXPECT_EQ(state.at("_growth_tracker"), 4);
  EXPECT_EQ(state.at("max_scale"), 1024);
  EXPECT_EQ(state.at("hysteresis"), 3);
  EXPECT_EQ(state.at("_hysteresis_tracker"), 3);
}

TEST(GradScalerStateDict, LoadThrowsForDisabledScalersState) {
  const auto disabled = GradScaler({.enabled = false});
  const std::string words =
      "The source state dict is empty, possibly because it was saved from a disabled instance of "
      "GradScaler.";
  GradScaler scaler;
  std::stringstream stream;
  torch::save(disabled, stream);
  EXPECT_THAT(message_of([&] { torch::load(scaler, stream); }), testing::StartsWith(words));
}

TEST(GradScalerStateDict, FailedLoadChangesNothing) {
  const GradScaler::StateDict valid_state{
      {"scale", 64},          {"growth_factor", 4},   {"backoff_factor", 0.25},
      {"growth_interval", 5}, {"_growth_tracker", 2}, {"min_scale", 2},
      {"max_scale", 512},     {"hysteresis", 4},      {"_hysteresis_tracker", 1},
      {"_loss_scale_mode", 2}};
  int refused = 0;
  for (const bool has_scaled : {false, true}) {
    for (const auto& [key, good] : valid_state) {
      for (const double value : {good, 0.0, -1.0, 0.5, 1.0, 2.5, 3.0, 0x1p40, 0x1p100,
                                 static_cast<double>(kInfinity), std::nan("")}) {
        GradScaler scaler(unusual_options());
        if (has_scaled) run(scaler, {1, 1});
        const auto before = scaler.state_dict();
        auto state = valid_state;
        state[key] = value;
        const std::string error = message_of([&] { scaler.load_state_dict(state); });
        const bool loads = error == "no error";
        if (!loads) {
          ++refused;
          EXPECT_THAT(error, HasSubstr(key)) << value;
        }
        if (key != "_loss_scale_mode" || !loads) {  // a constant scale has fixed options
          EXPECT_EQ(scaler.state_dict(), loads ? state : before) << key << " = " << value;
        }
      }
      auto incomplete = valid_state;
      incomplete.erase(key);
      GradScaler scaler(unusual_options());
      const auto before = scaler.state_dict();
      const std::string error = message_of([&] { scaler.load_state_dict(incomplete); });
      if (error != "no error") {  // min_scale and the like are optional
        EXPECT_THAT(error, HasSubstr("lacks \"" + key + "\""));
        EXPECT_EQ(scaler.state_dict(), before);
      }
    }
  }
  EXPECT_GT(refused, 60);
}

/// Otherwise the next step would use scaled gradients as unscaled.
TEST(GradScalerStateDict, LoadDiscardsPendingIteration) {
  GradScaler scaler({.init_scale = 8});
  std::stringstream stream;
  torch::save(scaler, stream);
  torch::Tensor x = torch::zeros({1}, torch::requires_grad());
  torch::optim::SGD optimizer(std::vector<torch::Tensor>{x}, torch::optim::SGDOptions(1));
  const auto backward = [&] {
    optimizer.zero_grad();
    scaler.scale(x.mul(0.5).sum()).backward();
  };
  backward();
  scaler.unscale_(optimizer);
  torch::load(scaler, stream);
  EXPECT_FALSE(scaler.has_pending_update());
  backward();
  scaler.step(optimizer);
  scaler.update();
  EXPECT_EQ(x.item<float>(), -0.5F);
}

}  // namespace
