// Code paths of other devices, tested with CPU and meta tensors.

#include <mezzo/kernels/unscale.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/record_function.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../support/message_of.h"
#include "../support/tiny_optimizer.h"

namespace {

using mezzo::GradScaler;
using mezzo::GradScalerOptions;
using test_support::message_of;
using test_support::sgd;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::Pair;

TEST(AtenFallback, UnscalesMixedDtypesAndChecksProducts) {
  const std::vector<torch::Tensor> gradients{
      torch::full({2}, 8.0F), torch::full({1}, 8.0).to(torch::kDouble), torch::full({3}, 16.0F)};
  auto found_inf = torch::zeros({});
  mezzo::detail::unscale_aten_(gradients, found_inf, torch::full({}, 0.5F));
  EXPECT_EQ(found_inf.item<float>(), 0.0F);
  EXPECT_TRUE(torch::equal(gradients[0], torch::full({2}, 4.0F)));
  EXPECT_EQ(gradients[1].item<double>(), 4.0);
  EXPECT_TRUE(torch::equal(gradients[2], torch::full({3}, 8.0F)));
  gradients[1][0] = std::numeric_limits<double>::infinity();
  mezzo::detail::unscale_aten_(gradients, found_inf, torch::ones({}));
  EXPECT_EQ(found_inf.item<float>(), 1.0F);
}

TEST(AtenFallback, UpdateMatchesGradScalerOptions) {
  for (const auto& rule :
       {GradScalerOptions::dynamic({.init_scale = 4,
       .growth_factor = 8,
       .growth_interval = 2,
       .min_scale = 2,
       .max_scale = 16}),
        GradScalerOptions::dynamic(
            {.init_scale = 0x1p122, .growth_factor = 8, .growth_interval = 1}),
        GradScalerOptions::dynamic(
            {.init_scale = 0x1p127, .growth_factor = 1.5, .growth_interval = 1})}) {
    auto state = rule.initial_state();
    const mezzo::detail::ScaleTensors tensors{torch::full({}, state.scale), torch::empty({}),
                                              torch::zeros({}, torch::kInt), torch::Tensor()};
    for (const bool found_inf : {false, false, true, true, true, true, false, false}) {
      state = rule.next(state, found_inf);
      mezzo::detail::update_scale_aten_(rule, tensors, torch::full({}, found_inf ? 1.0F : 0.0F));
      EXPECT_EQ(tensors.scale.item<float>(), state.scale);
      EXPECT_EQ(tensors.inv_scale.item<float>(), 1.0F / state.scale);
      EXPECT_EQ(tensors.growth_tracker.item<int32_t>(), state.growth_tracker);
    }
  }
}

TEST(AtenFallback, ThrowsForHysteresis) {
  const auto refused = [] {
    mezzo::detail::check_scale_update_supported(GradScalerOptions::dynamic({.hysteresis = 2}),
                                                torch::kXPU);
  };
  EXPECT_THAT(message_of(refused), HasSubstr("mezzo::cuda"));
  EXPECT_NO_THROW(
      mezzo::detail::check_scale_update_supported(GradScalerOptions::dynamic(), torch::kXPU));
}

// A step multiplies by the inverse, which must be updated with the scale.
TEST(GradScaler, InverseScaleFollowsScale) {
  auto x = test_support::parameter({0});
  mezzo::optim::SGD optimizer({x}, 1.0);
  GradScaler scaler(
      {.init_scale = 12, .growth_factor = 3, .growth_interval = 1, .max_scale = 1000});
  scaler.on_skip(nullptr);
  const auto expect_scale = [&](float scale, float gradient = 1) {
    (void)scaler.scale(torch::zeros({}));
    EXPECT_EQ(scaler.get_scale(), scale);
    test_support::set_grad(x, {gradient});
    x.detach().zero_();
    scaler.step(optimizer);
    EXPECT_EQ(x.item<float>(), std::isinf(gradient) ? 0 : -1.0F / scale);
  };
  expect_scale(12);
  scaler.update();
  expect_scale(36, std::numeric_limits<float>::infinity());
  scaler.update();
  expect_scale(18);
  scaler.update(7.0);
  expect_scale(7);
  scaler.update(torch::full({1}, 5000.0, torch::kDouble));
  expect_scale(1000);
  scaler.update();
  expect_scale(1000);
  scaler.update();
  scaler.load_state_dict(GradScaler({.init_scale = 3}).state_dict());
  expect_scale(3);
}

// Scales from subnormal ones, with an inverse of inf, to those with a subnormal inverse.
TEST(InverseScale, IsBitwiseIdenticalToReciprocal) {
  torch::manual_seed(1);
  const auto scales =
      torch::cat({torch::rand({20000}) * torch::pow(2.0F, torch::randint(-149, 128, {20000})),
                  torch::tensor({0.0F, 1.0F, 3.0F, 65536.0F, 3e38F})});
  const auto expected = scales.reciprocal();
  for (int64_t i = 0; i < scales.numel(); ++i) {
    const float inverse = mezzo::detail::compute_inv_scale(scales[i].item<float>());
    EXPECT_EQ(inverse, expected[i].item<float>()) << scales[i].item<float>();
  }
}

/// Records the names of the ops that this thread calls in a scope.
class CalledOps {
 public:
  CalledOps() : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(note))) {
    called_.clear();
  }
  ~CalledOps() { at::removeCallback(handle_); }
  CalledOps(const CalledOps&) = delete;
  CalledOps& operator=(const CalledOps&) = delete;

  static const std::vector<std::string>& names() { return called_; }

 private:
  static std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& op) {
    called_.emplace_back(op.name());
    return nullptr;
  }

  static inline thread_local std::vector<std::string> called_;
  at::CallbackHandle handle_;
};

// Each ATen op would be a kernel launch.
TEST(GradScaler, StepComputesNoInverseScale) {
  const auto x = torch::ones({4}).requires_grad_();
  mezzo::optim::AdamW optimizer({x});
  GradScaler scaler({.init_scale = 8, .growth_interval = 1});
  for (int i = 0; i < 2; ++i) {  // the first makes the state
    scaler.scale(x.sum()).backward();
    CalledOps called;
    scaler.step(optimizer, {.max_norm = 1.0});
    scaler.update();
    EXPECT_THAT(called.names(), Not(Contains("aten::reciprocal")));
    EXPECT_THAT(called.names(), Not(IsEmpty())) << "ops are recorded";
  }
}

TEST(Gradients, GroupedByDevice) {
  const auto on = [](torch::Device device) {
    const auto x = torch::zeros({2}, torch::device(device).requires_grad(true));
    x.mutable_grad() = torch::zeros({2}, device);
    return x;
  };
  const auto optimizer = sgd({on(torch::kCPU), on(torch::kMeta), on(torch::kCPU)});
  const auto gradients = mezzo::detail::dense_gradients(mezzo::detail::make_torch_plan(optimizer));
  std::vector<std::pair<torch::DeviceType, std::size_t>> groups;
  mezzo::detail::for_each_device(gradients, [&](const auto& here) {
    groups.emplace_back(here.back().device().type(), here.size());
  });
  EXPECT_THAT(groups, ElementsAre(Pair(torch::kCPU, 2), Pair(torch::kMeta, 1)));
}

TEST(GradScaler, ChecksAllDevicesBeforeWriting) {
  auto x = test_support::parameter({0});
  const auto y = torch::zeros({2}, torch::kMeta).requires_grad_();
  test_support::set_grad(x, {4});
  y.mutable_grad() = torch::zeros({1}, torch::kMeta).expand({2});
  auto optimizer = sgd({x, y});
  auto scaler = test_support::make_silent_scaler({.init_scale = 4});
  EXPECT_THAT(message_of([&] { scaler.unscale_(optimizer); }), HasSubstr("clone() it first"));
  EXPECT_EQ(x.grad().item<float>(), 4);
  y.mutable_grad() = torch::Tensor();
  scaler.step(optimizer);
  EXPECT_EQ(x.item<float>(), -1);
}

}  // namespace
