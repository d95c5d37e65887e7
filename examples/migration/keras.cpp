// Keras: LossScaleOptimizer wraps an optimizer; its step unscales, checks and updates the scale.
// Exits with 1 if the loss does not decrease.
#include <mezzo/mezzo.h>

#include <torch/torch.h>

#include <cstdio>

int main() {
  torch::manual_seed(0);
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::nn::Sequential model(torch::nn::Linear(16, 64), torch::nn::GELU(),
                              torch::nn::Linear(64, 4));
  model->to(device);
  const torch::Tensor teacher = torch::randn({16, 4}, device);  // defines the classes

  torch::optim::AdamW adamw(model->parameters(), 1e-2);
  mezzo::LossScaleOptimizer optimizer(adamw);

  torch::Tensor first_loss, loss;  // on the device, without synchronization
  for (int step = 0; step < 60; ++step) {
    const torch::Tensor input = torch::randn({64, 16}, device);
    const torch::Tensor target = input.mm(teacher).argmax(1);

    optimizer.zero_grad();
    {
      mezzo::AutocastGuard autocast(
          {.device_type = device.type()});  // set_global_policy("mixed_float16")
      loss = torch::nn::functional::cross_entropy(model->forward(input), target);
    }
    optimizer.scale_loss(loss).backward();
    optimizer.step({.max_norm = 1.0});  // optimizer.apply(gradients)

    if (step == 0) first_loss = loss.detach();
  }
  const double before = first_loss.item<double>(), after = loss.item<double>();
  std::printf("loss %.3f -> %.3f, scale %g\n", before, after, optimizer.loss_scale());
  return after < before / 2 ? 0 : 1;
}
