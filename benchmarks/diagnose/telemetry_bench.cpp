// What telemetry costs a training step: a record to nobody, to each writer, and to all; and a whole
// step of a six-layer BERT beside it, of which it should be under 1 %. With telemetry off there is
// nothing to measure: no hook stands anywhere.

#include <benchmark/benchmark.h>
#include <mezzo/diagnose/run_report.h>
#include <mezzo/diagnose/telemetry.h>
#include <mezzo/diagnose/telemetry_files.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/scaling/grad_scaler.h>
#include <torch/torch.h>

#include <filesystem>
#include <functional>
#include <string>

#include "encoder.h"

namespace {

std::string scratch(const char* name) {
  return (std::filesystem::temp_directory_path() / name).string();
}

void record(benchmark::State& state, mezzo::Telemetry& telemetry) {
  const mezzo::StepResult result(mezzo::StepOutcome{.ran = true, .grad_norm = 1.5});
  const torch::Tensor loss = torch::tensor(0.5);
  for (auto _ : state) telemetry.record(result, loss, {.max_norm = 1.0, .tokens = 4096});
}

void record_to_nobody(benchmark::State& state) {
  mezzo::Telemetry telemetry;
  record(state, telemetry);
}

void record_to_csv(benchmark::State& state) {
  mezzo::Telemetry telemetry;
  telemetry.write_to(mezzo::CsvFile(scratch("mezzo_telemetry.csv")));
  record(state, telemetry);
}

void record_to_tensorboard(benchmark::State& state) {
  mezzo::Telemetry telemetry;
  telemetry.write_to(mezzo::TensorBoardFile(scratch("mezzo_telemetry_events")));
  record(state, telemetry);
}

void record_to_all(benchmark::State& state) {
  mezzo::Telemetry telemetry;
  mezzo::RunReport report("benchmark");
  telemetry.write_to(mezzo::CsvFile(scratch("mezzo_telemetry.csv")));
  telemetry.write_to(mezzo::JsonLinesFile(scratch("mezzo_telemetry.jsonl")));
  telemetry.write_to(mezzo::TensorBoardFile(scratch("mezzo_telemetry_events")));
  telemetry.write_to(std::ref(report));
  record(state, telemetry);
}

void bert_step(benchmark::State& state) {
  torch::manual_seed(0);
  bench::Encoder model;
  mezzo::GradScaler scaler;
  mezzo::optim::AdamW optimizer(model->parameters(), mezzo::optim::AdamWOptions(1e-5));
  const torch::Tensor tokens = torch::randint(bench::kVocabulary, {8, 32}, torch::kLong);
  for (auto _ : state) {
    optimizer.zero_grad();
    const torch::Tensor loss = model->forward(tokens).square().mean();
    scaler.scale(loss).backward();
    scaler.step(optimizer, {.max_norm = 1.0});
    scaler.update();
  }
}

BENCHMARK(record_to_nobody);
BENCHMARK(record_to_csv);
BENCHMARK(record_to_tensorboard);
BENCHMARK(record_to_all);
BENCHMARK(bert_step)->Unit(benchmark::kMillisecond)->Iterations(5);

}  // namespace

BENCHMARK_MAIN();
