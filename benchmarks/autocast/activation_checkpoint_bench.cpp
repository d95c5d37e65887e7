// What a checkpoint saves and costs: forward and backward of a stack of encoder layers (384 wide,
// 12 heads, 128 tokens, batch 2, dropout) plain, with a checkpoint for each layer, and with one for
// every two. `peak_mib` is the most memory held above the parameters and their gradients. The ideal
// cost is one more forward pass, which is why `forward_only` stands beside them. Last, the cost of
// a checkpoint around small ops, whose own work is nothing: the fixed part, and the part for each
// op inside, which is watched while it runs and compared when it runs again.

#include <mezzo/autocast/activation_checkpoint.h>

#include <torch/torch.h>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "counting_allocator.h"

namespace {

constexpr int kLayers = 12;

struct Encoder {
  std::vector<torch::nn::TransformerEncoderLayer> layers;
  torch::Tensor input = torch::randn({128, 2, 384});

  Encoder() {
    for (int i = 0; i < kLayers; ++i) {
      layers.emplace_back(
          torch::nn::TransformerEncoderLayerOptions(384, 12).dim_feedforward(1536).dropout(0.1));
    }
  }

  // `per_checkpoint` layers each, none of them with 0.
  torch::Tensor loss(int per_checkpoint) {
    torch::Tensor x = input;
    const auto run = [this](torch::Tensor hidden, int first, int count) {
      for (int i = first; i < first + count; ++i)
        hidden = layers[static_cast<std::size_t>(i)](hidden);
      return hidden;
    };
    if (per_checkpoint == 0) return run(x, 0, kLayers).pow(2).mean();
    for (int i = 0; i < kLayers; i += per_checkpoint)
      x = mezzo::activation_checkpoint(run, x, i, per_checkpoint);
    return x.pow(2).mean();
  }

  void zero_grad() {
    for (auto& layer : layers) layer->zero_grad(/*set_to_none=*/false);
  }
};

void forward_and_backward(benchmark::State& state) {
  auto& allocator = bench::counting_allocator();
  Encoder encoder;
  encoder.loss(0).backward();  // so that the gradients are there
  const int per_checkpoint = static_cast<int>(state.range(0));
  int64_t peak = 0;
  for (auto _ : state) {
    encoder.zero_grad();
    const int64_t before = allocator.in_use();
    allocator.forget_peak();
    encoder.loss(per_checkpoint).backward();
    peak = std::max(peak, allocator.peak() - before);
  }
  state.counters["peak_mib"] = static_cast<double>(peak) / (1024.0 * 1024.0);
}
BENCHMARK(forward_and_backward)
    ->ArgName("layers_per_checkpoint")
    ->Arg(0)
    ->Arg(1)
    ->Arg(2)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

void forward_only(benchmark::State& state) {
  Encoder encoder;
  for (auto _ : state) benchmark::DoNotOptimize(encoder.loss(0));
}
BENCHMARK(forward_only)->Unit(benchmark::kMillisecond)->UseRealTime();

enum Run { kPlain, kCheckpoint, kCheckpointWithoutRandomState };

void small_ops(benchmark::State& state) {
  const auto x = torch::ones({8}).requires_grad_();
  const auto op = [ops = state.range(1)](torch::Tensor t) {
    for (int64_t i = 0; i < ops; ++i) t = t.sin();
    return t;
  };
  const mezzo::ActivationCheckpointOptions options{.preserve_random_state =
                                                       state.range(0) == kCheckpoint};
  for (auto _ : state) {
    const auto y = state.range(0) == kPlain ? op(x) : mezzo::activation_checkpoint(options, op, x);
    benchmark::DoNotOptimize(torch::autograd::grad({y}, {x}, {x}));
  }
}
BENCHMARK(small_ops)
    ->ArgNames({"plain_checkpoint_withoutrandom", "ops"})
    ->ArgsProduct({{kPlain, kCheckpoint, kCheckpointWithoutRandomState}, {1, 10, 100, 1000}})
    ->Unit(benchmark::kMicrosecond);

}  // namespace

BENCHMARK_MAIN();
