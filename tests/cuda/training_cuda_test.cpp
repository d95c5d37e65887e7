// Training on a GPU beyond the step itself: streams, threads, pending results, EMA, MasterWeights,
// metrics, reports, checkpoints and GradBuckets.

#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/diagnostics/metrics_logger.h>
#include <mezzo/diagnostics/overflow_report.h>
#include <mezzo/kernels/compute_grad_stats.h>
#include <mezzo/kernels/optimizer_step_cpu.h>
#include <mezzo/kernels/sgd_functor.h>
#include <mezzo/kernels/unscale.h>
#include <mezzo/kernels/weight_formats.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/adamw8bit.h>
#include <mezzo/optim/ema.h>
#include <mezzo/optim/ema_guard.h>
#include <mezzo/optim/grad_buckets.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../support/special_values.h"
#include "../support/temp_dir.h"
#include "../support/training.h"
#include "cuda_test.h"

namespace {

using cuda_test::ForbidSyncGuard;
using cuda_test::KernelsCuda;
using cuda_test::kGpu;
using mezzo::GradScaler;
using mezzo::optim::WeightStorage;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

class TrainingCuda : public cuda_test::CudaTest {};

Tensor filled(double value, int64_t size = 1000) { return torch::full({size}, value, kGpu); }

// --- Streams, threads, results in flight ------------------------------------------------------

TEST_F(TrainingCuda, StepWaitsForSideStreamGradients) {
  const c10::Stream side = cuda_test::new_stream();
  const c10::StreamGuard guard(side);
  const Tensor x = filled(1);
  x.mutable_grad() = filled(0);
  mezzo::optim::SGD optimizer({x}, torch::optim::SGDOptions(1.0));
  GradScaler scaler({.init_scale = 2});
  (void)scaler.scale(torch::zeros({}, kGpu));
  scaler.step(optimizer, {.max_norm = 1e9});  // creates the state and loads the kernels
  scaler.update();
  x.mutable_grad().fill_(1000);
  side.synchronize();
  cuda_test::BusyStream busy;
  {
    const ForbidSyncGuard forbid;
    (void)scaler.scale(torch::zeros({}, kGpu));
    x.mutable_grad().fill_(1);
  }
  const mezzo::StepResult result = [&] {
    const ForbidSyncGuard forbid;
    return scaler.step(optimizer, {.max_norm = 1e9});
  }();
  scaler.update();
  EXPECT_FALSE(result.ready());
  busy.end();
  side.synchronize();
  EXPECT_TRUE(result.ready());
  EXPECT_NEAR(result.grad_norm().value(), 0.5 * std::sqrt(1000.0), 1e-4);
  EXPECT_TRUE(torch::equal(x.cpu(), torch::full({1000}, 0.5)));
}

TEST_F(TrainingCuda, PendingResultsReportCorrectSteps) {
  constexpr int kSteps = cuda_test::kIsEmulated ? 60 : 200;
  const Tensor x = filled(1);
  x.mutable_grad() = filled(0);
  mezzo::optim::SGD optimizer({x}, torch::optim::SGDOptions(0.0));
  GradScaler scaler({.init_scale = 1024, .growth_interval = 1000000});
  std::vector<double> skipped_at;
  scaler.on_skip([&](const mezzo::SkippedStep& skip) { skipped_at.push_back(skip.scale); });
  std::vector<mezzo::StepResult> results;
  const auto is_bad = [](int i) { return i % 10 == 7; };
  (void)scaler.scale(torch::zeros({}, kGpu));
  scaler.step(optimizer, {.max_norm = 1e9});  // creates the state
  scaler.update();
  {
    cuda_test::BusyStream busy;
    for (int i = 0; i < kSteps; ++i) {
      x.mutable_grad().copy_(scaler.scale(filled(is_bad(i) ? kInfinity : 1.0 * i)));
      results.push_back(scaler.step(optimizer, {.max_norm = 1e9}));
      scaler.update();
    }
    busy.end();
  }
  double scale = 1024;
  std::vector<double> expected_skips;
  for (int i = 0; i < kSteps; ++i) {
    const auto& result = results[static_cast<std::size_t>(i)];
    EXPECT_EQ(result.applied(), !is_bad(i)) << i;
    EXPECT_EQ(result.scale(), scale) << i;
    if (is_bad(i)) {
      expected_skips.push_back(scale);
      scale /= 2;
    } else {
      EXPECT_NEAR(result.grad_norm().value(), i * std::sqrt(1000.0), 1e-4 * (i + 1)) << i;
    }
  }
  cuda_test::synchronize();
  x.mutable_grad().copy_(scaler.scale(filled(1)));
  scaler.step(optimizer);  // reports completed results
  scaler.update();
  EXPECT_EQ(skipped_at, expected_skips);
}

TEST_F(TrainingCuda, FourThreadsTrainOnSeparateStreams) {
  constexpr int kSteps = cuda_test::kIsEmulated ? 10 : 100;
  std::array<std::string, 4> errors;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t, &error = errors[static_cast<std::size_t>(t)]] {
      try {
        const c10::StreamGuard guard(cuda_test::new_stream());
        const Tensor x = filled(0, 3000);
        mezzo::optim::SGD optimizer({x}, torch::optim::SGDOptions(1.0));
        GradScaler scaler({.init_scale = 8, .growth_interval = 1000000});
        for (int i = 0; i < kSteps; ++i) {
          x.mutable_grad() = scaler.scale(filled(t + 1, 3000));
          scaler.step(optimizer, {.max_norm = 1e9});
          scaler.update();
        }
        const bool is_right = torch::equal(x.cpu(), torch::full({3000}, -1.0 * kSteps * (t + 1)));
        error = is_right ? "" : "x is " + std::to_string(x[0].item<float>());
      } catch (const std::exception& thrown) {
        error = thrown.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

// --- EMA, MasterWeights, GradBuckets -----------------------------------------------------------

/// Trains on both devices: `make(device)` returns the object that is passed to `step(value, ...)`.
template <class Make, class Step, class Compare>
void expect_same_on_gpu(const Make& make, const Step& step, const Compare& compare) {
  auto cpu = make(torch::Device(torch::kCPU));
  auto gpu = make(torch::Device(kGpu, 0));
  for (const float value : {1.0F, kInfinity, 0.5F, 2.0F}) {
    step(*cpu, value);
    step(*gpu, value);
  }
  compare(*cpu, *gpu);
}

TEST_F(TrainingCuda, EmaFollowsAppliedSteps) {
  struct Averaged {
    explicit Averaged(torch::Device device) : training(device), ema(training.parameters()) {}
    test_support::Training training;
    mezzo::Ema ema;
  };
  expect_same_on_gpu(
      [](torch::Device device) { return std::make_unique<Averaged>(device); },
      [](Averaged& twin, float value) {
        twin.training.input.fill_(value);
        twin.ema.update(twin.training.iterate());
      },
      [](const Averaged& cpu, const Averaged& gpu) {
        for (std::size_t i = 0; i < cpu.ema.averages().size(); ++i) {
          EXPECT_TRUE(
              torch::allclose(gpu.ema.averages()[i].cpu(), cpu.ema.averages()[i], 1e-5, 1e-6));
        }
        const mezzo::EmaGuard scope(gpu.ema);
        EXPECT_TRUE(torch::equal(gpu.training.parameters()[0], gpu.ema.averages()[0]));
      });
}

TEST_F(TrainingCuda, MasterWeightsStepTorchOptimizer) {
  struct Mastered {
    explicit Mastered(torch::Device device)
        : x(torch::linspace(-1, 1, 1000).to(torch::kBFloat16).to(device)),
          inner({x}, torch::optim::AdamWOptions(1e-2)),
          masters(inner) {
      scaler.on_skip(nullptr);
    }
    Tensor x;
    torch::optim::AdamW inner;
    mezzo::MasterWeights masters;
    GradScaler scaler{{.init_scale = 16}};
  };
  expect_same_on_gpu(
      [](torch::Device device) { return std::make_unique<Mastered>(device); },
      [](Mastered& twin, float value) {
        const auto loss = torch::full({1000}, value, twin.x.device());
        twin.x.mutable_grad() = twin.scaler.scale(loss).to(torch::kBFloat16);
        twin.scaler.step(twin.masters, {.max_norm = 5.0});
        twin.scaler.update();
      },
      [](Mastered& cpu, Mastered& gpu) {
        EXPECT_EQ(gpu.scaler.get_scale(), cpu.scaler.get_scale());
        const Tensor master = gpu.masters.master_param(gpu.x).detach().cpu();
        EXPECT_TRUE(torch::allclose(master, cpu.masters.master_param(cpu.x).detach(), 1e-5, 1e-6));
        EXPECT_TRUE(torch::equal(gpu.x.cpu(), master.to(torch::kBFloat16)));
      });
}

// Training steps with gradients in flat buffers.
TEST_F(TrainingCuda, GradBucketsTrainingMatchesCpu) {
  struct Bucketed {
    explicit Bucketed(torch::Device device)
        : model(module_on(device)), buckets(model->parameters()) {
      scaler.on_skip(nullptr);
    }
    static torch::nn::Sequential module_on(torch::Device device) {
      torch::manual_seed(1);
      torch::nn::Sequential module(torch::nn::Linear(7, 33), torch::nn::ReLU(),
                                   torch::nn::Linear(33, 5));
      module->to(device);
      return module;
    }
    torch::nn::Sequential model;
    mezzo::GradBuckets buckets;
    mezzo::optim::SGD optimizer{model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)};
    GradScaler scaler{{.init_scale = 16}};
  };
  expect_same_on_gpu([](torch::Device device) { return std::make_unique<Bucketed>(device); },
                     [](Bucketed& twin, float value) {
                       const auto device = twin.buckets.parameters()[0].device();
                       const Tensor input = torch::linspace(-1, value, 28).view({4, 7}).to(device);
                       twin.scaler.scale(twin.model->forward(input).square().mean()).backward();
                       twin.buckets.copy_grads_to_buckets();
                       twin.scaler.step(twin.optimizer, {.max_norm = 1.0, .zero_grad = true});
                       twin.scaler.update();
                     },
                     [](Bucketed& cpu, Bucketed& gpu) {
                       EXPECT_EQ(gpu.optimizer.applied_steps(), cpu.optimizer.applied_steps());
                       for (std::size_t i = 0; i < cpu.model->parameters().size(); ++i) {
                         EXPECT_TRUE(torch::allclose(gpu.model->parameters()[i].cpu(),
                                                     cpu.model->parameters()[i], 1e-4, 1e-5));
                       }
                     });
}

// --- Reports and checkpoints -------------------------------------------------------------------

TEST_F(TrainingCuda, MetricsLoggerRecordsWithoutSync) {
  test_support::Training training(kGpu);
  std::vector<mezzo::StepMetrics> records;
  mezzo::MetricsLogger logger;
  logger.add_callback([&](const mezzo::StepMetrics& record) { records.push_back(record); });
  (void)training.iterate();
  const std::vector<float> losses{1.0F, kInfinity, 0.5F};
  for (const float value : losses) {
    training.input.fill_(value);
    const ForbidSyncGuard forbid;
    logger.record(training.iterate(), training.input, {.tokens = 10});
  }
  logger.flush();
  ASSERT_EQ(records.size(), losses.size());
  for (std::size_t i = 0; i < losses.size(); ++i) {
    EXPECT_EQ(records[i].loss, losses[i]);
    EXPECT_EQ(records[i].skipped, i == 1);
    EXPECT_EQ(std::isfinite(records[i].grad_norm.value()), i != 1);
  }
}

TEST_F(TrainingCuda, OverflowReportNamesParameter) {
  torch::nn::Linear model(3, 4);
  model->to(kGpu);
  mezzo::optim::AdamW optimizer(model->parameters(), 1e-2);
  GradScaler scaler({.init_scale = 16});
  scaler.on_skip(nullptr);
  (void)scaler.scale(torch::zeros({}, kGpu));
  model->weight.mutable_grad() = torch::ones({4, 3}, kGpu);
  model->bias.mutable_grad() = torch::ones({4}, kGpu);
  model->weight.mutable_grad()[2][1] = kNan;
  EXPECT_FALSE(scaler.step(optimizer).applied());
  const auto overflow = mezzo::find_overflow(mezzo::named_float_parameters(*model), 16);
  ASSERT_EQ(overflow.parameters.size(), 1U);
  EXPECT_EQ(overflow.parameters[0].name, "weight");
  EXPECT_EQ(overflow.parameters[0].first_index, (std::vector<int64_t>{2, 1}));
}

// A checkpoint contains step counts that captured steps advanced on the device.
TEST_F(TrainingCuda, CheckpointAfterCaptureResumes) {
  const test_support::TempDir folder;
  const c10::Stream stream = cuda_test::new_stream();
  const c10::StreamGuard guard(stream);
  test_support::Training training(kGpu);
  training.iterate();
  stream.synchronize();
  cuda_test::Graph graph;
  graph.capture_begin();
  (void)training.iterate();
  graph.capture_end();
  for (const float value : {1.0F, kInfinity, 0.5F}) {
    training.input.fill_(value);
    graph.replay();
  }
  const auto state_of = [](test_support::Training& own) {
    mezzo::TrainingState state;
    state.add("optimizer", own.optimizer()).add("scaler", own.scaler());
    for (std::size_t i = 0; i < own.parameters().size(); ++i) {
      auto parameter = own.parameters()[i];
      state.add(
          "parameter" + std::to_string(i), [parameter] { return parameter.detach().clone(); },
          [parameter](const Tensor& value) { parameter.detach().copy_(value); });
    }
    return state;
  };
  mezzo::CheckpointManager(folder.path()).save(state_of(training), 4);
  test_support::Training resumed(kGpu);
  mezzo::TrainingState state = state_of(resumed);
  ASSERT_TRUE(mezzo::CheckpointManager(folder.path()).load_latest(state).has_value());
  EXPECT_EQ(resumed.applied_steps(), training.applied_steps());
  EXPECT_EQ(resumed.scale(), training.scale());
  resumed.input.fill_(2);
  training.input.fill_(2);
  (void)resumed.iterate();
  graph.replay();
  EXPECT_TRUE(torch::equal(resumed.weights(), training.weights()));
}

// --- Sizes beyond 32 bits ----------------------------------------------------------------------

/// Beyond 2^31 elements; the emulated GPU takes a few blocks.
constexpr int64_t kHuge = cuda_test::kIsEmulated ? 20005 : (int64_t{1} << 31) + 5;

TEST_F(KernelsCuda, GradientKernelsReadEveryElement) {
  if (!cuda_test::has_memory(12)) GTEST_SKIP() << "needs a GPU of 12 GB";
  const Tensor gradient = torch::ones({kHuge}, torch::dtype(torch::kBFloat16).device(kGpu));
  const auto grad_stats_of = [&] {
    return mezzo::detail::compute_grad_stats({gradient}, torch::ones({}, kGpu));
  };
  const auto count = static_cast<double>(kHuge);
  EXPECT_EQ(grad_stats_of().norm_sq.item<double>(), count);
  gradient[kHuge - 1] = 3;
  gradient[kHuge / 2] = -2;
  EXPECT_EQ(grad_stats_of().norm_sq.item<double>(), count + 8 + 3);
  EXPECT_EQ(grad_stats_of().max_abs.item<double>(), 3);
  Tensor found_inf = torch::zeros({}, kGpu);
  mezzo::detail::unscale_and_check_({gradient}, found_inf, torch::full({}, 0.5, kGpu));
  EXPECT_EQ(found_inf.item<float>(), 0);
  EXPECT_EQ(grad_stats_of().norm_sq.item<double>(), (count + 8 + 3) / 4);
  gradient[kHuge - 1] = kInfinity;
  mezzo::detail::unscale_and_check_({gradient}, found_inf, torch::full({}, 0.5, kGpu));
  EXPECT_EQ(found_inf.item<float>(), 1);
}

template <class Optimizer, class... Options>
void expect_step_of_every_element(double expected, const Options&... options) {
  const Tensor x = torch::full({kHuge}, 3.0, torch::dtype(torch::kBFloat16).device(kGpu));
  x.mutable_grad() = torch::ones_like(x);
  Optimizer({x}, options...).step();
  EXPECT_NEAR(x.min().item<double>(), expected, 0.02);
  EXPECT_NEAR(x.max().item<double>(), expected, 0.02);
}

TEST_F(KernelsCuda, StepsUpdateEveryElement) {
  if (!cuda_test::has_memory(22)) GTEST_SKIP() << "needs a GPU of 22 GB";
  using namespace mezzo::optim;
  expect_step_of_every_element<SGD>(2.0, SGDOptions(1.0));
  expect_step_of_every_element<AdamW>(2.0, AdamWOptions(1.0).weight_decay(0));
  expect_step_of_every_element<AdamW8bit>(2.0, AdamWOptions(1.0).weight_decay(0));
}

// Elements whose indices are 2^32 apart have different random bits.
// The emulated GPU runs one block of such a parameter (CudaEmulationStep).
TEST_F(KernelsCuda, StochasticRoundingBeyond2To32MatchesCpu) {
  using Functor = mezzo::detail::SgdFunctor<false>;
  if (cuda_test::kIsEmulated) GTEST_SKIP() << "not run on the emulated GPU: it takes 18 GB";
  if (!cuda_test::has_memory(22)) GTEST_SKIP() << "needs a GPU of 22 GB";
  constexpr int64_t kFirst = int64_t{1} << 32;
  constexpr int64_t kTail = 1000;
  const auto options = torch::dtype(torch::kBFloat16).device(kGpu);
  const Tensor x = torch::full({kFirst + kTail}, 1.0, options);
  x.mutable_grad() = torch::full({kFirst + kTail}, 1.0, options);
  const double lr = 1e-3;  // a quarter of the distance to the next bfloat16
  const Tensor expected = torch::full({kTail}, 1.0, torch::kBFloat16);
  const Tensor gradient = torch::full({kTail}, 1.0);
  mezzo::optim::SGD({x}, torch::optim::SGDOptions(lr),
                    {.weight_storage = WeightStorage::stochastic_rounding, .seed = 7})
      .step();
  mezzo::detail::OptimizerStepKernel<c10::BFloat16, Functor, mezzo::detail::StochasticWeightFormat,
                                     mezzo::detail::ScalarVec<c10::BFloat16>>::
      run({.pointers = {expected.data_ptr(), gradient.data_ptr(), {}, kTail, nullptr, kFirst}},
          Functor::HyperParams{}.coefficients(lr, 1), {.seed = 7});
  EXPECT_TRUE(torch::equal(x.slice(0, kFirst).cpu(), expected));
  EXPECT_FALSE(torch::equal(x.slice(0, kFirst), x.slice(0, 0, kTail)));
}

}  // namespace
