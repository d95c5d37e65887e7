// The time that save and save_async take from a training loop, for a state of 1 GB. Set TMPDIR to
// the disk to measure.
#include <mezzo/checkpoint.h>

#include <torch/torch.h>

#include <benchmark/benchmark.h>

#include <cstdint>
#include <filesystem>
#include <vector>

namespace {

void save(benchmark::State& state, bool is_async) {
  const auto directory = std::filesystem::temp_directory_path() / "mezzo_save_bench";
  std::vector<torch::Tensor> tensors;
  for (int i = 0; i < 25; ++i) tensors.push_back(torch::randn({10'000'000}));
  mezzo::TrainingState training;
  training.add("tensors", tensors);
  {
    mezzo::CheckpointManager checkpoints(directory);
    std::int64_t step = 0;
    for (auto _ : state) {
      if (is_async) {
        checkpoints.save_async(training, ++step);
      } else {
        checkpoints.save(training, ++step);
      }
      state.PauseTiming();  // training, until the file is written
      checkpoints.wait();
      state.ResumeTiming();
    }
  }
  std::filesystem::remove_all(directory);
}

BENCHMARK_CAPTURE(save, save, false)->Unit(benchmark::kMillisecond)->Iterations(5)->UseRealTime();
BENCHMARK_CAPTURE(save, save_async, true)
    ->Unit(benchmark::kMillisecond)
    ->Iterations(5)
    ->UseRealTime();

}  // namespace

BENCHMARK_MAIN();
