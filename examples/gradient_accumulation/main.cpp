// Gradient accumulation with a loss scale: gradients of several micro-batches are unscaled, clipped
// and applied together, so that all of them have the same scale. Uses float16 on CUDA and bfloat16
// on the CPU. Exits with 1 if the loss does not decrease.
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

  mezzo::GradScaler scaler;
  torch::optim::AdamW optimizer(model->parameters(), 1e-2);
  mezzo::GradientAccumulation accumulation(/*gradient_accumulation_steps=*/4);

  torch::Tensor first_loss, batch_loss;  // on the device, without synchronization
  // Each turn of this loop could be a callback of a trainer, which has no loop of its own.
  for (int batch = 0; batch < 240; ++batch) {
    accumulation.next();
    if (accumulation.index() == 0) {
      optimizer.zero_grad();
      batch_loss = torch::zeros({}, device);
    }
    const torch::Tensor input = torch::randn({16, 16}, device);
    const torch::Tensor target = input.mm(teacher).argmax(1);
    torch::Tensor loss;
    {
      mezzo::AutocastGuard autocast({.device_type = device.type()});
      loss = torch::nn::functional::cross_entropy(model->forward(input), target);
      loss = accumulation.normalize_loss(loss);  // the sum over the window is the mean
    }
    scaler.scale(loss).backward();
    batch_loss += loss.detach();
    if (!accumulation.is_last()) continue;

    scaler.unscale_(optimizer);
    torch::nn::utils::clip_grad_norm_(model->parameters(), /*max_norm=*/0.25);
    scaler.step(optimizer);
    scaler.update();

    const int step = batch / 4;
    if (step == 0) first_loss = batch_loss;
    if (step % 10 == 9) {
      std::printf("step %2d  loss %.3f  scale %g\n", step + 1, batch_loss.item<double>(),
                  scaler.get_scale());
    }
  }
  return batch_loss.item<double>() < first_loss.item<double>() / 2 ? 0 : 1;
}
