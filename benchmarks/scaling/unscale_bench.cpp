// Unscaling the gradients of a six-layer BERT (22.6 M parameters in 101 tensors): mezzo's one pass
// against ATen's kernel, which torch.amp calls, and against the machine: a copy between two buffers
// reads and writes the same bytes. Rates count the bytes that must move, 8 a parameter for
// unscaling and 4 for a check. The last lines give the ratios, from the medians of interleaved
// rounds.

#include <mezzo/kernels/unscale.h>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <vector>

namespace {

constexpr int64_t kHidden = 384;
constexpr int64_t kFeedForward = 1536;

std::vector<at::Tensor> bert_gradients() {
  std::vector<std::vector<int64_t>> shapes{
      {30522, kHidden}, {512, kHidden}, {2, kHidden}, {kHidden}, {kHidden}};
  for (int layer = 0; layer < 6; ++layer) {
    for (int projection = 0; projection < 4; ++projection) {
      shapes.push_back({kHidden, kHidden});
      shapes.push_back({kHidden});
    }
    shapes.insert(shapes.end(), {{kFeedForward, kHidden},
                                 {kFeedForward},
                                 {kHidden, kFeedForward},
                                 {kHidden},
                                 {kHidden},
                                 {kHidden},
                                 {kHidden},
                                 {kHidden}});
  }
  std::vector<at::Tensor> gradients;
  for (const auto& shape : shapes) gradients.push_back(at::ones(shape));
  return gradients;
}

struct Work {
  std::vector<at::Tensor> gradients = bert_gradients();
  at::Tensor found_inf = at::zeros({});
  // Not a power of two apart, and so near to 1 that no run ends in subnormals.
  at::Tensor inv_scale = at::full({}, 0.99999994F);
  int64_t parameters = 0;
  at::Tensor source;
  at::Tensor target;

  Work() {
    for (const at::Tensor& gradient : gradients) parameters += gradient.numel();
    source = at::ones({parameters});
    target = at::empty_like(source);
  }
  void mezzo_unscale() { mezzo::detail::unscale_and_check_(gradients, found_inf, inv_scale); }
  void mezzo_check() { mezzo::detail::check_(gradients, found_inf); }
  void aten_unscale() {
    at::_amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale);
  }
  void copy() { target.copy_(source); }
};

Work& work() {
  static Work instance;
  return instance;
}

void run(benchmark::State& state, void (Work::*call)(), int64_t bytes_per_parameter) {
  for (auto _ : state) (work().*call)();
  state.SetBytesProcessed(state.iterations() * work().parameters * bytes_per_parameter);
}

BENCHMARK_CAPTURE(run, mezzo_unscale_and_check, &Work::mezzo_unscale, 8)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();
BENCHMARK_CAPTURE(run, aten_check_and_unscale, &Work::aten_unscale, 8)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();
BENCHMARK_CAPTURE(run, copy_of_the_same_bytes, &Work::copy, 8)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();
BENCHMARK_CAPTURE(run, mezzo_check_only, &Work::mezzo_check, 4)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

double milliseconds(void (Work::*call)()) {
  const auto start = std::chrono::steady_clock::now();
  (work().*call)();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Interleaved, so that a machine that slows down meanwhile slows all of them down.
void print_ratios() {
  std::vector<double> mezzo;
  std::vector<double> aten;
  std::vector<double> copy;
  for (int round = 0; round < 31; ++round) {
    mezzo.push_back(milliseconds(&Work::mezzo_unscale));
    aten.push_back(milliseconds(&Work::aten_unscale));
    copy.push_back(milliseconds(&Work::copy));
  }
  std::printf("parameters %lld in %zu tensors, %d threads, isa %d\n",
              static_cast<long long>(work().parameters), work().gradients.size(),
              at::get_num_threads(), static_cast<int>(mezzo::detail::best_isa()));
  std::printf("median ms: mezzo %.2f, ATen %.2f, copy %.2f\n", median(mezzo), median(aten),
              median(copy));
  std::printf("mezzo / ATen %.2f, mezzo / copy %.2f\n", median(mezzo) / median(aten),
              median(mezzo) / median(copy));
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  print_ratios();
  return 0;
}
