// Fused optimizers on a GPU against the CPU, with mezzo's kernels if the program links mezzo::cuda,
// otherwise ATen's: every optimizer and weight storage.

#include <mezzo/optim/adamw.h>
#include <mezzo/optim/adamw8bit.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/muon.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/optim/step_in_backward.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../support/bitwise_equal.h"
#include "../support/special_values.h"
#include "../support/training.h"
#include "cuda_test.h"

namespace {

using cuda_test::ForbidSyncGuard;
using cuda_test::KernelsCuda;
using cuda_test::kGpu;
using mezzo::GradScaler;
using mezzo::GradScalerOptions;
using mezzo::detail::FusedOptimizerBase;
using mezzo::optim::WeightStorage;
using mezzo::optim::WeightStorageOptions;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

class OptimCuda : public cuda_test::CudaTest {};

struct OptimizerCase {
  const char* name;
  std::function<std::unique_ptr<FusedOptimizerBase>(const Tensors&, const WeightStorageOptions&)>
      make;
  bool is_in_aten = true;
};

template <class Optimizer, class Options>
OptimizerCase optimizer_case(const char* name, const Options& options, bool is_in_aten = true) {
  return {name,
          [options](const Tensors& parameters, const WeightStorageOptions& weights) {
            return std::make_unique<Optimizer>(parameters, options, weights);
          },
          is_in_aten};
}

std::vector<OptimizerCase> optimizer_cases() {
  using namespace mezzo::optim;
  const auto adamw = AdamWOptions(1e-2).eps(1e-3);
  return {optimizer_case<AdamW>("AdamW", adamw),
          optimizer_case<AdamW>("AdamW, amsgrad", AdamWOptions(adamw).amsgrad(true)),
          optimizer_case<Adam>("Adam", AdamOptions(1e-2).eps(1e-3).weight_decay(0.1)),
          optimizer_case<SGD>("SGD", SGDOptions(1e-2).weight_decay(0.1)),
          optimizer_case<SGD>("SGD, momentum", SGDOptions(1e-2).momentum(0.9).nesterov(true)),
          optimizer_case<Lion>("Lion", LionOptions(1e-3).weight_decay(0.1), /*is_in_aten=*/false)};
}

struct StorageCase {
  const char* name;
  torch::ScalarType dtype;
  torch::ScalarType gradient_dtype;
  WeightStorage storage = WeightStorage::plain;
  bool is_in_aten = true;
};

std::vector<StorageCase> storage_cases() {
  using namespace torch;
  using enum WeightStorage;
  return {{"float", kFloat, kFloat},
          {"double", kDouble, kDouble},
          {"bfloat16", kBFloat16, kBFloat16},
          {"float16", kHalf, kHalf},
          {"bfloat16, float gradients", kBFloat16, kFloat, plain, false},
          {"float16, float gradients", kHalf, kFloat, plain, false},
          {"master of bfloat16", kBFloat16, kBFloat16, fp32_master},
          {"master of float16", kHalf, kHalf, fp32_master},
          {"master of bfloat16, float gradients", kBFloat16, kFloat, fp32_master},
          {"split master", kBFloat16, kBFloat16, split_master, false},
          {"split master, float gradients", kBFloat16, kFloat, split_master, false},
          {"stochastic", kBFloat16, kBFloat16, stochastic_rounding, false},
          {"stochastic, float gradients", kBFloat16, kFloat, stochastic_rounding, false}};
}

/// Returns whether this program has kernels for the optimizer and storage. ATen ops on the emulated
/// GPU are the CPU's, whose SGD steps 16-bit parameters incorrectly (libtorch 2.11).
bool has_kernels(const OptimizerCase& optimizer, const StorageCase& storage) {
  if (cuda_test::has_mezzo_kernels()) return true;
  const bool is_wrong = cuda_test::kIsEmulated && storage.storage == WeightStorage::plain &&
                        c10::elementSize(storage.dtype) == 2 &&
                        std::string(optimizer.name).starts_with("SGD");
  return optimizer.is_in_aten && storage.is_in_aten && !is_wrong;
}

template <class Visit>
void for_each_optimizer(const std::vector<OptimizerCase>& optimizers, const Visit& visit) {
  for (const OptimizerCase& optimizer : optimizers) {
    for (const StorageCase& storage : storage_cases()) {
      if (!has_kernels(optimizer, storage)) continue;
      SCOPED_TRACE(testing::Message() << optimizer.name << ", " << storage.name);
      visit(optimizer, storage);
    }
  }
}

/// Returns a copy with equal strides, `offset` elements into new memory.
Tensor copy_on(torch::Device device, const Tensor& value, int64_t offset = 0) {
  int64_t storage_size = 1;
  for (int64_t i = 0; i < value.dim(); ++i) {
    storage_size += (std::max<int64_t>(value.size(i), 1) - 1) * value.stride(i);
  }
  const auto options = torch::dtype(value.scalar_type()).device(device);
  const auto memory = torch::zeros({storage_size + offset}, options);
  return memory.as_strided(value.sizes(), value.strides(), offset).copy_(value);
}

/// Equal parameters on the CPU and the GPU, where some, and some gradients, are misaligned.
struct ParameterPairs {
  Tensors cpu, gpu;

  explicit ParameterPairs(torch::ScalarType dtype, int more = 0) {
    for (const int64_t size : {int64_t{0}, int64_t{3}, cuda_test::kManyElements}) {
      add(torch::randn({size}).to(dtype), 0);
    }
    for (const int64_t offset : {1, 2, 4}) add(torch::randn({1031}).to(dtype), offset);
    add(torch::randn({40, 30}).to(dtype).t(), 0);
    add(torch::randn({20, 4}).to(dtype), 0);
    for (int i = 0; i < more; ++i) add(torch::randn({i % 37}).to(dtype), i % 3);
  }

  void set_gradients(torch::ScalarType dtype, double scale, bool has_inf = false) const {
    for (std::size_t i = 0; i < cpu.size(); ++i) {
      Tensor gradient = (torch::randn(cpu[i].sizes()) * scale).to(dtype);
      if (gradient.dim() == 2 && gradient.size(0) == 20) {  // with gaps
        gradient = torch::cat({gradient, gradient}, 1).slice(1, 0, 8, 2);
      }
      if (has_inf && i == 2) gradient[7] = kInfinity;
      cpu[i].mutable_grad() = gradient;
      gpu[i].mutable_grad() = copy_on(kGpu, gradient, static_cast<int64_t>(i % 4));
    }
  }

 private:
  void add(const Tensor& value, int64_t offset) {
    cpu.push_back(copy_on(torch::kCPU, value));
    gpu.push_back(copy_on(kGpu, value, offset));
  }
};

/// On the emulated GPU, which the same compiler compiles, expects results bitwise identical to the
/// CPU's, unless gradients are clipped: the last bits of a norm depend on the order of its sum. On
/// a GPU `pow` and contraction may change the last bit, so one in a hundred 16-bit elements may
/// differ by two units.
void expect_same(const Tensor& gpu, const Tensor& cpu, bool is_clipped) {
  if (cuda_test::kIsEmulated && cuda_test::has_mezzo_kernels() && !is_clipped) {
    EXPECT_TRUE(test_support::bitwise_equal(gpu.cpu(), cpu))
        << gpu.cpu().ne(cpu).sum().item<int64_t>() << " of " << cpu.numel() << " elements differ";
    return;
  }
  const auto dtype = cpu.scalar_type();
  const bool is_small = cpu.element_size() == 2;
  const Tensor wide = cpu.to(torch::kDouble);
  const Tensor difference = (gpu.cpu().to(torch::kDouble) - wide).abs();
  double unit = dtype == torch::kDouble  ? 2e-16
                : dtype == torch::kFloat ? 1.2e-7
                : dtype == torch::kHalf  ? 9.8e-4
                                         : 7.9e-3;
  if (dtype == torch::kDouble && is_clipped) unit = 1e-8;  // a norm of squares summed in float32
  if (!cuda_test::has_mezzo_kernels()) unit = std::max(unit, 1e-6);
  const Tensor allowed = (wide.abs() + 0.01) * (unit * (is_small ? 2.1 : 16));
  EXPECT_TRUE(difference.le(allowed).all().item<bool>())
      << "differs by up to " << difference.div(allowed).max().item<double>() << " times the bound";
  if (is_small && cuda_test::has_mezzo_kernels()) {
    EXPECT_LE(difference.ne(0).sum().item<int64_t>(), 2 + cpu.numel() / 100);
  }
}

void expect_same(const Tensors& gpu, const Tensors& cpu, bool is_clipped) {
  for (std::size_t i = 0; i < cpu.size(); ++i) {
    if (cpu[i].numel() == 0) continue;
    SCOPED_TRACE(testing::Message() << "parameter " << i);
    expect_same(gpu[i].detach(), cpu[i].detach(), is_clipped);
  }
}

/// An optimizer on the CPU and the same on the GPU, whose steps do not synchronize with the host.
class Twins {
 public:
  Twins(const ParameterPairs& parameters, std::unique_ptr<FusedOptimizerBase> cpu,
        std::unique_ptr<FusedOptimizerBase> gpu)
      : parameters_(parameters), cpu_(std::move(cpu)), gpu_(std::move(gpu)) {
    for (FusedOptimizerBase* const own : {cpu_.get(), gpu_.get()})
      own->set_lr_factors({1.0, 0.8, 0.5, 1.2});
    for (GradScaler* const own : {&cpu_scaler_, &gpu_scaler_}) own->on_skip(nullptr);
  }

  /// Takes five steps; gradients of the first and the fourth have an inf.
  void train(torch::ScalarType gradient_dtype, double max_norm) {
    std::vector<mezzo::StepResult> of_cpu, of_gpu;
    for (int i = 0; i < 5; ++i) {
      (void)cpu_scaler_.scale(torch::zeros({}));
      (void)gpu_scaler_.scale(torch::zeros({}, kGpu));
      parameters_.set_gradients(gradient_dtype, cpu_scaler_.get_scale(), i % 3 == 0);
      const mezzo::StepOptions options{.max_norm = max_norm, .zero_grad = i == 2};
      of_cpu.push_back(cpu_scaler_.step(*cpu_, options));
      cpu_scaler_.update();
      const auto step = [&] {
        of_gpu.push_back(gpu_scaler_.step(*gpu_, options));
        gpu_scaler_.update();
      };
      if (i == 0) {
        step();  // creates the state
      } else {
        const ForbidSyncGuard forbid;
        step();
      }
      const auto left = parameters_.gpu[2].grad().abs().max().item<float>();
      EXPECT_EQ(left == 0, i == 2);
    }
    for (std::size_t i = 0; i < of_cpu.size(); ++i) {
      EXPECT_EQ(of_gpu[i].applied(), of_cpu[i].applied()) << i;
      EXPECT_EQ(of_gpu[i].scale(), of_cpu[i].scale()) << i;
      if (!of_cpu[i].applied()) continue;
      const double norm = of_cpu[i].grad_norm().value();
      EXPECT_NEAR(of_gpu[i].grad_norm().value(), norm, 1e-6 * norm) << i;
    }
    EXPECT_EQ(gpu_->applied_steps(), cpu_->applied_steps());
    expect_same(parameters_.gpu, parameters_.cpu, max_norm != kNoClipping);
  }

  /// Loads the GPU optimizer's archive in the CPU optimizer.
  void move_to_cpu() {
    const torch::NoGradGuard no_grad;
    std::stringstream archive;
    torch::save(*gpu_, archive);
    torch::load(*cpu_, archive);
    for (std::size_t i = 0; i < parameters_.cpu.size(); ++i) {
      parameters_.cpu[i].copy_(parameters_.gpu[i]);
    }
    parameters_.set_gradients(parameters_.cpu[0].scalar_type(), 1.0);
    cpu_->step();
    gpu_->step();
    expect_same(parameters_.gpu, parameters_.cpu, /*is_clipped=*/false);
  }

  static constexpr double kNoClipping = std::numeric_limits<double>::infinity();

 private:
  static constexpr GradScalerOptions kScale{
      .init_scale = 16, .growth_interval = 3, .allow_fp16_gradients = true};

  const ParameterPairs& parameters_;
  std::unique_ptr<FusedOptimizerBase> cpu_, gpu_;
  GradScaler cpu_scaler_{kScale}, gpu_scaler_{kScale};
};

void expect_cpu_steps(const OptimizerCase& optimizer, const StorageCase& storage, double max_norm,
                      int more_parameters = 0) {
  const ParameterPairs parameters(storage.dtype, more_parameters);
  const WeightStorageOptions weights{.weight_storage = storage.storage, .seed = 7};
  Twins twins(parameters, optimizer.make(parameters.cpu, weights),
              optimizer.make(parameters.gpu, weights));
  twins.train(storage.gradient_dtype, max_norm);
}

TEST_F(OptimCuda, EveryOptimizerAndStorageMatchesCpu) {
  for_each_optimizer(optimizer_cases(),
                     [](const OptimizerCase& optimizer, const StorageCase& storage) {
                       expect_cpu_steps(optimizer, storage, Twins::kNoClipping);
                     });
}

TEST_F(OptimCuda, ClippedStepsMatchCpu) {
  for_each_optimizer({optimizer_cases()[0]},
                     [](const OptimizerCase& optimizer, const StorageCase& storage) {
                       expect_cpu_steps(optimizer, storage, 3.0);
                     });
}

TEST_F(OptimCuda, SeveralLaunchesOfTensorsMatchCpu) {
  expect_cpu_steps(optimizer_cases()[0], storage_cases()[0], 3.0, cuda_test::kManyTensors);
}

TEST_F(OptimCuda, SeveralLaunchesOfGroupsMatchCpu) {
  const ParameterPairs parameters(torch::kFloat, 30);
  const auto make = [](const Tensors& all) {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    for (const Tensor& parameter : all) {
      const double lr = 1e-3 * static_cast<double>(groups.size() + 1);
      auto options =
          std::make_unique<mezzo::optim::AdamWOptions>(mezzo::optim::AdamWOptions(lr).eps(1e-3));
      groups.emplace_back(Tensors{parameter}, std::move(options));
    }
    return std::make_unique<mezzo::optim::AdamW>(groups);
  };
  Twins twins(parameters, make(parameters.cpu), make(parameters.gpu));
  twins.train(torch::kFloat, Twins::kNoClipping);
}

TEST_F(OptimCuda, LoadsGpuArchiveOnCpu) {
  for_each_optimizer(
      optimizer_cases(), [](const OptimizerCase& optimizer, const StorageCase& storage) {
        if (storage.dtype != storage.gradient_dtype) return;
        const ParameterPairs parameters(storage.dtype);
        const WeightStorageOptions weights{.weight_storage = storage.storage, .seed = 7};
        Twins twins(parameters, optimizer.make(parameters.cpu, weights),
                    optimizer.make(parameters.gpu, weights));
        parameters.set_gradients(storage.dtype, 1.0);
        twins.train(storage.dtype, Twins::kNoClipping);
        twins.move_to_cpu();
      });
}

TEST_F(OptimCuda, LionWithoutKernelsThrows) {
  if (cuda_test::has_mezzo_kernels()) return;
  const auto x = torch::zeros({4}, kGpu);
  x.mutable_grad() = torch::ones({4}, kGpu);
  mezzo::optim::Lion optimizer({x});
  EXPECT_THROW(optimizer.step(), c10::Error);
}

TEST_F(OptimCuda, EightBitMomentsMatchCpu) {
  for (const auto& [dtype, gradient_dtype] :
       {std::pair(torch::kFloat, torch::kFloat), std::pair(torch::kBFloat16, torch::kBFloat16),
        std::pair(torch::kBFloat16, torch::kFloat)}) {
    SCOPED_TRACE(testing::Message() << dtype << ", " << gradient_dtype);
    const ParameterPairs parameters(dtype);
    mezzo::optim::AdamW8bit cpu(parameters.cpu, torch::optim::AdamWOptions(1e-2));
    mezzo::optim::AdamW8bit gpu(parameters.gpu, torch::optim::AdamWOptions(1e-2));
    parameters.set_gradients(gradient_dtype, 1.0);
    if (!cuda_test::has_mezzo_kernels()) {
      EXPECT_THROW(gpu.step(), c10::Error);
      continue;
    }
    for (int i = 0; i < 4; ++i) {
      parameters.set_gradients(gradient_dtype, 1.0);
      cpu.step();
      gpu.step();
    }
    if (cuda_test::kIsEmulated) {
      expect_same(parameters.gpu, parameters.cpu, /*is_clipped=*/false);
      continue;
    }
    for (std::size_t i = 0; i < parameters.cpu.size(); ++i) {
      // The last bit of a moment may select the next qval, in few elements.
      const Tensor difference =
          (parameters.gpu[i].cpu().to(torch::kDouble) - parameters.cpu[i].to(torch::kDouble)).abs();
      EXPECT_LE(difference.gt(dtype == torch::kFloat ? 1e-6 : 0).sum().item<int64_t>(),
                2 + parameters.cpu[i].numel() / 100);
      EXPECT_TRUE(difference.le(dtype == torch::kFloat ? 1e-2 : 0.05).all().item<bool>());
    }
  }
}

TEST_F(OptimCuda, LambMatchesCpuWithoutSync) {
  using mezzo::optim::LAMB;
  using mezzo::optim::LAMBOptions;
  for (const double weight_decay : {0.1, 0.0}) {
    for (const auto dtype : {torch::kFloat, torch::kDouble}) {
      const ParameterPairs parameters(dtype, 30);
      const auto options = LAMBOptions(1e-2).eps(1e-3).weight_decay(weight_decay);
      LAMB cpu(parameters.cpu, options);
      LAMB gpu(parameters.gpu, options);
      for (int i = 0; i < 5; ++i) {
        parameters.set_gradients(dtype, 1.0);
        cpu.step();
        const ForbidSyncGuard forbid;
        gpu.step();
      }
      for (std::size_t i = 0; i < parameters.cpu.size(); ++i) {
        EXPECT_TRUE(torch::allclose(parameters.gpu[i].cpu(), parameters.cpu[i], 1e-5, 1e-6)) << i;
      }
    }
  }
}

// Muon multiplies in bfloat16, and the GPU sums products in another order.
TEST_F(OptimCuda, MuonMatchesCpu) {
  Tensors cpu, gpu;
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{16, 16}, {40, 30}, {8, 64}}) {
    cpu.push_back(torch::randn(sizes));
    gpu.push_back(cpu.back().to(kGpu));
  }
  mezzo::optim::Muon on_cpu(cpu, mezzo::optim::MuonOptions(1e-2));
  mezzo::optim::Muon on_gpu(gpu, mezzo::optim::MuonOptions(1e-2));
  for (int i = 0; i < 4; ++i) {
    for (std::size_t k = 0; k < cpu.size(); ++k) {
      cpu[k].mutable_grad() = torch::randn(cpu[k].sizes());
      gpu[k].mutable_grad() = cpu[k].grad().to(kGpu);
    }
    on_cpu.step();
    on_gpu.step();
  }
  for (std::size_t k = 0; k < cpu.size(); ++k) {
    EXPECT_LT((gpu[k].cpu() - cpu[k]).abs().max().item<double>(), 2e-3) << k;
  }
}

// Launches of a step: GradStats, their merge, the update, the step counts, the result, and the next
// scale. A launch of GradStats or the update holds 300 tensors, and one of step counts 480.
TEST_F(KernelsCuda, LaunchCountsFollowMetadataCapacity) {
  for (const int count : {1, 10, 400, 2000}) {
    Tensors parameters;
    for (int i = 0; i < count; ++i) {
      parameters.push_back(torch::randn({1 + i % 100}, kGpu));
      parameters.back().mutable_grad() = torch::randn({1 + i % 100}, kGpu);
    }
    mezzo::optim::AdamW optimizer(parameters);
    GradScaler scaler;
    (void)scaler.scale(torch::zeros({}, kGpu));
    const auto step = [&] {
      scaler.step(optimizer, {.max_norm = 1.0});
      scaler.update();
    };
    step();
    cuda_test::synchronize();
    const auto num_launches = [](int num_tensors, int capacity) {
      return (num_tensors + capacity - 1) / capacity;
    };
    EXPECT_EQ(cuda_test::count_launches(step),
              3 + 2 * num_launches(count, 300) + num_launches(count + 1, 480))
        << count;
  }
}

// A captured step, replayed through overflows, growth and a scale set in between, against the CPU.
TEST_F(OptimCuda, RunsInCudaGraph) {
  const auto stream = cuda_test::new_stream();
  const c10::StreamGuard guard(stream);  // before tensors are filled, on this stream
  test_support::Training cpu(torch::kCPU), gpu(kGpu);
  cpu.iterate();
  gpu.iterate();  // creates the state
  stream.synchronize();
  cuda_test::Graph graph;
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
    EXPECT_EQ(captured.applied(), expected.applied()) << value;
    EXPECT_EQ(captured.scale(), expected.scale()) << value;
    EXPECT_EQ(gpu.scale(), cpu.scale()) << value;
    EXPECT_EQ(gpu.applied_steps(), cpu.applied_steps()) << value;
    EXPECT_TRUE(torch::allclose(gpu.weights(), cpu.weights(), 1e-5, 1e-6)) << value;
  }
}

// The device counts steps and looks up the learning rates.
TEST_F(OptimCuda, StepInBackwardMatchesOrdinaryLoop) {
  for (const WeightStorage storage : {WeightStorage::plain, WeightStorage::fp32_master}) {
    const auto dtype = storage == WeightStorage::plain ? torch::kFloat : torch::kBFloat16;
    const auto make = [dtype] {
      const auto weight = torch::linspace(-1, 1, 300).to(dtype).to(kGpu);
      return Tensors{weight.clone().requires_grad_(), weight.neg().requires_grad_()};
    };
    const Tensors weights = make(), expected = make();
    const mezzo::optim::AdamWOptions options(0.1);
    mezzo::optim::AdamW optimizer(weights, options, {storage}),
        ordinary(expected, options, {storage});
    optimizer.set_lr_factors({1.0, 0.5, 0.25, 0.0});
    ordinary.set_lr_factors({1.0, 0.5, 0.25, 0.0});
    mezzo::StepInBackward in_backward(optimizer);
    const auto loss = [](const Tensors& of, double factor) {
      return (of[0] * factor).sum() + (of[1] * of[1]).sum();
    };
    for (int step = 0; step < 3; ++step) {
      {
        std::optional<ForbidSyncGuard> forbid_sync;
        if (step > 0) forbid_sync.emplace();
        loss(weights, 1).backward();
        (void)in_backward.step();
      }
      ordinary.zero_grad();
      loss(expected, 1).backward();
      ordinary.step();
    }
    for (std::size_t i = 0; i < 2; ++i) EXPECT_TRUE(torch::equal(weights[i], expected[i])) << i;
    EXPECT_EQ(optimizer.applied_steps(), 3);
    optimizer.set_lr_factors({1.0});
    loss(weights, std::numeric_limits<double>::quiet_NaN()).backward();
    EXPECT_TRUE(in_backward.step().found_inf());
    EXPECT_TRUE(torch::equal(weights[0], expected[0]));
    EXPECT_FALSE(torch::equal(weights[1], expected[1]));
  }
}

}  // namespace
