// Activation checkpointing under autocast: each block keeps its input only, and computes its
// activations again during backward. Gradients are the same bits, dropout included.
// Exits with 1 if they are not, or if the loss did not fall.
#include <mezzo/autocast/activation_checkpoint.h>
#include <mezzo/mezzo.h>

#include <torch/torch.h>

#include <cstdio>
#include <string>
#include <vector>

namespace {

struct BlockImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    return x + last(torch::dropout(torch::gelu(first(norm(x))), 0.1, is_training()));
  }

  torch::nn::LayerNorm norm =
      register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({32})));
  torch::nn::Linear first = register_module("first", torch::nn::Linear(32, 128));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(128, 32));
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int i = 0; i < 4; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block()));
    }
  }

  torch::Tensor forward(torch::Tensor x, bool checkpointed) {
    for (Block& block : blocks)
      x = checkpointed ? mezzo::activation_checkpoint(block, x) : block(x);
    return head(x);
  }

  std::vector<Block> blocks;
  torch::nn::Linear head = register_module("head", torch::nn::Linear(32, 4));
};
TORCH_MODULE(Net);

}  // namespace

int main() {
  torch::manual_seed(0);
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  const mezzo::AutocastSetting precision{.device = device.type(), .cache = false};
  Net model;
  model->to(device);
  const auto teacher = torch::randn({32, 4}, device);
  const auto loss_of = [&](const torch::Tensor& input, bool checkpointed) {
    return mezzo::autocast(precision, [&] {
      return torch::nn::functional::cross_entropy(model->forward(input, checkpointed),
                                                  input.mm(teacher).argmax(1));
    });
  };
  const auto gradients_of = [&](const torch::Tensor& input, bool checkpointed) {
    torch::manual_seed(1);  // for dropout
    return torch::autograd::grad({loss_of(input, checkpointed)}, model->parameters());
  };

  const auto sample = torch::randn({64, 32}, device);
  const auto kept = gradients_of(sample, false), computed = gradients_of(sample, true);
  bool is_same = true;
  for (std::size_t i = 0; i < kept.size(); ++i)
    is_same = is_same && torch::equal(kept[i], computed[i]);

  mezzo::optim::AdamW optimizer(model->parameters(), 3e-3);
  mezzo::GradScaler scaler;
  torch::Tensor first_loss, loss;
  for (int step = 0; step < 60; ++step) {
    optimizer.zero_grad();
    loss = loss_of(torch::randn({64, 32}, device), true);
    if (step == 0) first_loss = loss.detach();
    scaler.scale(loss).backward();
    scaler.step(optimizer, {.max_norm = 1.0});
    scaler.update();
  }
  const double before = first_loss.item<double>(), after = loss.item<double>();
  std::printf("%s gradients; loss %.3f -> %.3f\n", is_same ? "the same" : "other", before, after);
  return is_same && after < before / 2 ? 0 : 1;
}
