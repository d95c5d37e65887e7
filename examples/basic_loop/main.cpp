// Mixed precision in its shortest form: autocast around the forward pass, a loss scale around
// backward. On CUDA it computes in half, on the CPU in bfloat16. Exits with 1 if the loss did not
// fall.
#include <mezzo/mezzo.h>

#include <torch/torch.h>

#include <cstdio>

int main() {
  torch::manual_seed(0);
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::nn::Sequential model(torch::nn::Linear(16, 64), torch::nn::GELU(),
                              torch::nn::Linear(64, 4));
  model->to(device);
  const torch::Tensor teacher = torch::randn({16, 4}, device);  // which class each input belongs to

  mezzo::GradScaler scaler;
  torch::optim::AdamW optimizer(model->parameters(), 1e-2);

  torch::Tensor first_loss, loss;  // on the device: item() would wait for it
  for (int step = 0; step < 60; ++step) {
    const torch::Tensor input = torch::randn({64, 16}, device);
    const torch::Tensor target = input.mm(teacher).argmax(1);

    optimizer.zero_grad();
    {
      mezzo::AutocastGuard autocast({.device = device.type()});
      loss = torch::nn::functional::cross_entropy(model->forward(input), target);
    }
    scaler.scale(loss).backward();
    scaler.step(optimizer);  // skipped if a gradient is inf or NaN
    scaler.update();

    if (step == 0) first_loss = loss.detach();
    if (step % 10 == 9) {
      std::printf("step %2d  loss %.3f  scale %g\n", step + 1, loss.item<double>(),
                  scaler.get_scale());
    }
  }
  return loss.item<double>() < first_loss.item<double>() / 2 ? 0 : 1;
}
