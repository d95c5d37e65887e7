// What runs on other devices, walked with CPU and "meta" tensors in their place.

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mezzo/grad_scaler.h>

#include <limits>
#include <vector>

#include "error_of.h"
#include "tiny_optimizer.h"

namespace {

using grad_scaler_test::error_of;
using grad_scaler_test::sgd;
using mezzo::LossScale;
using testing::HasSubstr;

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
  const auto groups = mezzo::detail::gradients_by_device(
      mezzo::detail::with_gradient(optimizer, /*allow_fp16=*/false));
  ASSERT_EQ(groups.size(), 2U);
  EXPECT_EQ(groups[0].device, torch::kCPU);
  EXPECT_EQ(groups[0].tensors.size(), 2U);
  EXPECT_EQ(groups[1].device, torch::kMeta);
}

}  // namespace
