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

  double first_loss = 0;
  double last_loss = 0;
  for (int step = 0; step < 60; ++step) {
    const torch::Tensor input = torch::randn({64, 16}, device);
    const torch::Tensor target = input.mm(teacher).argmax(1);

    optimizer.zero_grad();
    torch::Tensor loss;
    {
      mezzo::AutocastGuard autocast({.device = device.type()});
      loss = torch::nn::functional::cross_entropy(model->forward(input), target);
    }
    scaler.scale(loss).backward();
    scaler.step(optimizer);  // skipped if a gradient is inf or NaN
    scaler.update();

    last_loss = loss.item<double>();
    first_loss = step == 0 ? last_loss : first_loss;
    if (step % 10 == 9) {
      std::printf("step %2d  loss %.3f  scale %g\n", step + 1, last_loss, scaler.get_scale());
    }
  }
  return last_loss < first_loss / 2 ? 0 : 1;
}
