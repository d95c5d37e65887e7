// Autocast on a device that is not part of libtorch: a PrivateUse1 backend with its own op list.

#include <mezzo/autocast.h>
#include <mezzo/opt_levels.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <thread>

#include "emulated_gpu.h"

namespace {

// The autocast of the backend, as torch.utils.backend_registration asks of it.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
}

class PrivateDeviceAutocast : public testing::Test {
 protected:
  PrivateDeviceAutocast() { emulated_gpu::begin(/*seed=*/1); }
  ~PrivateDeviceAutocast() override { emulated_gpu::run_all(); }

  torch::ScalarType get_product_dtype() const { return x_.mm(x_).scalar_type(); }

  torch::Tensor x_ = torch::ones({2, 2}).to(emulated_gpu::device());
};

TEST_F(PrivateDeviceAutocast, GuardsLowerProducts) {
  EXPECT_EQ(get_product_dtype(), torch::kFloat);
  {
    const mezzo::AutocastGuard<torch::kPrivateUse1> guard;
    EXPECT_EQ(get_product_dtype(), torch::kHalf);
    const mezzo::AutocastGuard inner(emulated_gpu::device(), torch::kBFloat16);
    EXPECT_EQ(get_product_dtype(), torch::kBFloat16);
    torch::ScalarType in_thread{};
    std::thread(mezzo::propagate_autocast_state([&] { in_thread = get_product_dtype(); })).join();
    EXPECT_EQ(in_thread, torch::kBFloat16);
    const mezzo::AutocastGuard<torch::kPrivateUse1> off({.enabled = false});
    EXPECT_EQ(get_product_dtype(), torch::kFloat);
  }
  EXPECT_EQ(get_product_dtype(), torch::kFloat);
}

TEST_F(PrivateDeviceAutocast, RecommendsDefaultDtype) {
  const mezzo::AutocastOptions options = mezzo::recommended_autocast(emulated_gpu::device());
  EXPECT_EQ(options.dtype, torch::kHalf);
  EXPECT_EQ(options.reason, "float16: libtorch's default on hostgpu; scale the loss");
  const mezzo::AutocastOptions from_env = mezzo::autocast_from_env(emulated_gpu::device());
  EXPECT_THAT(from_env.reason, testing::StartsWith("float16: "));
}

TEST_F(PrivateDeviceAutocast, ListsAndOverridesOps) {
  const auto list = mezzo::autocast_op_list(torch::kPrivateUse1);
  EXPECT_EQ(list.cast_policy("aten::mm"), mezzo::CastPolicy::lower_precision_fp);
  EXPECT_EQ(list.cast_policy("aten::mse_loss"), mezzo::CastPolicy::fp32);
  const auto overrides = mezzo::OpOverrides().deny("aten::mm").allow("aten::mul.Tensor");
  mezzo::install_op_overrides(overrides);
  const mezzo::AutocastGuard guard({.device_type = torch::kPrivateUse1, .op_overrides = overrides});
  EXPECT_EQ(get_product_dtype(), torch::kFloat);
  EXPECT_EQ((x_ * x_).scalar_type(), torch::kHalf);
  const auto scale = mezzo::float_function([](const torch::Tensor& x) { return x * 2; });
  EXPECT_EQ(scale(x_.to(torch::kHalf)).scalar_type(), torch::kFloat);
}

// Each way to train in mixed precision: a guard with a GradScaler, and optimization level O1.
TEST_F(PrivateDeviceAutocast, TrainsWithGradScalerAndAmp) {
  for (const bool uses_amp : {false, true}) {
    torch::manual_seed(0);
    torch::nn::Linear model(4, 1);
    model->to(emulated_gpu::device());
    mezzo::optim::AdamW optimizer(model->parameters(), 0.1);
    std::optional<mezzo::Amp> amp;
    if (uses_amp) amp.emplace(mezzo::initialize(model, optimizer, "O1"));
    mezzo::GradScaler scaler;
    const torch::Tensor input = torch::randn({8, 4}).to(emulated_gpu::device());
    const torch::Tensor target = torch::ones({8, 1}).to(emulated_gpu::device());
    std::optional<double> first;
    double last = 0;
    for (int step = 0; step < 40; ++step) {
      optimizer.zero_grad();
      torch::Tensor output;
      if (uses_amp) {
        output = amp->forward(model, input);
      } else {
        const mezzo::AutocastGuard guard(emulated_gpu::device());
        output = model(input);
      }
      EXPECT_EQ(output.scalar_type(), torch::kHalf);
      const torch::Tensor loss = (output.to(torch::kFloat) - target).square().mean();
      if (uses_amp) {
        amp->backward(loss, optimizer);
        amp->step(optimizer);
      } else {
        scaler.scale(loss).backward();
        scaler.step(optimizer);
        scaler.update();
      }
      last = loss.item<double>();
      if (!first) first = last;
    }
    EXPECT_LT(last, *first / 10) << uses_amp;
  }
}

}  // namespace
