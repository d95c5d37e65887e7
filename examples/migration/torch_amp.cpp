// torch.amp: autocast for the forward pass, and a GradScaler. Exits with 1 if the loss does not
// decrease.
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

  torch::optim::AdamW optimizer(model->parameters(), 1e-2);
  mezzo::GradScaler scaler;  // scaler = torch.amp.GradScaler()

  torch::Tensor first_loss, loss;  // on the device, without synchronization
  for (int step = 0; step < 60; ++step) {
    const torch::Tensor input = torch::randn({64, 16}, device);
    const torch::Tensor target = input.mm(teacher).argmax(1);

    optimizer.zero_grad();
    {
      mezzo::AutocastGuard autocast(
          {.device_type = device.type()});  // with torch.autocast(device):
      loss = torch::nn::functional::cross_entropy(model->forward(input), target);
    }
    scaler.scale(loss).backward();
    scaler.unscale_(optimizer);  // optional: for clipping
    torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    scaler.step(optimizer);
    scaler.update();

    if (step == 0) first_loss = loss.detach();
  }
  const double before = first_loss.item<double>(), after = loss.item<double>();
  std::printf("loss %.3f -> %.3f, scale %g\n", before, after, scaler.get_scale());
  return after < before / 2 ? 0 : 1;
}
