// Training steps on emulated GPUs (emulated_gpu.h), eager and captured into graphs, against the
// same training on the CPU.

#include <mezzo/kernels/compute_grad_stats.h>
#include <mezzo/kernels/kernel_dispatch.h>
#include <mezzo/optim/ema.h>
#include <mezzo/optim/sgd.h>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "../support/get_param_state.h"
#include "../support/message_of.h"
#include "../support/special_values.h"
#include "../support/training.h"
#include "../support/warning_recorder.h"
#include "emulated_gpu.h"

namespace {

using mezzo::optim::AdamWOptions;
using mezzo::optim::WeightStorage;
using test_support::expect_same;
using test_support::get_param_state;
using test_support::message_of;
using test_support::TrainingOptions;
using testing::HasSubstr;

/// The parameter seeds the order of the streams' work.
class EmulatedGpuTraining : public testing::TestWithParam<uint64_t> {
 protected:
  void SetUp() override { emulated_gpu::begin(GetParam()); }
  void TearDown() override { emulated_gpu::run_all(); }
};

INSTANTIATE_TEST_SUITE_P(Orders, EmulatedGpuTraining, testing::Range(uint64_t{0}, uint64_t{3}));

/// A Training whose construction has completed, so that tests may use other streams.
struct Training : test_support::Training {
  explicit Training(at::Device device, const TrainingOptions& options = {})
      : test_support::Training(device, options) {
    emulated_gpu::run_all();
  }
};

// The code of docs/cuda.md.
TEST_P(EmulatedGpuTraining, ThrowsOnDefaultStream) {
  Training training(emulated_gpu::device());
  (void)training.iterate();
  emulated_gpu::run_all();
  const c10::impl::VirtualGuardImpl streams(emulated_gpu::device().type());
  const c10::StreamGuard default_stream(streams.getDefaultStream(emulated_gpu::device()));
  emulated_gpu::Graph graph;
  EXPECT_ANY_THROW(graph.capture_begin()) << "of a default stream";
  const c10::StreamGuard own_stream(emulated_gpu::new_stream());
  graph.capture_begin();
  const mezzo::StepResult result = training.iterate();
  graph.capture_end();
  graph.replay();
  EXPECT_TRUE(result.applied());
}

// In the default capture mode, an event query invalidates a capture of another thread.
TEST_P(EmulatedGpuTraining, ReadsResultDuringAnotherThreadsCapture) {
  Training training(emulated_gpu::device());
  const mezzo::StepResult asked = training.iterate(), awaited = training.iterate();
  const c10::StreamGuard stream(emulated_gpu::new_stream());
  emulated_gpu::Graph graph;
  emulated_gpu::capture(graph, [&] {
    const at::Tensor sum = training.input + 1;
    std::thread([&] {
      (void)asked.ready();
      EXPECT_TRUE(awaited.applied());
    }).join();
  });
  graph.replay();
  emulated_gpu::run_all();
}

// Replays of a captured scale() do not notify the host.
TEST_P(EmulatedGpuTraining, EagerStepAfterReplayIsSilent) {
  const at::Tensor ones = at::ones({3}, at::device(emulated_gpu::device()));
  const at::Tensor x = at::ones({3}, at::device(emulated_gpu::device())).requires_grad_();
  mezzo::optim::SGD optimizer({x}, 0.1);
  mezzo::GradScaler scaler;
  x.mutable_grad() = scaler.scale(ones);
  scaler.step(optimizer);
  scaler.update();
  emulated_gpu::run_all();
  const c10::StreamGuard stream(emulated_gpu::new_stream());
  emulated_gpu::Graph graph;
  emulated_gpu::capture(graph, [&] { x.mutable_grad().copy_(scaler.scale(ones)); });
  const test_support::WarningRecorder warnings;
  for (int i = 0; i < 3; ++i) {
    graph.replay();
    scaler.step(optimizer);
    scaler.update();
  }
  EXPECT_THAT(warnings.texts, testing::IsEmpty());
  emulated_gpu::run_all();
}

/// More parameters than one launch holds.
const TrainingOptions kManyParameters{.parameters = 301, .elements = 1};

std::vector<TrainingOptions> all_options() {
  std::vector<TrainingOptions> all(1);
  all.push_back({.adamw = AdamWOptions(0.1).amsgrad(true)});
  for (const WeightStorage storage : {WeightStorage::fp32_master, WeightStorage::split_master,
                                      WeightStorage::stochastic_rounding}) {
    all.push_back({.dtype = at::kBFloat16, .weights = {.weight_storage = storage}});
  }
  for (const WeightStorage storage :
       {WeightStorage::plain, WeightStorage::fp32_master, WeightStorage::split_master,
        WeightStorage::stochastic_rounding}) {
    all.push_back({.dtype = at::kBFloat16,
                   .gradient_dtype = at::kFloat,
                   .weights = {.weight_storage = storage}});
  }
  all.push_back({.dtype = at::kHalf, .gradient_dtype = at::kFloat});
  all.push_back({.unscales = true});
  all.push_back({.dtype = at::kBFloat16,
                 .weights = {.weight_storage = WeightStorage::fp32_master},
                 .unscales = true});
  for (const int64_t elements : {int64_t{50}, int64_t{4100}}) {
    all.push_back({.elements = elements,
                   .dtype = at::kBFloat16,
                   .weights = {.weight_storage = WeightStorage::stochastic_rounding}});
  }
  return all;
}

/// A captured step and its result.
class CapturedStep {
 public:
  explicit CapturedStep(Training& training) {
    emulated_gpu::capture(graph_, [&] { result_ = training.iterate(); });
  }
  void replay() { graph_.replay(); }
  const mezzo::StepResult& result() const { return *result_; }
  const emulated_gpu::Graph& graph() const { return graph_; }

 private:
  emulated_gpu::Graph graph_;
  std::optional<mezzo::StepResult> result_;
};

/// The same training on the CPU and on a GPU, with eager and replayed steps.
class Pair {
 public:
  /// \param reads_results  whether the host reads each result at once; otherwise at the end
  Pair(const TrainingOptions& options, bool reads_results)
      : cpu_(at::kCPU, options),
        gpu_(emulated_gpu::device(), options),
        reads_results_(reads_results) {}

  Training& gpu() { return gpu_; }

  void eager(float value) {
    fill(value);
    cpu_results_.push_back(cpu_.iterate());
    gpu_results_.push_back(gpu_.iterate());
    if (reads_results_) expect_same(gpu_results_.back(), cpu_results_.back());
  }
  void replay(CapturedStep& step, float value) {
    fill(value);
    last_replay_ = cpu_.iterate();
    step.replay();
    if (reads_results_) expect_same(step.result(), *last_replay_);
  }

  /// Compares all eager results and the last replayed one.
  void expect_same_results(const CapturedStep& last) {
    expect_same(last.result(), *last_replay_);
    expect_same(gpu_, cpu_);
    for (std::size_t i = 0; i < cpu_results_.size(); ++i)
      expect_same(gpu_results_[i], cpu_results_[i]);
  }

 private:
  void fill(float value) {
    cpu_.input.fill_(value);
    gpu_.input.fill_(value);
  }

  Training cpu_;
  Training gpu_;
  bool reads_results_;
  std::vector<mezzo::StepResult> cpu_results_;  // of eager steps
  std::vector<mezzo::StepResult> gpu_results_;
  std::optional<mezzo::StepResult> last_replay_;
};

void expect_cpu_results(const TrainingOptions& options) {
  for (const bool reads_results : {true, false}) {
    Pair pair(options, reads_results);
    {
      // As in libtorch's documentation: warm up on a side stream, and synchronize.
      const c10::StreamGuard warm_up(emulated_gpu::new_stream());
      pair.eager(1.0F);
      emulated_gpu::run_all();
    }
    const c10::StreamGuard stream(emulated_gpu::new_stream());
    CapturedStep a(pair.gpu());
    CapturedStep b(pair.gpu());
    pair.eager(2.0F);  // before the first replay
    pair.replay(b, 3.0F);
    pair.replay(b, kInfinity);
    pair.eager(0.5F);
    pair.eager(kInfinity);
    pair.replay(a, kInfinity);
    pair.replay(a, 3.0F);
    pair.eager(kInfinity);
    pair.replay(b, 0.25F);
    pair.expect_same_results(b);
  }
}

TEST_P(EmulatedGpuTraining, EagerStepsBetweenReplaysMatchCpu) {
  for (const TrainingOptions& options : all_options()) expect_cpu_results(options);
}

TEST(EmulatedGpuTrainingManyParameters, MatchesCpu) {
  emulated_gpu::begin(1);
  expect_cpu_results(kManyParameters);
}

TEST_P(EmulatedGpuTraining, IncrementsManyStepCountsOnce) {
  const c10::StreamGuard stream(emulated_gpu::new_stream());
  const at::Tensor counts = at::zeros({4001}, at::device(emulated_gpu::device()).dtype(at::kFloat));
  std::vector<float*> state_steps;
  for (int i = 0; i < 4001; ++i) state_steps.push_back(counts.mutable_data_ptr<float>() + i);
  const auto count = [&] {
    mezzo::detail::cuda_kernels()->increment_state_steps_(emulated_gpu::device(), state_steps,
                                                          nullptr);
  };
  emulated_gpu::Graph graph;
  emulated_gpu::capture(graph, count);
  count();
  EXPECT_TRUE(at::equal(counts.cpu(), at::ones({4001}))) << "before the first replay";
  graph.replay();
  EXPECT_TRUE(at::equal(counts.cpu(), at::full({4001}, 2.0F)));
}

TEST_P(EmulatedGpuTraining, ThrowsWithoutWarmUp) {
  const auto expect_throws = [](Training& training) {
    emulated_gpu::Graph graph;
    const c10::StreamGuard stream(emulated_gpu::new_stream());
    EXPECT_THAT(message_of([&] { emulated_gpu::capture(graph, [&] { training.iterate(); }); }),
                HasSubstr("before the capture"));
  };
  for (const TrainingOptions& options : all_options()) {
    Training cold(emulated_gpu::device(), options);
    expect_throws(cold);
    (void)cold.scaler().scale(cold.input);  // creates the scale, not the state
    expect_throws(cold);
    Training warm(emulated_gpu::device(), options);
    warm.iterate();
    warm.optimizer().set_lr_factors({1.0, 0.5});
    expect_throws(warm);
    if (options.unscales) warm.scaler().update();  // ends the iteration that threw
    warm.iterate();
    for (const at::Tensor& parameter : warm.parameters()) {  // other strides than the parameter's
      auto& state = get_param_state<mezzo::optim::AdamWParamState>(warm.optimizer(), parameter);
      state.exp_avg(at::stack({state.exp_avg(), state.exp_avg()}, -1).select(-1, 0));
    }
    expect_throws(warm);
    if (options.unscales) warm.scaler().update();
    warm.iterate();
    warm.optimizer().state().clear();
    expect_throws(warm);
  }
}

TEST_P(EmulatedGpuTraining, CapturedResultFollowsLastReplay) {
  Training gpu(emulated_gpu::device());
  const c10::StreamGuard stream(emulated_gpu::new_stream());
  const mezzo::StepResult eager = gpu.iterate();
  emulated_gpu::Graph graph;
  std::optional<mezzo::StepResult> result;
  emulated_gpu::capture(graph, [&] {
    result = gpu.iterate();
    EXPECT_FALSE(result->ready());
    (void)eager.ready();  // must not query an event
    EXPECT_THAT(message_of([&] { (void)result->applied(); }),
                HasSubstr("during a CUDA graph capture"));
  });
  EXPECT_THAT(message_of([&] { (void)result->applied(); }), HasSubstr("has not been replayed"));
  for (const float value : {1.0F, kInfinity, 2.0F}) {
    gpu.input.fill_(value);
    graph.replay();
    EXPECT_EQ(result->applied(), value != kInfinity);
    EXPECT_EQ(result->applied(), value != kInfinity) << "second query";
    EXPECT_FALSE(result->ready()) << "replays do not notify the host";
  }
  EXPECT_TRUE(eager.applied());
}

TEST_P(EmulatedGpuTraining, HostStepCountsContinueOnDevice) {
  Training gpu(emulated_gpu::device());
  Training cpu(at::kCPU);
  for (Training* training : {&gpu, &cpu}) {
    training->optimizer().set_applied_steps(2);
    training->iterate();
  }
  expect_same(gpu, cpu);
  EXPECT_EQ(gpu.applied_steps(), 3);
}

/// Launches and argument bytes of a step and its update, after the state was created.
struct LaunchCounts {
  const char* what;
  TrainingOptions options;
  int64_t launches;
  int64_t argument_bytes;
};
const std::vector<LaunchCounts> kLaunchCounts = {
    {"3 tensors", {}, 6, 40800},
    {"3 tensors with on_skip", {.has_skip_callback = true}, 6, 40800},
    {"3 tensors, after unscale_", {.unscales = true}, 7, 49224},
    {"3 bfloat16 tensors with masters",
     {.dtype = at::kBFloat16,
      .weights = {.weight_storage = mezzo::optim::WeightStorage::fp32_master}},
     6,
     40800},
    {"301 tensors", kManyParameters, 8, 77536},
};

TEST_P(EmulatedGpuTraining, StepLaunchesMatchDocsWithoutCopies) {
  for (const LaunchCounts& expected : kLaunchCounts) {
    SCOPED_TRACE(expected.what);
    Training gpu(emulated_gpu::device(), expected.options);
    const c10::StreamGuard stream(emulated_gpu::new_stream());
    gpu.iterate();
    gpu.iterate();
    const emulated_gpu::Counts before = emulated_gpu::counts();
    gpu.iterate();
    const emulated_gpu::Counts after = emulated_gpu::counts();
    EXPECT_EQ(after.launches - before.launches, expected.launches);
    EXPECT_EQ(after.argument_bytes - before.argument_bytes, expected.argument_bytes);
    EXPECT_EQ(after.copies_to_host - before.copies_to_host, 0);
    EXPECT_EQ(after.copies_from_host - before.copies_from_host, 0);
    EXPECT_EQ(after.syncs - before.syncs, 0);
    const CapturedStep step(gpu);
    EXPECT_EQ(step.graph().launches(), expected.launches);
  }
}

// Pinned memory is reused only after its kernel has run.
TEST_P(EmulatedGpuTraining, ScalerMayEndDuringPendingStep) {
  auto gpu = std::make_unique<Training>(emulated_gpu::device());
  const c10::StreamGuard stream(emulated_gpu::new_stream());
  (void)gpu->iterate();  // creates the state
  const emulated_gpu::StreamBlocker held(stream.current_stream());
  (void)gpu->iterate();
  gpu = nullptr;
}

TEST_P(EmulatedGpuTraining, ResultWaitsForItsEventOnly) {
  Training gpu(emulated_gpu::device());
  const c10::Stream other = emulated_gpu::new_stream();
  const emulated_gpu::StreamBlocker held(other);
  EXPECT_TRUE(gpu.iterate().applied());
  gpu.input.fill_(kInfinity);
  EXPECT_FALSE(gpu.iterate().applied());
}

TEST_P(EmulatedGpuTraining, LooksUpBufferAddressesOnce) {
  Training gpu(emulated_gpu::device());
  const int before = cuda_emulation::address_lookups;
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(gpu.iterate().applied());
  EXPECT_LE(cuda_emulation::address_lookups - before, 3) << "one per pinned buffer";
}

TEST_P(EmulatedGpuTraining, StoredResultKeepsItsScale) {
  Training gpu(emulated_gpu::device());
  gpu.scaler().on_skip(nullptr);
  std::vector<std::pair<mezzo::StepResult, float>> results;
  for (const float value : {1.0F, kInfinity, 2.0F, kInfinity, kInfinity, 3.0F}) {
    gpu.input.fill_(value);
    const auto scale = static_cast<float>(gpu.scaler().get_scale());
    results.emplace_back(gpu.iterate(), scale);
    for (int i = 0; i < 3; ++i) (void)gpu.iterate();  // results not stored
    EXPECT_EQ(results.back().first.found_inf(), value == kInfinity);
  }
  for (const auto& [result, scale] : results) EXPECT_EQ(result.scale(), scale);
}

/// Returns all averages as one float64 CPU tensor.
at::Tensor cat_averages(const mezzo::Ema& ema) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& average : ema.averages()) {
    all.push_back(average.flatten().to(at::kCPU, at::kDouble));
  }
  return at::cat(all);
}

void expect_same(const mezzo::Ema& gpu, const mezzo::Ema& cpu) {
  EXPECT_TRUE(at::allclose(cat_averages(gpu), cat_averages(cpu), 1e-6, 1e-7));
}

TEST_P(EmulatedGpuTraining, CountsConsecutiveSkipsAsynchronously) {
  Training training(emulated_gpu::device());
  std::vector<int64_t> consecutive_skips;
  training.scaler().on_skip(
      [&](const mezzo::SkippedStep& skip) { consecutive_skips.push_back(skip.consecutive_skips); });
  for (const float gradient : {kInfinity, kInfinity, 1.0F, kInfinity, kInfinity, kInfinity, 1.0F}) {
    training.input.fill_(gradient);
    training.iterate();
  }
  emulated_gpu::run_all();
  training.iterate();
  EXPECT_EQ(consecutive_skips, (std::vector<int64_t>{1, 2, 1, 2, 3}));
}

constexpr std::array kEmaWarmups{mezzo::EmaWarmup::none, mezzo::EmaWarmup::num_updates,
                                 mezzo::EmaWarmup::power};

/// A training with an EMA of its parameters.
struct Averaged {
  Averaged(at::Device device, const TrainingOptions& options, mezzo::EmaWarmup warmup)
      : training(device, options), ema(training.parameters(), {.decay = 0.75, .warmup = warmup}) {}
  void iterate() { ema.update(training.iterate()); }

  Training training;
  mezzo::Ema ema;
};

TEST_P(EmulatedGpuTraining, EmaFollowsFoundInfWithoutSync) {
  for (const TrainingOptions& options : all_options()) {
    for (const mezzo::EmaWarmup warmup : kEmaWarmups) {
      Averaged cpu(at::kCPU, options, warmup), gpu(emulated_gpu::device(), options, warmup);
      for (const float value : {1.0F, kInfinity, 2.0F, kInfinity, 3.0F}) {
        cpu.training.input.fill_(value);
        gpu.training.input.fill_(value);
        cpu.iterate();
        const mezzo::StepResult result = gpu.training.iterate();
        const emulated_gpu::Counts before = emulated_gpu::counts();
        gpu.ema.update(result);
        EXPECT_EQ(emulated_gpu::counts().syncs, before.syncs);
        EXPECT_EQ(emulated_gpu::counts().copies_to_host, before.copies_to_host);
      }
      expect_same(gpu.ema, cpu.ema);
      EXPECT_EQ(gpu.ema.num_updates(), cpu.ema.num_updates());
    }
  }
}

TEST_P(EmulatedGpuTraining, EmaUpdateIsCaptured) {
  for (const TrainingOptions& options : all_options()) {
    for (const mezzo::EmaWarmup warmup : kEmaWarmups) {
      Averaged cpu(at::kCPU, options, warmup), gpu(emulated_gpu::device(), options, warmup);
      const c10::StreamGuard stream(emulated_gpu::new_stream());
      cpu.iterate();
      gpu.iterate();
      emulated_gpu::Graph graph;
      emulated_gpu::capture(graph, [&] { gpu.iterate(); });
      for (const float value : {1.0F, kInfinity, 2.0F, kInfinity, kInfinity, 3.0F}) {
        cpu.training.input.fill_(value);
        gpu.training.input.fill_(value);
        cpu.iterate();
        graph.replay();
      }
      expect_same(gpu.ema, cpu.ema);
      EXPECT_EQ(gpu.ema.num_updates(), cpu.ema.num_updates());
    }
  }
}

TEST_P(EmulatedGpuTraining, SupportsTwoDevices) {
  std::vector<at::Tensor> parameters;
  for (int i = 0; i < 6; ++i) {
    parameters.push_back(at::ones({3}, at::device(emulated_gpu::device(i % 2))));
    parameters.back().mutable_grad() = at::ones_like(parameters.back());
  }
  mezzo::optim::AdamW optimizer(parameters);
  mezzo::GradScaler scaler;
  scaler.on_skip(nullptr);
  const auto iterate = [&] {
    (void)scaler.scale(parameters.front());
    const mezzo::StepResult result = scaler.step(optimizer, {.max_norm = 1.0});
    scaler.update();
    return result;
  };
  EXPECT_TRUE(iterate().applied());
  parameters.back().mutable_grad().fill_(kInfinity);
  EXPECT_FALSE(iterate().applied()) << "an inf on one device skips all";
  EXPECT_LT(parameters.front()[0].item<float>(), 1.0F);
  EXPECT_TRUE(at::equal(parameters.front().cpu(), parameters.back().cpu()));
  const at::Tensor before = parameters.front().cpu();
  for (const at::Tensor& parameter : parameters) parameter.mutable_grad().fill_(kInfinity);
  const emulated_gpu::Counts before_step = emulated_gpu::counts();
  const mezzo::StepResult result = iterate();
  const emulated_gpu::Counts after = emulated_gpu::counts();
  EXPECT_EQ(after.launches - before_step.launches, 10);
  EXPECT_EQ(after.argument_bytes - before_step.argument_bytes, 81440);
  EXPECT_EQ(after.ops - before_step.ops, 14);  // the scaled loss and copies between the devices
  EXPECT_EQ(after.copies_to_host - before_step.copies_to_host, 0);
  EXPECT_EQ(after.syncs - before_step.syncs, 0);
  EXPECT_FALSE(result.applied()) << "an inf on both devices";
  EXPECT_TRUE(at::equal(parameters.front().cpu(), before));
}

// --- Between two devices and their streams -----------------------------------------------------

at::Tensor ones_on(int index) {
  return at::ones({3}, at::device(emulated_gpu::device(index)).dtype(at::kFloat));
}

TEST_P(EmulatedGpuTraining, ScalesLossOnAnotherDevice) {
  const at::Tensor parameter = ones_on(0);
  parameter.mutable_grad() = at::ones_like(parameter);
  mezzo::optim::AdamW optimizer({parameter});
  mezzo::GradScaler scaler({.init_scale = 8});
  scaler.on_skip(nullptr);
  (void)scaler.scale(parameter);
  EXPECT_EQ(scaler.scale(ones_on(1))[0].item<float>(), 8.0F);
  parameter.mutable_grad().fill_(kInfinity);
  scaler.step(optimizer);
  scaler.update();
  EXPECT_EQ(scaler.scale(ones_on(1))[0].item<float>(), 4.0F);
}

TEST_P(EmulatedGpuTraining, BackwardThrowsAfterScaleUpdate) {
  Training gpu(emulated_gpu::device());
  gpu.iterate();
  const at::Tensor loss = ones_on(0).requires_grad_();
  const at::Tensor scaled = gpu.scaler().scale(loss).sum();
  gpu.iterate();
  EXPECT_THROW(scaled.backward(), c10::Error) << "backward would use the next scale";
}

TEST_P(EmulatedGpuTraining, UnscalesOnGradientsDeviceStream) {
  const c10::StreamGuard stream(emulated_gpu::new_stream(1));
  const c10::DeviceGuard another(emulated_gpu::device(0));
  const at::Tensor parameter = ones_on(1);
  mezzo::optim::SGD optimizer({parameter}, 1.0);
  mezzo::GradScaler scaler({.init_scale = 8});
  (void)scaler.scale(parameter);
  parameter.mutable_grad() = at::full_like(parameter, 16.0);
  scaler.unscale_(optimizer);
  EXPECT_EQ(parameter.grad()[0].item<float>(), 2.0F);
}

// --- Results and host state --------------------------------------------------------------------

TEST_P(EmulatedGpuTraining, SkipMessageReportsNextScale) {
  Training gpu(emulated_gpu::device());
  std::vector<std::pair<float, float>> scales;
  gpu.scaler().on_skip(
      [&](const mezzo::SkippedStep& skip) { scales.emplace_back(skip.scale, skip.next_scale); });
  gpu.input.fill_(kInfinity);
  for (int i = 0; i < 6; ++i) gpu.iterate();
  emulated_gpu::run_all();
  gpu.iterate();
  ASSERT_GE(scales.size(), 5U);
  float scale = 4.0F;
  for (std::size_t i = 0; i < 5; ++i, scale /= 2) {
    EXPECT_EQ(scales[i], std::pair(scale, scale / 2)) << i;
  }
}

TEST_P(EmulatedGpuTraining, ZeroesSharedGradientAfterBothSteps) {
  const auto stepped = [](at::Device device) {
    const auto one = at::ones({50}, at::device(device));
    const auto other = at::ones({50}, at::device(device));
    one.mutable_grad() = at::full({50}, 2.0, at::device(device));
    other.mutable_grad() = one.grad();
    mezzo::optim::SGD optimizer({one, other}, 1.0);
    mezzo::GradScaler scaler({.init_scale = 1});
    (void)scaler.scale(one);
    scaler.step(optimizer, {.max_norm = 100.0, .zero_grad = true});
    EXPECT_EQ(one.grad().cpu().abs().max().item<float>(), 0.0F);
    return at::cat({one.cpu(), other.cpu()});
  };
  EXPECT_TRUE(at::equal(stepped(emulated_gpu::device()), at::full({100}, -1.0)));
  EXPECT_TRUE(at::equal(stepped(at::kCPU), at::full({100}, -1.0)));
}

TEST_P(EmulatedGpuTraining, DeviceCountStartsAtHostCount) {
  Training gpu(emulated_gpu::device());
  gpu.iterate();
  auto& state =
      get_param_state<mezzo::optim::AdamWParamState>(gpu.optimizer(), gpu.parameters()[0]);
  static_cast<torch::optim::AdamWParamState&>(state).step(41);
  gpu.iterate();
  EXPECT_EQ(state.step(), 42);
  gpu.optimizer().set_applied_steps(7);
  gpu.iterate();
  EXPECT_EQ(gpu.applied_steps(), 8);
}

TEST_P(EmulatedGpuTraining, GradStatsReadSeveralLaunches) {
  std::vector<at::Tensor> gradients;
  for (int i = 0; i < 1100; ++i) gradients.push_back(at::full({1}, i + 1.0, at::kFloat));
  const auto grad_stats = [&](at::Device device) {
    std::vector<at::Tensor> there;
    for (const at::Tensor& gradient : gradients) there.push_back(gradient.to(device));
    return mezzo::detail::compute_grad_stats(there, at::ones({}, at::device(device)));
  };
  const mezzo::GradStats expected = grad_stats(at::kCPU);
  const mezzo::GradStats found = grad_stats(emulated_gpu::device());
  EXPECT_EQ(found.norm_sq.item<double>(), expected.norm_sq.item<double>());
  EXPECT_EQ(found.max_abs.item<double>(), 1100.0);
}

}  // namespace
