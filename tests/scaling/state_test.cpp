// The scaler's state to and from a dictionary, an archive, and torch.amp.

#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <sstream>
#include <string>
#include <vector>

#include "../support/error_of.h"
#include "../support/tiny_optimizer.h"

namespace {

using mezzo::GradScaler;
using mezzo::LossScale;
using test_support::error_of;
using testing::HasSubstr;

/// Iterations of `scaler`, each with a gradient.
void run(GradScaler& scaler, const std::vector<float>& gradients) {
  const torch::Tensor x = test_support::parameter({0});
  torch::optim::SGD optimizer = test_support::sgd({x});
  for (const float gradient : gradients) {
    (void)scaler.scale(torch::zeros({}));
    test_support::set_gradient(x, {gradient});
    scaler.step(optimizer);
    scaler.update();
  }
}

LossScale unusual_options() {
  return {.init_scale = 64,
          .growth_factor = 3,
          .backoff_factor = 0.25,
          .growth_interval = 5,
          .min_scale = 0.5,
          .max_scale = 1024,
          .hysteresis = 3};
}

/// Python's scaler takes what is read from a file, and refuses a growth_interval that is a float.
TEST(GradScalerState, InAnArchiveHasCountsAsIntegers) {
  GradScaler scaler(unusual_options());
  std::stringstream file;
  torch::save(scaler, file);
  torch::serialize::InputArchive archive;
  archive.load_from(file);
  for (const char* const key : mezzo::detail::kScalerStateKeys) {
    torch::Tensor value;
    archive.read(key, value, /*is_buffer=*/true);
    const bool is_count = std::string(key).find("interval") != std::string::npos ||
                          std::string(key).find("hysteresis") != std::string::npos ||
                          std::string(key) == "_growth_tracker" ||
                          std::string(key) == "_loss_scale_kind";
    EXPECT_EQ(value.scalar_type(), is_count ? torch::kLong : torch::kDouble) << key;
  }
}

/// As files were before.
TEST(GradScalerState, InAnArchiveMayHaveCountsAsFloats) {
  std::stringstream file;
  torch::serialize::OutputArchive written;
  for (const auto& [key, value] : GradScaler(unusual_options()).state_dict()) {
    written.write(key, torch::tensor(value, torch::kDouble), /*is_buffer=*/true);
  }
  written.save_to(file);
  GradScaler scaler;
  torch::load(scaler, file);
  EXPECT_EQ(scaler.get_growth_interval(), 5);
}

TEST(GradScalerState, ComesBackWhole) {
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

TEST(GradScalerState, GoesThroughAnArchive) {
  GradScaler source(unusual_options());
  source.on_skip(nullptr);
  run(source, {1, 1, kInfinity});
  std::stringstream stream;
  torch::save(source, stream);
  GradScaler restored;
  torch::load(restored, stream);
  EXPECT_EQ(restored.state_dict(), source.state_dict());
}

TEST(GradScalerState, AFixedScaleStaysFixed) {
  GradScaler restored;
  restored.load_state_dict(GradScaler(LossScale::fixed(128)).state_dict());
  EXPECT_EQ(restored.rule().kind, mezzo::LossScaleKind::fixed);
  EXPECT_EQ(restored.get_scale(), 128.0);
}

TEST(GradScalerState, TakesWhatTorchWroteAndKeepsItsOwnBounds) {
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
  EXPECT_EQ(state.at("_hysteresis_left"), 3);
}

TEST(GradScalerState, RefusesADisabledScalersStateInTorchsWords) {
  const auto disabled = GradScaler({.enabled = false});
  const std::string words =
      "The source state dict is empty, possibly because it was saved from a disabled instance of "
      "GradScaler.";
  GradScaler scaler;
  EXPECT_THAT(error_of([&] { scaler.load_state_dict(disabled.state_dict()); }),
              testing::StartsWith(words));
  std::stringstream stream;
  torch::save(disabled, stream);
  EXPECT_THAT(error_of([&] { torch::load(scaler, stream); }), testing::StartsWith(words));
}

TEST(GradScalerState, RefusesABadStateAndStaysAsItWas) {
  GradScaler scaler(unusual_options());
  run(scaler, {1, 1});
  const auto before = scaler.state_dict();
  const auto error_with = [&](const std::string& key, double value) {
    auto state = before;
    state[key] = value;
    return error_of([&] { scaler.load_state_dict(state); });
  };
  EXPECT_THAT(error_with("scale", 0), HasSubstr("scale is 0"));
  EXPECT_THAT(error_with("scale", 4096), HasSubstr("scale is 4096"));
  EXPECT_THAT(error_with("scale", std::nan("")), HasSubstr("scale is nan"));
  EXPECT_THAT(error_with("growth_factor", 1), HasSubstr("growth_factor is 1"));
  EXPECT_THAT(error_with("backoff_factor", 0), HasSubstr("backoff_factor is 0"));
  EXPECT_THAT(error_with("growth_interval", 2.5), HasSubstr("growth_interval = 2.5"));
  EXPECT_THAT(error_with("_growth_tracker", -1), HasSubstr("_growth_tracker = -1"));
  EXPECT_THAT(error_with("_hysteresis_left", std::nan("")), HasSubstr("_hysteresis_left = nan"));
  EXPECT_THAT(error_with("_loss_scale_kind", 3), HasSubstr("_loss_scale_kind = 3"));
  auto incomplete = before;
  incomplete.erase("_growth_tracker");
  EXPECT_THAT(error_of([&] { scaler.load_state_dict(incomplete); }),
              HasSubstr("lacks \"_growth_tracker\""));
  EXPECT_EQ(scaler.state_dict(), before);
}

TEST(GradScalerState, IsNotSavedInTheMiddleOfAnIteration) {
  GradScaler scaler;
  (void)scaler.scale(torch::zeros({}));
  const torch::Tensor x = test_support::parameter({0});
  torch::optim::SGD optimizer = test_support::sgd({x});
  test_support::set_gradient(x, {1});
  scaler.unscale_(optimizer);
  std::stringstream stream;
  EXPECT_THAT(
      error_of([&] { torch::save(scaler, stream); }),
      testing::StartsWith("A GradScaler instance may only be pickled at the beginning of an "
                          "iteration, or at the end after scaler.update()."));
}

/// Otherwise the step after the load would take scaled gradients for unscaled ones.
TEST(GradScalerState, ThatIsLoadedBeginsAnIteration) {
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
  EXPECT_FALSE(scaler.is_in_iteration());
  backward();
  scaler.step(optimizer);
  scaler.update();
  EXPECT_EQ(x.item<float>(), -0.5F);
}

}  // namespace
