// Activation checkpointing under autocast: each block saves only its input, and recomputes its
// activations in the backward pass. Gradients are bitwise identical, even with dropout, and the
// peak memory is lower. Exits with 1 if gradients differ, the peak is not lower, or the loss does
// not decrease.
#include <mezzo/autocast/activation_checkpoint.h>
#include <mezzo/mezzo.h>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <memory>
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

/// Counts the bytes of this thread's tensors, like libtorch's profiler.
struct MemoryCounter : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, int64_t bytes, std::size_t, std::size_t, c10::Device) override {
    current += bytes;
    peak = std::max(peak, current);
  }
  bool memoryProfilingEnabled() const override { return true; }

  int64_t current = 0, peak = 0;
};

}  // namespace

int main() {
  torch::manual_seed(0);
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  const mezzo::AutocastOptions precision{.device_type = device.type(), .cache_enabled = false};
  Net model;
  model->to(device);
  const auto teacher = torch::randn({32, 4}, device);
  const auto compute_loss = [&](const torch::Tensor& input, bool checkpointed) {
    return mezzo::autocast(precision, [&] {
      return torch::nn::functional::cross_entropy(model->forward(input, checkpointed),
                                                  input.mm(teacher).argmax(1));
    });
  };
  const auto compute_gradients = [&](const torch::Tensor& input, bool checkpointed, int64_t& peak) {
    torch::manual_seed(1);  // for dropout
    const auto memory = std::make_shared<MemoryCounter>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, memory);
    auto gradients =
        torch::autograd::grad({compute_loss(input, checkpointed)}, model->parameters());
    peak = memory->peak;
    return gradients;
  };

  const auto sample = torch::randn({1024, 32}, device);
  int64_t peak_saved = 0, peak_recomputed = 0;
  const auto saved = compute_gradients(sample, false, peak_saved);
  const auto recomputed = compute_gradients(sample, true, peak_recomputed);
  bool is_equal = true;
  for (std::size_t i = 0; i < saved.size(); ++i)
    is_equal = is_equal && torch::equal(saved[i], recomputed[i]);

  mezzo::optim::AdamW optimizer(model->parameters(), 3e-3);
  mezzo::GradScaler scaler;
  torch::Tensor first_loss, loss;
  for (int step = 0; step < 60; ++step) {
    optimizer.zero_grad();
    loss = compute_loss(torch::randn({64, 32}, device), true);
    if (step == 0) first_loss = loss.detach();
    scaler.scale(loss).backward();
    scaler.step(optimizer, {.max_norm = 1.0});
    scaler.update();
  }
  const double before = first_loss.item<double>(), after = loss.item<double>();
  std::printf("peak memory %.2f MB, with checkpoints %.2f MB\n",
              static_cast<double>(peak_saved) / 1e6, static_cast<double>(peak_recomputed) / 1e6);
  std::printf("%s gradients; loss %.3f -> %.3f\n", is_equal ? "equal" : "different", before, after);
  return is_equal && 3 * peak_recomputed < 2 * peak_saved && after < before / 2 ? 0 : 1;
}
