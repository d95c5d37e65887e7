// Trains with what MEZZO_HEADER names, mezzo's folder or its one header, and prints the bits of
// what came out.
#include MEZZO_HEADER

#include <torch/torch.h>

#include <cstdio>
#include <cstring>

namespace {

template <class Optimizer>
void train(const char* name) {
  torch::manual_seed(3);
  torch::nn::Sequential model(torch::nn::Linear(7, 33), torch::nn::GELU(),
                              torch::nn::Linear(33, 2));
  Optimizer optimizer(model->parameters(), 1e-2);
  mezzo::GradScaler scaler;
  mezzo::LinearSchedule schedule(optimizer, {.warmup_steps = 2, .total_steps = 20});
  mezzo::Ema ema(model->parameters(), {.decay = 0.9});
  for (int i = 0; i < 10; ++i) {
    const auto input = torch::randn({5, 7});
    optimizer.zero_grad();
    auto loss = mezzo::autocast({.device_type = torch::kCPU},
                                [&] { return model->forward(input).square().mean(); });
    if (i == 4) loss = loss * INFINITY;  // skipped
    scaler.scale(loss).backward();
    auto result = scaler.step(optimizer, {.max_norm = 1.0});
    scaler.update();
    schedule.step(result);
    ema.update(result);
  }
  const mezzo::EmaGuard averaged(ema);
  for (const auto& parameter : model->parameters()) {
    const auto flat = parameter.detach().flatten();
    for (int64_t i = 0; i < flat.numel(); ++i) {
      unsigned bits = 0;
      std::memcpy(&bits, flat.const_data_ptr<float>() + i, sizeof(bits));
      std::printf("%s %08x\n", name, bits);
    }
  }
}

}  // namespace

int main() {
  train<mezzo::optim::AdamW>("AdamW");
  train<mezzo::optim::SGD>("SGD");
  train<torch::optim::AdamW>("torch's AdamW");
}
