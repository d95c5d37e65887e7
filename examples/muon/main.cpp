// Muon for the matrices of hidden layers, AdamW for the rest: two optimizers and one scaler.
// Exits with 1 if the loss does not decrease to a tenth.
#include <mezzo/mezzo.h>
#include <mezzo/optim/muon.h>

#include <torch/torch.h>

#include <cstdio>
#include <vector>

int main() {
  torch::manual_seed(0);
  torch::nn::Sequential hidden(torch::nn::Linear(16, 64), torch::nn::GELU(),
                               torch::nn::Linear(64, 64), torch::nn::GELU());
  torch::nn::Linear last(64, 4);

  std::vector<torch::Tensor> matrices;
  std::vector<torch::Tensor> others = last->parameters();
  for (const auto& parameter : hidden->parameters()) {
    (parameter.dim() == 2 ? matrices : others).push_back(parameter);
  }
  // With this adjustment, learning rates and weight decays of AdamW work for Muon.
  mezzo::optim::Muon muon(matrices,
                          mezzo::optim::MuonOptions(1e-2).adjust_lr_fn("match_rms_adamw"));
  mezzo::optim::AdamW adamw(others, 3e-3);
  mezzo::GradScaler scaler;
  const auto teacher = torch::randn({16, 4}) / 4;
  const auto precision = mezzo::recommended_autocast(torch::kCPU);

  double first = 0;
  double loss = 0;
  for (int i = 0; i < 200; ++i) {
    const auto input = torch::randn({64, 16});
    const auto target = input.mm(teacher).tanh();
    muon.zero_grad();
    adamw.zero_grad();
    const auto batch_loss = mezzo::autocast(
        precision, [&] { return torch::mse_loss(last(hidden->forward(input)), target); });
    scaler.scale(batch_loss).backward();
    scaler.step(muon, {.max_norm = 1.0});  // each optimizer checks and clips its own gradients
    scaler.step(adamw, {.max_norm = 1.0});
    scaler.update();
    loss = batch_loss.item<double>();
    if (i == 0) first = loss;
    if (i % 50 == 49) std::printf("step %3d  loss %.4f\n", i + 1, loss);
  }
  return loss < first / 10 ? 0 : 1;
}
