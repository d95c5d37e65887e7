#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>

namespace {

using mezzo::GradScaler;
using mezzo::LossScaleKind;
using testing::HasSubstr;
using testing::ThrowsMessage;

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

}  // namespace
