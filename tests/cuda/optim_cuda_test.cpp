// The fused optimizers on a GPU, through ATen's kernels and, where MEZZO_WITH_CUDA is defined,
// through mezzo's, against the CPU's answers.

#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <sstream>
#include <vector>

#include "../support/special_values.h"
#include "../support/training.h"
#include "count_launches.h"
#include "on_gpu.h"

namespace {

using cuda_test::ForbidSync;
using mezzo::GradScaler;
using mezzo::LossScale;

class OptimCuda : public cuda_test::OnGpu {};

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
                             const mezzo::optim::WeightOptions& weights = {},
                             const std::vector<torch::ScalarType>& dtypes = {
                                 torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kHalf}) {
  const auto cpu = mixed_parameters(dtypes);
  std::vector<torch::Tensor> gpu;
  for (const auto& parameter : cpu) gpu.push_back(on_gpu(parameter));
  Optimizer cpu_optimizer(cpu, options, weights);
  Optimizer gpu_optimizer(gpu, options, weights);
  for (Optimizer* optimizer : {&cpu_optimizer, &gpu_optimizer}) {
    optimizer->set_lr_factors({1.0, 0.8, 0.5, 1.2});
  }
  const auto scaler_options =
      LossScale{.init_scale = 16, .growth_interval = 3, .allow_fp16_gradients = true};
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

TEST_F(OptimCuda, KeepsMastersAsTheCpuDoes) {
  using mezzo::optim::WeightStorage;
  const auto options = mezzo::optim::AdamWOptions(1e-2).eps(1e-3);
  expect_the_cpus_answers<mezzo::optim::AdamW>(options, {.weight_storage = WeightStorage::master});
#ifdef MEZZO_WITH_CUDA
  expect_the_cpus_answers<mezzo::optim::AdamW>(
      options, {.weight_storage = WeightStorage::split_master}, {torch::kFloat, torch::kBFloat16});
#endif
}

#ifdef MEZZO_WITH_CUDA

// The same random bits: rounding differs only where the arithmetic's last bits do.
TEST_F(OptimCuda, RoundsStochasticallyAsTheCpuDoes) {
  using mezzo::optim::AdamWOptions;
  using mezzo::optim::WeightStorage;
  const auto options = AdamWOptions(1e-2).eps(1e-3);
  const mezzo::optim::WeightOptions weights{.weight_storage = WeightStorage::stochastic, .seed = 7};
  expect_the_cpus_answers<mezzo::optim::AdamW>(options, weights, {torch::kBFloat16});
  const auto cpu = torch::randn({100000}).to(torch::kBFloat16);
  const auto gpu = cpu.to(torch::kCUDA);
  cpu.mutable_grad() = torch::randn({100000}).to(torch::kBFloat16);
  gpu.mutable_grad() = cpu.grad().to(torch::kCUDA);
  mezzo::optim::AdamW({cpu}, options, weights).step();
  mezzo::optim::AdamW({gpu}, options, weights).step();
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

TEST_F(OptimCuda, LambGivesTheCpusAnswersWithoutASync) {
  using mezzo::optim::LAMB;
  using mezzo::optim::LAMBOptions;
  for (const double weight_decay : {0.1, 0.0}) {
    const auto cpu = mixed_parameters({torch::kFloat, torch::kDouble});
    std::vector<torch::Tensor> gpu;
    for (const auto& parameter : cpu) gpu.push_back(on_gpu(parameter));
    const auto options = LAMBOptions(1e-2).eps(1e-3).weight_decay(weight_decay);
    LAMB on_cpu(cpu, options);
    LAMB there(gpu, options);
    for (int i = 0; i < 10; ++i) {
      copy_gradients(cpu, gpu, /*scale=*/1);
      on_cpu.step();
      const ForbidSync forbid;
      there.step();
    }
    for (std::size_t i = 0; i < cpu.size(); ++i) {
      EXPECT_TRUE(torch::allclose(gpu[i].cpu(), cpu[i], 1e-5, 1e-6)) << i;
    }
  }
}

#ifdef MEZZO_WITH_CUDA

// The summary and its end, the update, the counts, what the host is to hear, and the scale. Of more
// than 300 tensors the update's table is copied to the device, of more than 900 the summary's, of
// 4,000 the counters'.
TEST_F(OptimCuda, AStepIsSixLaunchesWhateverTheNumberOfTensors) {
  for (const int count : {1, 10, 400, 2000, 5000}) {
    std::vector<torch::Tensor> parameters;
    for (int i = 0; i < count; ++i) {
      parameters.push_back(torch::randn({1 + i % 100}, torch::kCUDA));
      parameters.back().mutable_grad() = torch::randn({1 + i % 100}, torch::kCUDA);
    }
    mezzo::optim::AdamW optimizer(parameters);
    GradScaler scaler;
    (void)scaler.scale(torch::zeros({}, torch::kCUDA));
    const auto step = [&] {
      scaler.step(optimizer, {.max_norm = 1.0});
      scaler.update();
    };
    step();
    torch::cuda::synchronize();
    EXPECT_EQ(cuda_test::count_launches(step), 6) << count;
  }
}

#endif

// A whole step, captured once and replayed through overflows and growth, and through a scale that
// was set from outside, with the CPU beside it.
TEST_F(OptimCuda, RunsInsideACudaGraph) {
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);  // before anything is filled, which is its work
  test_support::Training cpu(torch::kCPU), gpu(torch::kCUDA);
  cpu.iterate();
  gpu.iterate();  // makes the state
  stream.synchronize();
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  const mezzo::StepResult captured = gpu.iterate();
  graph.capture_end();
  for (const float value : {1.0F, kInfinity, 2.0F, 0.5F, kInfinity, kInfinity, 3.0F}) {
    if (value == 3.0F) {
      cpu.set_scale(32);
      gpu.set_scale(32);
    }
    cpu.input.fill_(value);
    gpu.input.fill_(value);
    const mezzo::StepResult expected = cpu.iterate();
    graph.replay();
    EXPECT_EQ(captured.ran(), expected.ran()) << value;
    EXPECT_EQ(captured.scale(), expected.scale()) << value;
    EXPECT_EQ(gpu.scale(), cpu.scale()) << value;
    EXPECT_EQ(gpu.applied_steps(), cpu.applied_steps()) << value;
    EXPECT_TRUE(torch::allclose(gpu.weights(), cpu.weights(), 1e-5, 1e-6)) << value;
  }
}

}  // namespace
