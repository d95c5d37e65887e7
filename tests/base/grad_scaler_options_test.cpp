#include <mezzo/base/grad_scaler_options.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "../support/message_of.h"
#include "../support/special_values.h"

namespace {

using mezzo::GradScalerOptions;
using mezzo::LossScaleMode;
using mezzo::LossScaleState;

LossScaleState after(const GradScalerOptions& options, LossScaleState state,
                     const std::string& iterations) {
  for (const char iteration : iterations) state = options.next(state, iteration == 'i');
  return state;
}

TEST(GradScalerOptions, DefaultsMatchTorch) {
  const auto options = GradScalerOptions::dynamic();
  EXPECT_EQ(options.initial_state(), (LossScaleState{65536.0F, 0, 1}));
  EXPECT_EQ(options.growth_factor, 2.0);
  EXPECT_EQ(options.backoff_factor, 0.5);
  EXPECT_EQ(options.growth_interval, 2000);
}

// 20,000 steps with random factors, scales and found_inf.
TEST(GradScalerOptions, NextIsBitwiseIdenticalToAten) {
  std::mt19937 random(7);
  std::uniform_real_distribution<double> unit(0, 1);
  for (int run = 0; run < 200; ++run) {
    const auto options =
        GradScalerOptions::dynamic({.init_scale = std::exp(unit(random) * 170 - 85),
                                    .growth_factor = 1 + 15 * unit(random),
                                    .backoff_factor = 0.01 + 0.98 * unit(random),
                                    .growth_interval = 1 + run % 4,
                                    .min_scale = 0});
    auto state = options.initial_state();
    auto scale = torch::full({}, state.scale);
    auto tracker = torch::zeros({}, torch::kInt);
    for (int step = 0; step < 100; ++step) {
      const bool found_inf = unit(random) < 0.2;
      state = options.next(state, found_inf);
      at::_amp_update_scale_(scale, tracker, torch::full({}, found_inf ? 1.0F : 0.0F),
                             options.growth_factor, options.backoff_factor,
                             options.growth_interval);
      if (scale.item<float>() > mezzo::kMaxGrownScale) break;  // torch grows further
      ASSERT_EQ(std::bit_cast<uint32_t>(state.scale), std::bit_cast<uint32_t>(scale.item<float>()));
      ASSERT_EQ(state.growth_tracker, tracker.item<int32_t>());
    }
  }
}

TEST(GradScalerOptions, GrowthStaysFinite) {
  const auto options =
      GradScalerOptions::dynamic({.init_scale = 1e38, .growth_factor = 16, .growth_interval = 1});
  EXPECT_EQ(options.next(options.initial_state(), false), (LossScaleState{1e38F, 0, 1}));
}

// At 2^127 the reciprocal is subnormal, and 0 if subnormals are flushed, so gradients are lost.
TEST(GradScalerOptions, GrowthKeepsReciprocalNormal) {
  for (const double factor : {2.0, 1.7}) {
    const auto options =
        GradScalerOptions::dynamic({.growth_factor = factor, .growth_interval = 1});
    const auto state = after(options, options.initial_state(), std::string(400, '.'));
    EXPECT_EQ(state.scale, std::ldexp(1.0F, 126));
    EXPECT_EQ(options.next(state, true).scale, std::ldexp(1.0F, 125));
  }
}

TEST(GradScalerOptions, ReachesZeroWithoutMinScale) {
  const auto torch_like =
      GradScalerOptions::dynamic({.init_scale = 1, .growth_interval = 1, .min_scale = 0});
  const auto state = after(torch_like, torch_like.initial_state(), std::string(160, 'i'));
  EXPECT_EQ(state.scale, 0.0F);
  EXPECT_EQ(after(torch_like, state, std::string(100, '.')).scale, 0.0F);
}

TEST(GradScalerOptions, RecoversFromDefaultMinScale) {
  const auto options = GradScalerOptions::dynamic({.init_scale = 1, .growth_interval = 1});
  const auto state = after(options, options.initial_state(), std::string(1000, 'i'));
  EXPECT_EQ(state.scale, std::numeric_limits<float>::min());
  EXPECT_TRUE(std::isfinite(static_cast<float>(1.0 / static_cast<double>(state.scale))));
  EXPECT_EQ(after(options, state, std::string(126, '.')).scale, 1.0F);
}

TEST(GradScalerOptions, ClampsToMinAndMaxScale) {
  const auto options = GradScalerOptions::dynamic({.init_scale = 8,
                                                   .growth_factor = 10,
                                                   .backoff_factor = 0.1,
                                                   .growth_interval = 1,
                                                   .min_scale = 2,
                                                   .max_scale = 20});
  EXPECT_EQ(after(options, options.initial_state(), "i").scale, 2.0F);
  EXPECT_EQ(after(options, options.initial_state(), "ii").scale, 2.0F);
  EXPECT_EQ(after(options, options.initial_state(), ".").scale, 20.0F);
  EXPECT_EQ(after(options, options.initial_state(), "..").scale, 20.0F);
}

TEST(GradScalerOptions, HysteresisDelaysBackoff) {
  const auto options = GradScalerOptions::dynamic({.init_scale = 64, .hysteresis = 3});
  const auto start = options.initial_state();
  EXPECT_EQ(after(options, start, "i"), (LossScaleState{64, 0, 2}));
  EXPECT_EQ(after(options, start, "ii"), (LossScaleState{64, 0, 1}));
  EXPECT_EQ(after(options, start, "iii"), (LossScaleState{32, 0, 1}));
  EXPECT_EQ(after(options, start, "iiii"), (LossScaleState{16, 0, 1}));
}

TEST(GradScalerOptions, FiniteIterationResetsHysteresis) {
  const auto options = GradScalerOptions::dynamic({.init_scale = 64, .hysteresis = 3});
  EXPECT_EQ(after(options, options.initial_state(), "ii."), (LossScaleState{64, 1, 3}));
  EXPECT_EQ(after(options, options.initial_state(), "ii.ii"), (LossScaleState{64, 0, 1}));
  EXPECT_EQ(after(options, options.initial_state(), "iiiii.i"), (LossScaleState{8, 0, 2}));
}

TEST(GradScalerOptions, NoneAndFixedStayConstant) {
  EXPECT_EQ(GradScalerOptions::none().initial_state().scale, 1.0F);
  for (const auto& options : {GradScalerOptions::none(), GradScalerOptions::fixed(128)}) {
    const auto start = options.initial_state();
    EXPECT_EQ(after(options, start, "ii.i" + std::string(3000, '.')), start);
  }
  EXPECT_EQ(GradScalerOptions::fixed(128).initial_state().scale, 128.0F);
}

TEST(GradScalerOptions, ValidatedRoundsScalesToFloat) {
  const auto options =
      GradScalerOptions{.init_scale = 0.1, .min_scale = 0.1, .max_scale = 1e300}.validated();
  EXPECT_EQ(options.init_scale, 0.1F);
  EXPECT_EQ(options.min_scale, 0.1F);
  EXPECT_EQ(options.max_scale, mezzo::kNoMaxScale);
  EXPECT_EQ(GradScalerOptions{.mode = LossScaleMode::none}.validated(), GradScalerOptions::none());
  for (const auto& made :
       {options, GradScalerOptions::none(), GradScalerOptions::fixed(128, 64, 256)}) {
    EXPECT_EQ(made.validated(), made);
  }
}

struct InvalidOptions {
  const char* what;
  std::function<GradScalerOptions()> make;
};

// set_growth_interval can set an interval below growth_tracker, which then grows to the limit.
TEST(GradScalerOptions, GrowthTrackerStopsAtInt32Max) {
  constexpr int32_t kLargest = std::numeric_limits<int32_t>::max();
  const GradScalerOptions options =
      GradScalerOptions::dynamic({.init_scale = 4, .growth_interval = 2});
  const mezzo::LossScaleState state{.scale = 4, .growth_tracker = kLargest - 1};
  const mezzo::LossScaleState last = options.next(state, /*found_inf=*/false);
  EXPECT_EQ(last.growth_tracker, kLargest);
  EXPECT_EQ(options.next(last, /*found_inf=*/false), last);
}

TEST(GradScalerOptions, ThrowsForValuesOutOfRange) {
  const std::vector<InvalidOptions> invalid_options{
      {"init_scale is 0;", [] { return GradScalerOptions::dynamic({.init_scale = 0}); }},
      {"init_scale is -1;", [] { return GradScalerOptions::dynamic({.init_scale = -1}); }},
      {"init_scale is nan;", [=] { return GradScalerOptions::dynamic({.init_scale = kNan}); }},
      {"init_scale is 1e+39;", [] { return GradScalerOptions::dynamic({.init_scale = 1e39}); }},
      {"growth factor must be > 1.0",
       [] { return GradScalerOptions::dynamic({.growth_factor = 1}); }},
      {"growth_factor is nan", [=] { return GradScalerOptions::dynamic({.growth_factor = kNan}); }},
      {"growth_factor is inf",
       [=] { return GradScalerOptions::dynamic({.growth_factor = kInfinity}); }},
      {"backoff factor must be < 1.0",
       [] { return GradScalerOptions::dynamic({.backoff_factor = 1}); }},
      {"backoff_factor is 0", [] { return GradScalerOptions::dynamic({.backoff_factor = 0}); }},
      {"growth_interval is 0", [] { return GradScalerOptions::dynamic({.growth_interval = 0}); }},
      {"growth_interval is 3000000000",
       [] { return GradScalerOptions::dynamic({.growth_interval = 3000000000}); }},
      {"hysteresis is 0", [] { return GradScalerOptions::dynamic({.hysteresis = 0}); }},
      {"min_scale is -1", [] { return GradScalerOptions::dynamic({.min_scale = -1}); }},
      {"min_scale is inf", [=] { return GradScalerOptions::dynamic({.min_scale = kInfinity}); }},
      {"max_scale is 0",
       [] { return GradScalerOptions::dynamic({.min_scale = 0, .max_scale = 0}); }},
      {"max_scale is nan", [=] { return GradScalerOptions::dynamic({.max_scale = kNan}); }},
      {"max_scale is 1;",
       [] { return GradScalerOptions::dynamic({.min_scale = 2, .max_scale = 1}); }},
      {"init_scale is 65536;", [] { return GradScalerOptions::dynamic({.max_scale = 65535}); }},
      {"init_scale is 65536;", [] { return GradScalerOptions::dynamic({.min_scale = 65537}); }},
      {"mode must be LossScaleMode::dynamic",
       [] { return GradScalerOptions::dynamic({.mode = LossScaleMode::fixed}); }},
      {"mode is not a LossScaleMode",
       [] { return GradScalerOptions{.mode = static_cast<LossScaleMode>(9)}.validated(); }},
      {"growth_interval is 0",
       [] {
         return GradScalerOptions{.growth_interval = 0, .mode = LossScaleMode::none}.validated();
       }},
      {"scale is 0;", [] { return GradScalerOptions::fixed(0); }},
      {"scale is inf;", [=] { return GradScalerOptions::fixed(kInfinity); }},
  };
  for (const InvalidOptions& invalid : invalid_options) {
    EXPECT_THAT(test_support::message_of(invalid.make), testing::HasSubstr(invalid.what));
  }
}

}  // namespace
