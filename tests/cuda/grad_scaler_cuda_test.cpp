// GradScaler on a GPU, with mezzo's kernels if the program links mezzo::cuda, otherwise ATen's.

#include <mezzo/kernels/unscale.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "../support/special_values.h"
#include "cuda_test.h"

namespace {

using cuda_test::ForbidSyncGuard;
using cuda_test::kGpu;
using mezzo::GradScaler;
using mezzo::GradScalerOptions;

class GradScalerCuda : public cuda_test::CudaTest {};

TEST_F(GradScalerCuda, UnscaleMatchesCpuWithoutSync) {
  auto gradients = cuda_test::mixed_gradients();
  std::vector<torch::Tensor> expected;
  for (const auto& gradient : gradients) expected.push_back(gradient.cpu());
  auto found_on_cpu = torch::zeros({});
  mezzo::detail::unscale_and_check_(expected, found_on_cpu, torch::full({}, 0.3F));
  EXPECT_EQ(found_on_cpu.item<float>(), 0.0F);
  auto found_inf = torch::zeros({}, kGpu);
  const auto inv_scale = torch::full({}, 0.3F, kGpu);
  {
    const ForbidSyncGuard forbid;
    mezzo::detail::unscale_and_check_(gradients, found_inf, inv_scale);
  }
  EXPECT_EQ(found_inf.item<float>(), 0.0F);
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    EXPECT_TRUE(torch::equal(gradients[i].cpu(), expected[i])) << i;
  }
}

TEST_F(GradScalerCuda, FindsNonfiniteElementsAndProducts) {
  const auto found = [](const std::vector<torch::Tensor>& gradients, float inv_scale) {
    auto found_inf = torch::zeros({}, kGpu);
    mezzo::detail::unscale_and_check_(gradients, found_inf, torch::full({}, inv_scale, kGpu));
    return found_inf.item<float>() == 1.0F;
  };
  for (const int64_t index : {0, 1, 4095, 70000}) {
    auto gradient = torch::ones({70001}, kGpu);
    gradient[index] = kInfinity;
    EXPECT_TRUE(found({torch::ones({5}, kGpu), gradient}, 0.5F)) << index;
  }
  EXPECT_FALSE(found({torch::full({5}, 1e30F, kGpu)}, 0.5F));
  EXPECT_TRUE(found({torch::full({5}, 1e30F, kGpu)}, 1e20F));
  EXPECT_TRUE(found({torch::zeros({5}, kGpu)}, kInfinity));
}

TEST_F(GradScalerCuda, UpdateMatchesOptionsWithoutSync) {
  const auto options = GradScalerOptions::dynamic({.init_scale = 64,
                                                   .growth_factor = 3,
                                                   .growth_interval = 2,
                                                   .min_scale = 8,
                                                   .max_scale = 300});
  auto state = options.initial_state();
  const auto count = torch::dtype(torch::kInt).device(kGpu);
  const mezzo::detail::ScaleTensors tensors{torch::full({}, state.scale, kGpu),
                                            torch::empty({}, kGpu), torch::zeros({}, count),
                                            torch::ones({}, count)};
  for (const char iteration : std::string("....iiiiii.....i")) {
    const bool found_inf = iteration == 'i';
    const auto flag = torch::full({}, found_inf ? 1.0F : 0.0F, kGpu);
    {
      const ForbidSyncGuard forbid;
      mezzo::detail::update_scale_(options, tensors, flag);
    }
    state = options.next(state, found_inf);
    EXPECT_EQ(tensors.scale.item<float>(), state.scale);
    EXPECT_EQ(tensors.inv_scale.item<float>(), 1.0F / state.scale);
    EXPECT_EQ(tensors.growth_tracker.item<int32_t>(), state.growth_tracker);
  }
}

TEST_F(GradScalerCuda, SupportsCpuAndGpuParameters) {
  const auto make = [](torch::Device device) {
    const auto x = torch::zeros({2}, torch::device(device).requires_grad(true));
    x.mutable_grad() = torch::full({2}, 8.0F, device);
    return x;
  };
  const auto cpu = make(torch::kCPU);
  const auto gpu = make(kGpu);
  torch::optim::SGD optimizer({cpu, gpu}, torch::optim::SGDOptions(1.0));
  GradScaler scaler({.init_scale = 8});
  scaler.on_skip(nullptr);
  const auto scaled = scaler.scale(
      std::vector<torch::Tensor>{torch::ones({}, kGpu), torch::ones({2}, torch::kCPU)});
  EXPECT_TRUE(scaled[0].device().type() == kGpu);
  EXPECT_TRUE(torch::equal(scaled[1], torch::full({2}, 8.0F)));
  EXPECT_TRUE(scaler.step(optimizer).applied());
  EXPECT_TRUE(torch::equal(cpu, gpu.cpu()));
  EXPECT_TRUE(torch::equal(cpu, torch::full({2}, -1.0F)));
  scaler.update();
  cpu.mutable_grad()[0] = kInfinity;
  EXPECT_FALSE(scaler.step(optimizer).applied()) << "an inf on one device holds for all";
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 4.0);
}

TEST_F(GradScalerCuda, HysteresisNeedsMezzoKernels) {
  GradScaler scaler({.init_scale = 8, .hysteresis = 2});
  const auto loss = torch::zeros({}, kGpu);
  if (!cuda_test::has_mezzo_kernels()) {
    EXPECT_THROW((void)scaler.scale(loss), c10::Error);
    return;
  }
  scaler.on_skip(nullptr);
  const auto x = torch::zeros({1}, torch::device(kGpu).requires_grad(true));
  torch::optim::SGD optimizer({x}, torch::optim::SGDOptions(1.0));
  std::vector<double> scales;
  for (int i = 0; i < 3; ++i) {
    (void)scaler.scale(loss);
    x.mutable_grad() = torch::full({1}, kInfinity, kGpu);
    scaler.step(optimizer);
    scaler.update();
    scales.push_back(scaler.get_scale());
  }
  EXPECT_EQ(scales, (std::vector<double>{8, 4, 2}));
}

// The weight's float16 gradient is the input times the scale: 20000 x 4 is inf, 5 x 4 is not.
TEST_F(GradScalerCuda, RunsInCudaGraph) {
  const auto stream = cuda_test::new_stream();
  const c10::StreamGuard guard(stream);  // before tensors are filled, on this stream
  const auto half = torch::dtype(torch::kHalf).device(kGpu);
  const auto weight = torch::ones({1}, torch::device(kGpu).requires_grad(true));
  const auto input = torch::full({1}, 5.0F, half);
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.1));
  GradScaler scaler({.init_scale = 4, .growth_interval = 2});
  const auto iterate = [&] {
    weight.mutable_grad() = torch::Tensor();
    scaler.scale((weight.to(torch::kHalf) * input).sum()).backward();
    scaler.unscale_(optimizer);
    scaler.update();
  };
  iterate();
  scaler.load_state_dict(GradScaler({.init_scale = 4, .growth_interval = 2}).state_dict());
  cuda_test::Graph graph;
  graph.capture_begin();
  iterate();
  graph.capture_end();
  std::vector<double> scales;
  std::vector<double> trackers;
  for (const float value : {5.0F, 20000.0F, 5.0F, 40000.0F}) {
    input.fill_(value);
    graph.replay();
    scales.push_back(scaler.get_scale());
    trackers.push_back(scaler.state_dict().at("_growth_tracker"));
  }
  EXPECT_EQ(scales, (std::vector<double>{4, 2, 2, 1}));
  EXPECT_EQ(trackers, (std::vector<double>{1, 0, 1, 0}));
}

}  // namespace
