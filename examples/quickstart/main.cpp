// Mixed precision with a loss scale, clipping and a learning-rate schedule.
#include <mezzo/mezzo.h>

#include <torch/torch.h>

#include <cstdio>

int main() {
  torch::manual_seed(0);
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::nn::Sequential model(torch::nn::Linear(16, 64), torch::nn::GELU(),
                              torch::nn::Linear(64, 4));
  model->to(device);
  torch::nn::CrossEntropyLoss criterion;
  const auto teacher = torch::randn({16, 4}, device);

  const auto precision =
      mezzo::recommended_autocast(device);  // float16, bfloat16 or float32, with a reason
  std::printf("%s\n", precision.reason.c_str());
  mezzo::GradScaler scaler;                                  // 2^16, x2, x0.5, every 2000 steps
  mezzo::optim::AdamW optimizer(model->parameters(), 1e-2);  // or any optimizer of torch::optim
  mezzo::LinearSchedule schedule(optimizer, {.warmup_steps = 10, .total_steps = 100});

  for (int step = 0; step < 100; ++step) {
    const auto input = torch::randn({64, 16}, device);
    const auto target = input.mm(teacher).argmax(1);
    optimizer.zero_grad();
    const auto loss =
        mezzo::autocast(precision, [&] { return criterion(model->forward(input), target); });
    scaler.scale(loss).backward();
    const auto result = scaler.step(optimizer, {.max_norm = 1.0});  // unscales, clips, updates
    scaler.update();
    schedule.step(result);  // advances only if the step was applied
    if (step % 20 == 19) std::printf("step %3d  loss %.3f\n", step + 1, loss.item<double>());
  }
}
