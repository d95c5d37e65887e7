// A training loop in float32. after.cpp is the same in mixed precision.
// Exits with 1 if the loss did not fall.
#include <torch/torch.h>

#include <cstdio>

int main() {
  torch::manual_seed(0);
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::nn::Sequential model(torch::nn::Linear(16, 64), torch::nn::GELU(),
                              torch::nn::Linear(64, 4));
  model->to(device);
  const torch::Tensor teacher = torch::randn({16, 4}, device);
  torch::optim::AdamW optimizer(model->parameters(), 1e-2);

  double first = 0, last = 0;
  for (int step = 0; step < 60; ++step) {
    const torch::Tensor input = torch::randn({64, 16}, device);
    const torch::Tensor target = input.mm(teacher).argmax(1);
    optimizer.zero_grad();
    const auto loss = torch::nn::functional::cross_entropy(model->forward(input), target);
    loss.backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  std::printf("loss %.3f -> %.3f\n", first, last);
  return last < first / 2 ? 0 : 1;
}
