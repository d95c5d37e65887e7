// The scaler at work: a small model in fp16 on the CPU, whose first scaled gradients overflow.

#include <mezzo/autocast/autocast.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <vector>

namespace {

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
