// Two models, two optimizers, two losses, a gradient penalty (WGAN-GP) and one loss scale. The
// generator learns to make points of a normal distribution around (3, -2).
// Exits with 1 if the points that it makes lie elsewhere.
#include <mezzo/mezzo.h>

#include <torch/torch.h>

#include <cstdio>

namespace {

torch::nn::Sequential network(int64_t in, int64_t out) {
  return torch::nn::Sequential(torch::nn::Linear(in, 64), torch::nn::SiLU(),
                               torch::nn::Linear(64, 64), torch::nn::SiLU(),
                               torch::nn::Linear(64, out));
}

}  // namespace

int main() {
  torch::manual_seed(0);
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  auto generator = network(8, 2);
  auto critic = network(2, 1);
  generator->to(device);
  critic->to(device);
  const auto center = torch::tensor({3.0F, -2.0F}).to(device);

  const mezzo::AutocastOptions precision{.device_type = device.type()};
  mezzo::optim::Adam for_generator(generator->parameters(),
                                   mezzo::optim::AdamOptions(1e-3).betas({0.5, 0.9}));
  mezzo::optim::Adam for_critic(critic->parameters(),
                                mezzo::optim::AdamOptions(2e-3).betas({0.5, 0.9}));
  mezzo::GradScaler scaler;  // shared: the losses have about the same size

  const auto train_critic = [&] {
    for_critic.zero_grad();  // also what the generator's backward left there
    const auto real = center + 0.5 * torch::randn({64, 2}, device);
    const auto part = torch::rand({64, 1}, device);
    torch::Tensor between, loss, score;
    {
      const mezzo::AutocastGuard autocast(precision);
      const auto made = generator->forward(torch::randn({64, 8}, device)).detach();
      loss = critic->forward(made).mean() - critic->forward(real).mean();
      between = (part * real + (1 - part) * made).requires_grad_();
      score = critic->forward(between).sum();
    }
    // Backward in half needs the scale. The penalty is computed from the unscaled gradient.
    auto slope = torch::autograd::grad({scaler.scale(score)}, {between}, {}, /*retain_graph=*/true,
                                       /*create_graph=*/true)[0];
    slope = slope * scaler.scale(torch::ones({}, device)).reciprocal();  // stays on the device
    const auto penalty = (slope.norm(2, 1) - 1).pow(2).mean();
    scaler.scale(loss.to(torch::kFloat) + penalty).backward();
    scaler.step(for_critic);
    scaler.update();
  };

  for (int step = 0; step < 250; ++step) {
    for (int i = 0; i < 3; ++i) train_critic();
    for_generator.zero_grad();
    const auto loss = mezzo::autocast(precision, [&] {
      return -critic->forward(generator->forward(torch::randn({64, 8}, device))).mean();
    });
    scaler.scale(loss).backward();
    scaler.step(for_generator);
    scaler.update();  // an inf in either loss lowers the shared scale
  }

  const torch::NoGradGuard no_grad;
  const auto mean = generator->forward(torch::randn({1000, 8}, device)).mean(0);
  const auto distance = (mean - center).norm().item<double>();
  std::printf("the center is missed by %.2f, of 3.6 at the start\n", distance);
  return distance < 1.0 ? 0 : 1;
}
