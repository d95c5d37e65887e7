// What diagnosis costs a training step, beside a whole step of a six-layer BERT:
// - bert_step/off against bert_step/asleep, where all that watches is registered and no step is
//   skipped: nothing but what telemetry takes, which should be under 1 % of the step;
// - record_*: telemetry alone, to nobody and to each writer;
// - overflow_report against read_gradients: a report should cost under one more read of them;
// - bert_step/traced: what looks at all ops of each step.
// Steps differ by less than a machine's noise. Compare minima of interleaved repetitions:
//   OMP_NUM_THREADS=1 diagnose_bench --benchmark_enable_random_interleaving=true
//     --benchmark_report_aggregates_only=true

#include <mezzo/diagnose/anomaly_trace.h>
#include <mezzo/diagnose/divergence_watch.h>
#include <mezzo/diagnose/overflow_report.h>
#include <mezzo/diagnose/run_report.h>
#include <mezzo/diagnose/telemetry.h>
#include <mezzo/diagnose/telemetry_files.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "encoder.h"

namespace {

std::string scratch(const char* name) {
  return (std::filesystem::temp_directory_path() / name).string();
}

double least(const std::vector<double>& times) {
  return *std::min_element(times.begin(), times.end());
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

void write_to_all(mezzo::Telemetry& telemetry, mezzo::RunReport& report) {
  telemetry.write_to(mezzo::CsvFile(scratch("mezzo_telemetry.csv")));
  telemetry.write_to(mezzo::TensorBoardFile(scratch("mezzo_telemetry_events")));
  telemetry.write_to(std::ref(report));
}

void record_to_all(benchmark::State& state) {
  mezzo::RunReport report("benchmark");
  mezzo::Telemetry telemetry;
  write_to_all(telemetry, report);
  record(state, telemetry);
}

/// A model and what trains it, with the same numbers in every benchmark.
struct Training {
  Training() { torch::manual_seed(0); }

  torch::Tensor backward() {
    optimizer.zero_grad();
    const torch::Tensor loss = model->forward(tokens).square().mean();
    scaler.scale(loss).backward();
    return loss;
  }

  mezzo::StepResult step() {
    const mezzo::StepResult result = scaler.step(optimizer, {.max_norm = 1.0});
    scaler.update();
    return result;
  }

  bench::Encoder model;
  mezzo::GradScaler scaler;
  mezzo::optim::AdamW optimizer{model->parameters(), mezzo::optim::AdamWOptions(1e-5)};
  torch::Tensor tokens = torch::randint(bench::kVocabulary, {8, 32}, torch::kLong);
};

void step_off(benchmark::State& state) {
  Training training;
  for (auto _ : state) {
    training.backward();
    training.step();
  }
}

void step_asleep(benchmark::State& state) {
  Training training;
  training.scaler.on_skip(mezzo::OverflowReport(*training.model));
  mezzo::RunReport report("benchmark");
  mezzo::Telemetry telemetry;
  write_to_all(telemetry, report);
  telemetry.write_to(mezzo::DivergenceWatch(*training.model));
  telemetry.write_to(mezzo::AnomalyWatch(*training.model));
  for (auto _ : state) {
    const torch::Tensor loss = training.backward();
    telemetry.record(training.step(), loss, {.max_norm = 1.0, .tokens = 256});
  }
}

void step_traced(benchmark::State& state) {
  Training training;
  for (auto _ : state) {
    const mezzo::AnomalyTrace trace(*training.model);
    training.backward();
    training.step();
  }
}

/// The cheapest way to read all of them: one sum each.
void read_gradients(benchmark::State& state) {
  Training training;
  training.backward();
  for (auto _ : state) {
    for (const torch::Tensor& parameter : training.model->parameters()) {
      benchmark::DoNotOptimize(parameter.grad().sum());
    }
  }
}

void overflow_report(benchmark::State& state) {
  Training training;
  training.backward();
  training.model->tagger->bias.mutable_grad()[3] = std::numeric_limits<float>::infinity();
  const mezzo::NamedTensors names = mezzo::name_parameters(*training.model);
  for (auto _ : state) benchmark::DoNotOptimize(mezzo::find_overflow(names, 65536));
}

void repeat(benchmark::internal::Benchmark* benchmark) {
  benchmark->Unit(benchmark::kMillisecond)->Repetitions(8)->ComputeStatistics("min", least);
}

BENCHMARK(record_to_nobody);
BENCHMARK(record_to_csv);
BENCHMARK(record_to_tensorboard);
BENCHMARK(record_to_all);
BENCHMARK(step_off)->Name("bert_step/off")->Iterations(3)->Apply(repeat);
BENCHMARK(step_asleep)->Name("bert_step/asleep")->Iterations(3)->Apply(repeat);
BENCHMARK(step_traced)->Name("bert_step/traced")->Iterations(3)->Apply(repeat);
BENCHMARK(read_gradients)->Apply(repeat);
BENCHMARK(overflow_report)->Apply(repeat);

}  // namespace

BENCHMARK_MAIN();
