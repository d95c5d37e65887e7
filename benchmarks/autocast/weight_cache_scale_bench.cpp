// What many weights cost a WeightCache: nothing here may grow faster than their number.
//
//   PublishingStep/N       an AdamW step over N matrices of 8 by 8 that publishes their copies;
//                          beside it, interleaved, the step that publishes none, and the ratio
//   EnterAndLeave/N        a region with a cache that holds N pinned copies, in which nothing is used
//   EnterUseAndLeave/N     the same with one use of one weight

#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/weight_cache.h>
#include <mezzo/optim/adamw.h>

#include <torch/torch.h>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

namespace {

using mezzo::Autocast;
using torch::kBFloat16;
using torch::kCPU;
using torch::Tensor;

constexpr int64_t kSide = 8;

std::vector<Tensor> matrices(int64_t count, bool trainable) {
  std::vector<Tensor> all;
  for (int64_t i = 0; i < count; ++i) {
    all.push_back(torch::randn({kSide, kSide}).requires_grad_(trainable));
    if (trainable) all.back().mutable_grad() = torch::randn({kSide, kSide});
  }
  return all;
}

void use_once(const mezzo::WeightCache& cache, const std::vector<Tensor>& weights) {
  const torch::NoGradGuard no_grad;
  const Autocast<kCPU> autocast({.cache = cache});
  const auto input = torch::ones({1, kSide});
  for (const auto& weight : weights) torch::linear(input, weight);
}

double seconds_of(mezzo::optim::AdamW& optimizer) {
  const auto start = std::chrono::steady_clock::now();
  optimizer.step();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void PublishingStep(benchmark::State& state) {
  const auto weights = matrices(state.range(0), /*trainable=*/true);
  const auto published = matrices(state.range(0), /*trainable=*/true);
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  use_once(cache, published);  // an optimizer publishes what somebody asks for
  mezzo::optim::AdamW plain(weights, mezzo::optim::AdamWOptions(1e-3));
  mezzo::optim::AdamW publishing(published, mezzo::optim::AdamWOptions(1e-3));
  publishing.publish_to(cache, kBFloat16);
  seconds_of(plain);
  seconds_of(publishing);
  std::vector<double> plain_seconds;
  std::vector<double> ratios;
  for (auto _ : state) {
    plain_seconds.push_back(seconds_of(plain));
    const double seconds = seconds_of(publishing);
    ratios.push_back(seconds / plain_seconds.back());
    state.SetIterationTime(seconds);
  }
  state.counters["plain_us"] = 1e6 * median(plain_seconds);
  state.counters["publishing:plain"] = median(ratios);
}
BENCHMARK(PublishingStep)
    ->RangeMultiplier(10)
    ->Range(100, 10'000)
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

void EnterAndLeave(benchmark::State& state) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto weights = matrices(state.range(0), /*trainable=*/false);
  cache.pin(weights);
  use_once(cache, weights);
  for (auto _ : state) {
    const Autocast<kCPU> autocast({.cache = cache});
  }
}
BENCHMARK(EnterAndLeave)->Arg(1)->Arg(100)->Arg(10'000);

void EnterUseAndLeave(benchmark::State& state) {
  const mezzo::WeightCache cache = mezzo::install_op_overrides(mezzo::WeightCache());
  const auto weights = matrices(state.range(0), /*trainable=*/false);
  cache.pin(weights);
  use_once(cache, weights);
  const auto input = torch::ones({1, kSide}, kBFloat16);
  const torch::NoGradGuard no_grad;
  for (auto _ : state) {
    const Autocast<kCPU> autocast({.cache = cache});
    benchmark::DoNotOptimize(torch::linear(input, weights.front()));
  }
}
BENCHMARK(EnterUseAndLeave)->Arg(1)->Arg(100)->Arg(10'000);

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  at::set_num_threads(1);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
