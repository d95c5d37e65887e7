// How the loss scale moves, and what is said of it.

#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "../support/error_of.h"
#include "../support/tiny_optimizer.h"

namespace {

using namespace test_support;
using mezzo::GradScaler;
using mezzo::LossScale;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

TEST(GradScaler, GrowsTheScaleAfterTheIntervalOfCleanIterations) {
  OneWeight one({.init_scale = 4, .growth_interval = 2});
  EXPECT_THAT(one.scales({1, 1, kInfinity, 1, 1}), ElementsAre(4, 8, 4, 4, 8));
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
  auto scaler = quiet_scaler({.min_scale = 1, .max_scale = 1e6});
  for (const double bad : {0.0, -1.0, 0.5, 2e6, std::nan(""), 1e300}) {
    EXPECT_THAT(error_of([&] { scaler.update(bad); }), HasSubstr("new_scale is"));
  }
  for (const auto& bad :
       {torch::ones({2}), torch::ones({1}, torch::requires_grad()), torch::Tensor()}) {
    EXPECT_THAT(
        error_of([&] { scaler.update(bad); }),
        testing::StartsWith("new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
                            "torch.FloatTensor with requires_grad=False."));
  }
  EXPECT_EQ(scaler.get_scale(), 65536.0);
  scaler.update(torch::full({}, 1e9));
  EXPECT_EQ(scaler.get_scale(), 1e6);
}

TEST(GradScaler, SettersChangeTheRuleAndValidate) {
  OneWeight one({.init_scale = 16});
  GradScaler& scaler = one.scaler;
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
  EXPECT_THAT(one.scales({1}), ElementsAre(64));
}

TEST(GradScaler, SettersRefuseARuleThatHasNoGrowth) {
  GradScaler scaler(LossScale::fixed(2));
  EXPECT_THAT(error_of([&] { scaler.set_growth_factor(4); }), HasSubstr("dynamic"));
  EXPECT_THAT(error_of([&] { scaler.set_backoff_factor(0.1); }), HasSubstr("dynamic"));
  EXPECT_THAT(error_of([&] { scaler.set_growth_interval(4); }), HasSubstr("dynamic"));
}

TEST(GradScaler, AFixedScaleSkipsButNeverMoves) {
  OneWeight one(LossScale::fixed(128));
  EXPECT_FALSE(one.step(kInfinity).ran());
  EXPECT_EQ(one.scaler.get_scale(), 128.0);
  EXPECT_TRUE(one.step(128).ran());
  EXPECT_EQ(one.x.item<float>(), -1.0F);
}

TEST(GradScaler, WithoutAScaleChecksAndTouchesNeitherLossNorGradients) {
  OneWeight one(LossScale::none());
  const auto loss = one.x.sum();
  EXPECT_TRUE(one.scaler.scale(loss).is_same(loss));
  set_gradient(one.x, {3});
  const auto version = one.x.grad()._version();
  EXPECT_TRUE(one.scaler.step(one.optimizer).ran());
  EXPECT_EQ(one.x.grad()._version(), version);
  one.scaler.update();
  EXPECT_FALSE(one.step(kInfinity).ran());
  EXPECT_THAT(error_of([&] { one.scaler.update(2.0); }), HasSubstr("LossScaleKind::none"));
}

TEST(GradScaler, HysteresisSkipsWithoutBackingOffAtOnce) {
  OneWeight one({.init_scale = 8, .hysteresis = 2});
  EXPECT_THAT(one.scales({kInfinity, kInfinity, kInfinity}), ElementsAre(8, 4, 2));
}

TEST(GradScaler, TellsOfASkipOnce) {
  std::vector<std::string> lines;
  auto scaler = quiet_scaler({.loss_id = 0});
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
                       "Gradient overflow or NaN.  Skipping step, loss scaler 0 reducing loss "
                       "scale to 32768.0"}));
}

TEST(GradScaler, TellsOfASkipInTheGradModeOfWhoeverUpdates) {
  std::vector<bool> modes;
  OneWeight one;
  one.scaler.on_skip(
      [&](const mezzo::SkippedStep&) { modes.push_back(torch::GradMode::is_enabled()); });
  for (const bool mode : {true, false}) {
    const torch::AutoGradMode grad_mode(mode);
    one.step(kInfinity);
  }
  EXPECT_THAT(modes, ElementsAre(true, false));
}

/// What `steps` iterations of `one` write to the error stream.
std::vector<std::string> lines_of(OneWeight& one, int steps, float gradient) {
  testing::internal::CaptureStderr();
  for (int i = 0; i < steps; ++i) one.step(gradient);
  std::istringstream text(testing::internal::GetCapturedStderr());
  std::vector<std::string> lines;
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

TEST(GradScaler, WritesSkipsToTheErrorStreamUnlessSilenced) {
  OneWeight one(GradScaler({.init_scale = 1, .loss_id = 3}));
  EXPECT_THAT(lines_of(one, 1, kInfinity),
              ElementsAre("Gradient overflow or NaN.  Skipping step, loss scaler 3 reducing loss "
                          "scale to 0.5"));
  one.scaler.on_skip(nullptr);
  EXPECT_THAT(lines_of(one, 1, kInfinity), ElementsAre());
}

// A loss that is NaN for good would write a line a step.
TEST(GradScaler, TellsOfAScaleAtItsFloorOnceAndThenRarely) {
  OneWeight one(GradScaler({.init_scale = 4, .min_scale = 1}));
  EXPECT_EQ(lines_of(one, 2, kInfinity).size(), 2U) << "4 to 2, and 2 to 1";
  EXPECT_THAT(lines_of(one, 1, kInfinity), ElementsAre(AllOf(HasSubstr("keeping loss scale at 1.0"),
                                                             HasSubstr("look for an inf or NaN"))));
  EXPECT_EQ(lines_of(one, 998, kInfinity).size(), 0U);
  EXPECT_EQ(lines_of(one, 1, kInfinity).size(), 1U) << "the 1000th";
  one.scaler.update(2.0);
  EXPECT_EQ(lines_of(one, 1, kInfinity).size(), 1U) << "2 to 1";
  EXPECT_EQ(lines_of(one, 1, kInfinity).size(), 1U) << "at the floor again";
}

// What a loss that is NaN for good wrote, down to a scale of 5.7e-14.
TEST(GradScaler, TellsAfterTenSkipsInARowThatNoScaleCuresThemAndThenRarely) {
  OneWeight one{GradScaler()};
  const auto first = lines_of(one, 60, std::numeric_limits<float>::quiet_NaN());
  ASSERT_EQ(first.size(), 11U);
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(first[static_cast<std::size_t>(i)],
              "Gradient overflow or NaN.  Skipping step, loss scaler 0 reducing loss scale to " +
                  mezzo::detail::python_float(std::ldexp(1.0, 15 - i)));
  }
  EXPECT_EQ(first[10],
            "Gradient overflow or NaN.  Skipping step, loss scaler 0 reducing loss scale to 32.0 "
            "(step 11 in a row that was skipped; from here on one in 1000 is printed): no loss "
            "scale cures an inf or NaN in the data, the loss or the weights; "
            "mezzo::DivergenceWatch (mezzo/diagnose.h) tells which it is");
  one.scaler.update(65536.0);
  EXPECT_EQ(lines_of(one, 10, kInfinity).size(), 10U) << "update(new_scale) ends the row";
  EXPECT_EQ(lines_of(one, 1, 1).size(), 0U);
  EXPECT_EQ(lines_of(one, 10, kInfinity).size(), 10U) << "and so does a step that ran";
  EXPECT_EQ(lines_of(one, 1, kInfinity).size(), 1U);
  EXPECT_EQ(lines_of(one, 1, kInfinity).size(), 0U);
}

TEST(GradScaler, TellsACallbackHowManySkipsWereInARow) {
  std::vector<int64_t> times;
  OneWeight one({.min_scale = 32768});
  one.scaler.on_skip([&](const mezzo::SkippedStep& skip) { times.push_back(skip.times_in_a_row); });
  for (const float gradient : {kInfinity, kInfinity, kInfinity, 1.0F, kInfinity}) {
    one.step(gradient);
  }
  EXPECT_THAT(times, ElementsAre(1, 2, 3, 1));
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

}  // namespace
