// The fused optimizers on a GPU, through ATen's kernels and, where MEZZO_WITH_CUDA is defined,
// through mezzo's, against the CPU's answers.

#include <torch/torch.h>

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <gtest/gtest.h>

#include <mezzo/grad_scaler.h>
#include <mezzo/optim/adam.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/sgd.h>

#include <limits>
#include <sstream>
#include <string>
#include <vector>

namespace {

using mezzo::GradScaler;
using mezzo::GradScalerOptions;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class OptimCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "libtorch sees no CUDA device here";
    torch::manual_seed(1);
  }
};

/// Every call that would wait for the device throws while this lives.
class ForbidSync {
 public:
  ForbidSync() {
    c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR);
  }
  ~ForbidSync() {
    c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED);
  }
};

/// Every layout and dtype that a parameter may have, on the CPU.
std::vector<torch::Tensor> mixed_parameters(const std::vector<torch::ScalarType>& dtypes) {
  std::vector<torch::Tensor> all;
  for (const auto dtype : dtypes) {
    for (const int64_t size : {0, 1, 3, 1000, 70001}) {
      all.push_back(torch::randn({size}).to(dtype));
    }
    all.push_back(torch::randn({40, 30}).to(dtype).t());
    all.push_back(torch::randn({200}).to(dtype).slice(0, 3));          // not aligned
    all.push_back(torch::randn({20, 8}).to(dtype).slice(1, 0, 8, 2));  // with gaps
  }
  for (int i = 0; i < 500; ++i) all.push_back(torch::randn({i % 37}));  // more than a launch takes
  return all;
}

/// A copy on the GPU with the same strides where dense; contiguous ones are not aligned.
torch::Tensor on_gpu(const torch::Tensor& parameter) {
  if (!parameter.is_contiguous()) return parameter.clone().to(torch::kCUDA);
  const auto memory = torch::empty({parameter.numel() + 1},
                                   torch::dtype(parameter.scalar_type()).device(torch::kCUDA));
  return memory.slice(0, 1).copy_(parameter.flatten()).view(parameter.sizes());
}

void copy_gradients(const std::vector<torch::Tensor>& cpu, const std::vector<torch::Tensor>& gpu,
                    double scale) {
  for (std::size_t i = 0; i < cpu.size(); ++i) {
    const auto gradient = torch::randn(cpu[i].sizes()).to(cpu[i].scalar_type()) * scale;
    cpu[i].mutable_grad() = gradient;
    gpu[i].mutable_grad() = gradient.to(torch::kCUDA);
  }
}

double tolerance(torch::ScalarType dtype) {
  switch (dtype) {
    case torch::kDouble:
      return 1e-12;
    case torch::kFloat:
      return 1e-5;
    default:
      return 2e-2;
  }
}

/// Ten steps on both machines, some skipped, clipped at norm 3, by a schedule, without one wait.
template <class Optimizer, class Options>
void expect_the_cpus_answers(const Options& options,
                             const std::vector<torch::ScalarType>& dtypes = {
                                 torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kHalf}) {
  const auto cpu = mixed_parameters(dtypes);
  std::vector<torch::Tensor> gpu;
  for (const auto& parameter : cpu) gpu.push_back(on_gpu(parameter));
  Optimizer cpu_optimizer(cpu, options);
  Optimizer gpu_optimizer(gpu, options);
  for (Optimizer* optimizer : {&cpu_optimizer, &gpu_optimizer}) {
    optimizer->set_lr_factors({1.0, 0.8, 0.5, 1.2});
  }
  const auto scaler_options =
      GradScalerOptions().init_scale(16).growth_interval(3).allow_fp16_gradients(true);
  GradScaler cpu_scaler(scaler_options);
  GradScaler gpu_scaler(scaler_options);
  cpu_scaler.on_skip(nullptr);
  gpu_scaler.on_skip(nullptr);
  const auto host_zero = torch::zeros({});
  const auto device_zero = torch::zeros({}, torch::kCUDA);
  std::vector<mezzo::StepResult> cpu_results;
  std::vector<mezzo::StepResult> gpu_results;
  for (int i = 0; i < 10; ++i) {
    (void)cpu_scaler.scale(host_zero);
    (void)gpu_scaler.scale(device_zero);
    copy_gradients(cpu, gpu, cpu_scaler.get_scale());
    if (i % 4 == 0) {
      cpu[4].mutable_grad()[7] = kInfinity;
      gpu[4].mutable_grad()[7].fill_(kInfinity);
    }
    cpu_results.push_back(cpu_scaler.step(cpu_optimizer, {.max_norm = 3.0, .zero_grad = i == 5}));
    cpu_scaler.update();
    const auto step = [&] {
      gpu_results.push_back(gpu_scaler.step(gpu_optimizer, {.max_norm = 3.0, .zero_grad = i == 5}));
      gpu_scaler.update();
    };
    if (i == 0) {
      step();  // makes the state
    } else {
      const ForbidSync forbid;
      step();
    }
    const auto left = gpu[4].grad().abs().max().template item<float>();
    EXPECT_EQ(left == 0, i == 5);
  }
  for (std::size_t i = 0; i < cpu_results.size(); ++i) {
    EXPECT_EQ(gpu_results[i].ran(), cpu_results[i].ran()) << i;
    EXPECT_EQ(gpu_results[i].scale(), cpu_results[i].scale()) << i;
    if (!cpu_results[i].ran()) continue;
    const double norm = cpu_results[i].grad_norm().value();
    EXPECT_NEAR(gpu_results[i].grad_norm().value(), norm, 1e-6 * norm) << i;
  }
  for (std::size_t i = 0; i < cpu.size(); ++i) {
    const double close = tolerance(cpu[i].scalar_type());
    EXPECT_TRUE(torch::allclose(gpu[i].cpu(), cpu[i], close, close))
        << i << " " << cpu[i].scalar_type();
  }
  EXPECT_EQ(gpu_optimizer.applied_steps(), cpu_optimizer.applied_steps());
  std::stringstream archive;  // on the CPU goes on what the GPU began
  torch::save(gpu_optimizer, archive);
  torch::load(cpu_optimizer, archive);
  copy_gradients(cpu, gpu, 1.0);
  cpu_optimizer.step();
  gpu_optimizer.step();
  EXPECT_TRUE(torch::allclose(gpu[4].cpu(), cpu[4], 1e-5, 1e-5));
}

TEST_F(OptimCuda, AdamWGivesTheCpusAnswersWithoutASync) {
  using mezzo::optim::AdamWOptions;
  expect_the_cpus_answers<mezzo::optim::AdamW>(AdamWOptions(1e-2).eps(1e-3));
  expect_the_cpus_answers<mezzo::optim::AdamW>(AdamWOptions(1e-2).eps(1e-3).amsgrad(true));
}

TEST_F(OptimCuda, KeepsMastersAndAveragesAsTheCpuDoes) {
  using mezzo::optim::AdamWOptions;
  using mezzo::optim::WeightStorage;
  expect_the_cpus_answers<mezzo::optim::AdamW>(
      AdamWOptions(1e-2).eps(1e-3).weight_storage(WeightStorage::master).ema_decay(0.9));
}

#ifdef MEZZO_WITH_CUDA

TEST_F(OptimCuda, SplitsMastersAsTheCpuDoes) {
  using mezzo::optim::AdamWOptions;
  using mezzo::optim::WeightStorage;
  expect_the_cpus_answers<mezzo::optim::AdamW>(
      AdamWOptions(1e-2).eps(1e-3).weight_storage(WeightStorage::split_master).ema_decay(0.9),
      {torch::kFloat, torch::kBFloat16});
}

// The same random bits: rounding differs only where the arithmetic's last bits do.
TEST_F(OptimCuda, RoundsStochasticallyAsTheCpuDoes) {
  using mezzo::optim::AdamWOptions;
  using mezzo::optim::WeightStorage;
  const auto options =
      AdamWOptions(1e-2).eps(1e-3).weight_storage(WeightStorage::stochastic).seed(7);
  expect_the_cpus_answers<mezzo::optim::AdamW>(options, {torch::kBFloat16});
  const auto cpu = torch::randn({100000}).to(torch::kBFloat16);
  const auto gpu = cpu.to(torch::kCUDA);
  cpu.mutable_grad() = torch::randn({100000}).to(torch::kBFloat16);
  gpu.mutable_grad() = cpu.grad().to(torch::kCUDA);
  mezzo::optim::AdamW({cpu}, options).step();
  mezzo::optim::AdamW({gpu}, options).step();
  EXPECT_LT(gpu.cpu().ne(cpu).sum().item<int64_t>(), 100);
}

#endif

TEST_F(OptimCuda, AdamGivesTheCpusAnswersWithoutASync) {
  using mezzo::optim::AdamOptions;
  expect_the_cpus_answers<mezzo::optim::Adam>(AdamOptions(1e-2).eps(1e-3).weight_decay(0.1));
}

TEST_F(OptimCuda, SgdGivesTheCpusAnswersWithoutASync) {
  using mezzo::optim::SGDOptions;
  expect_the_cpus_answers<mezzo::optim::SGD>(SGDOptions(1e-2).weight_decay(0.1));
  expect_the_cpus_answers<mezzo::optim::SGD>(SGDOptions(1e-2).momentum(0.9).nesterov(true));
}

TEST_F(OptimCuda, LionGivesTheCpusAnswersWithoutASyncOrSaysWhatItNeeds) {
  using mezzo::optim::Lion;
  using mezzo::optim::LionOptions;
#ifdef MEZZO_WITH_CUDA
  expect_the_cpus_answers<Lion>(LionOptions(1e-4).weight_decay(0.1));
#else
  const auto x = torch::zeros({4}, torch::kCUDA);
  x.mutable_grad() = torch::ones({4}, torch::kCUDA);
  Lion optimizer({x});
  EXPECT_THROW(optimizer.step(), c10::Error);
#endif
}

TEST_F(OptimCuda, LambGivesTheCpusAnswersWithoutASyncOrSaysWhatItNeeds) {
  using mezzo::optim::LAMB;
  using mezzo::optim::LAMBOptions;
#ifdef MEZZO_WITH_CUDA
  using mezzo::optim::WeightStorage;
  const auto options = LAMBOptions(1e-2).eps(1e-3).weight_decay(0.1);
  expect_the_cpus_answers<LAMB>(options);
  expect_the_cpus_answers<LAMB>(LAMBOptions(1e-2).eps(1e-3).weight_decay(0));
  expect_the_cpus_answers<LAMB>(
      LAMBOptions(options).weight_storage(WeightStorage::master).ema_decay(0.9));
  expect_the_cpus_answers<LAMB>(
      LAMBOptions(options).weight_storage(WeightStorage::split_master).ema_decay(0.9),
      {torch::kFloat, torch::kBFloat16});
#else
  const auto x = torch::zeros({4}, torch::kCUDA);
  x.mutable_grad() = torch::ones({4}, torch::kCUDA);
  LAMB optimizer({x});
  EXPECT_THROW(optimizer.step(), c10::Error);
#endif
}

TEST_F(OptimCuda, WritesTheLineAboutASkipWhenItIsKnown) {
  const auto x = torch::zeros({4}, torch::kCUDA).requires_grad_();
  mezzo::optim::AdamW optimizer({x});
  GradScaler scaler(GradScalerOptions().init_scale(8));
  std::vector<std::string> lines;
  scaler.on_skip([&](const auto& skipped) { lines.push_back(skipped.message()); });
  for (const float gradient : {kInfinity, 1.0F, 1.0F}) {
    (void)scaler.scale(torch::zeros({}, torch::kCUDA));
    x.mutable_grad() = torch::full({4}, gradient, torch::kCUDA);
    scaler.step(optimizer);
    scaler.update();
    torch::cuda::synchronize();
  }
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_EQ(lines[0],
            "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 4.0");
}

// A whole step, captured once and replayed through an overflow.
TEST_F(OptimCuda, RunsInsideACudaGraph) {
  const auto device = torch::device(torch::kCUDA);
  const auto x = torch::zeros({1000}, device.requires_grad(true));
  const auto input = torch::full({1000}, 1.0F, device);
  mezzo::optim::AdamW optimizer({x}, mezzo::optim::AdamWOptions(0.1).weight_decay(0));
  GradScaler scaler(GradScalerOptions().init_scale(4));
  scaler.on_skip(nullptr);
  x.mutable_grad() = torch::zeros({1000}, device);
  const auto iterate = [&] {
    x.mutable_grad().copy_(scaler.scale(input));
    scaler.step(optimizer, {.max_norm = 100.0});
    scaler.update();
  };
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  iterate();  // makes the state
  stream.synchronize();
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  iterate();
  graph.capture_end();
  std::vector<double> scales;
  for (const float value : {1.0F, kInfinity, 1.0F}) {
    input.fill_(value);
    graph.replay();
    scales.push_back(scaler.get_scale());
  }
  EXPECT_EQ(scales, (std::vector<double>{4, 2, 2}));
  EXPECT_NEAR(x[0].item<double>(), -0.3, 1e-4) << "three steps of the rate were applied";
}

}  // namespace
