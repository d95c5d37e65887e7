// README's loop.
#include <mezzo/mezzo.h>

#include <torch/torch.h>

void train() {
  torch::nn::Linear model(8, 1);
  const torch::Tensor data = torch::randn({16, 8});
  const torch::Tensor target = torch::randn({16, 1});

  mezzo::GradScaler scaler;
  mezzo::optim::AdamW optimizer(model->parameters(), 2e-5);
  mezzo::LinearSchedule schedule(optimizer, {.warmup_steps = 2, .total_steps = 10});
  for (int i = 0; i < 10; ++i) {
    optimizer.zero_grad();
    torch::Tensor loss;
    {
      mezzo::AutocastGuard<torch::kCPU> autocast;
      loss = torch::mse_loss(model->forward(data), target);
    }
    scaler.scale(loss).backward();
    auto result = scaler.step(optimizer, {.max_norm = 1.0});
    scaler.update();
    schedule.step(result);
  }
}
