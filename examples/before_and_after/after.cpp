// The training loop of before.cpp in mixed precision: half on CUDA, bfloat16 on the CPU.
// Exits with 1 if the loss did not fall.
#include <mezzo/mezzo.h>

#include <torch/torch.h>

#include <cstdio>

int main() {
  torch::manual_seed(0);
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::nn::Sequential model(torch::nn::Linear(16, 64), torch::nn::GELU(),
                              torch::nn::Linear(64, 4));
  model->to(device);
  const torch::Tensor teacher = torch::randn({16, 4}, device);
  mezzo::optim::AdamW optimizer(model->parameters(), 1e-2);
  mezzo::GradScaler scaler;

  double first = 0, last = 0;
  for (int step = 0; step < 60; ++step) {
    const torch::Tensor input = torch::randn({64, 16}, device);
    const torch::Tensor target = input.mm(teacher).argmax(1);
    optimizer.zero_grad();
    const auto loss = mezzo::autocast({.device = device.type()}, [&] {
      return torch::nn::functional::cross_entropy(model->forward(input), target);
    });
    scaler.scale(loss).backward();
    scaler.step(optimizer, {.max_norm = 1.0});
    scaler.update();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  std::printf("loss %.3f -> %.3f\n", first, last);
  return last < first / 2 ? 0 : 1;
}
