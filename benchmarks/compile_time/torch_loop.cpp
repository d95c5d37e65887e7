// The same in libtorch alone: float, and no scaler.
#include <torch/torch.h>

void train() {
  torch::nn::Linear model(8, 1);
  const torch::Tensor data = torch::randn({16, 8});
  const torch::Tensor target = torch::randn({16, 1});

  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(2e-5));
  torch::optim::StepLR schedule(optimizer, 5);
  for (int i = 0; i < 10; ++i) {
    optimizer.zero_grad();
    const torch::Tensor loss = torch::mse_loss(model->forward(data), target);
    loss.backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
    schedule.step();
  }
}
