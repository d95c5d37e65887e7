// Two models, two optimizers, two losses, a gradient penalty (WGAN-GP) and one loss scale. The
// generator learns a normal distribution around (3, -2).
// Exits with 1 if the mean of its samples is elsewhere.
#include <mezzo/mezzo.h>

#include <torch/torch.h>

#include <cstdio>

namespace {

torch::nn::Sequential make_network(int64_t in, int64_t out) {
  return torch::nn::Sequential(torch::nn::Linear(in, 64), torch::nn::SiLU(),
                               torch::nn::Linear(64, 64), torch::nn::SiLU(),
                               torch::nn::Linear(64, out));
}

}  // namespace

int main() {
  torch::manual_seed(0);
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  auto generator = make_network(8, 2);
  auto critic = make_network(2, 1);
  generator->to(device);
  critic->to(device);
  const auto center = torch::tensor({3.0F, -2.0F}).to(device);

  const mezzo::AutocastOptions precision{.device_type = device.type()};
  mezzo::optim::Adam generator_optimizer(generator->parameters(),
                                         mezzo::optim::AdamOptions(1e-3).betas({0.5, 0.9}));
  mezzo::optim::Adam critic_optimizer(critic->parameters(),
                                      mezzo::optim::AdamOptions(2e-3).betas({0.5, 0.9}));
  mezzo::GradScaler scaler;  // shared: the losses have similar magnitudes

  const auto train_critic = [&] {
    critic_optimizer.zero_grad();  // the generator's backward pass accumulates here too
    const auto real = center + 0.5 * torch::randn({64, 2}, device);
    const auto weight = torch::rand({64, 1}, device);
    torch::Tensor interpolated, loss, score;
    {
      const mezzo::AutocastGuard autocast(precision);
      const auto fake = generator->forward(torch::randn({64, 8}, device)).detach();
      loss = critic->forward(fake).mean() - critic->forward(real).mean();
      interpolated = (weight * real + (1 - weight) * fake).requires_grad_();
      score = critic->forward(interpolated).sum();
    }
    // Backward in float16 needs the scale. The penalty is computed from the unscaled gradient.
    auto gradient =
        torch::autograd::grad({scaler.scale(score)}, {interpolated}, {}, /*retain_graph=*/true,
                              /*create_graph=*/true)[0];
    gradient = gradient * scaler.scale(torch::ones({}, device)).reciprocal();  // no synchronization
    const auto penalty = (gradient.norm(2, 1) - 1).pow(2).mean();
    scaler.scale(loss.to(torch::kFloat) + penalty).backward();
    scaler.step(critic_optimizer);
    scaler.update();
  };

  for (int step = 0; step < 250; ++step) {
    for (int i = 0; i < 3; ++i) train_critic();
    generator_optimizer.zero_grad();
    const auto loss = mezzo::autocast(precision, [&] {
      return -critic->forward(generator->forward(torch::randn({64, 8}, device))).mean();
    });
    scaler.scale(loss).backward();
    scaler.step(generator_optimizer);
    scaler.update();  // an inf in either loss reduces the shared scale
  }

  const torch::NoGradGuard no_grad;
  const auto mean = generator->forward(torch::randn({1000, 8}, device)).mean(0);
  const auto distance = (mean - center).norm().item<double>();
  std::printf("distance of the mean from the center: %.2f, initially 3.6\n", distance);
  return distance < 1.0 ? 0 : 1;
}
