#pragma once

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "gpu.h"

#ifndef MEZZO_CUDA_EMULATION
#include <c10/cuda/CUDAFunctions.h>
#endif

namespace cuda_test {

/// Skipped, in words, where there is no GPU.
class OnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_gpu()) GTEST_SKIP() << "libtorch sees no CUDA device here";
    torch::manual_seed(1);
#ifdef MEZZO_CUDA_EMULATION
    emulated_gpu::begin(1);
#endif
  }
#ifdef MEZZO_CUDA_EMULATION
  void TearDown() override { emulated_gpu::run_all(); }
#endif
};

/// Tests of mezzo's kernels, skipped in a program that steps with ATen's.
class KernelsCuda : public OnGpu {
 protected:
  void SetUp() override {
    OnGpu::SetUp();
    if (has_gpu() && !has_mezzo_kernels()) GTEST_SKIP() << "this program has no kernels of mezzo's";
  }
};

/// Elements of a tensor of many blocks, and tensors for more than one launch. Fewer on the
/// simulated GPU, which is a thousand times slower.
inline constexpr int64_t kManyElements = kIsSimulated ? 9001 : 70001;
inline constexpr int kManyTensors = kIsSimulated ? 310 : 1000;

/// Of every dtype, size and layout; more of them than a launch takes.
inline std::vector<torch::Tensor> mixed_gradients() {
  std::vector<torch::Tensor> all;
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf, torch::kDouble}) {
    const auto random = [dtype](at::IntArrayRef shape) {
      return torch::randn(shape).to(dtype).to(kGpu);
    };
    for (const int64_t size : std::initializer_list<int64_t>{0, 1, 3, 1000, kManyElements})
      all.push_back(random({size}));
    all.push_back(random({40, 30}).t());
    all.push_back(random({200}).slice(0, 3));  // not aligned to 16 bytes
  }
  for (int i = 0; i < kManyTensors; ++i) all.push_back(torch::randn({i}).to(kGpu));
  return all;
}

/// A guard under which a call that waits for the device throws on a GPU; on the simulated GPU the
/// test fails at the guard's end.
class ForbidSync {
 public:
  ForbidSync(const ForbidSync&) = delete;
  ForbidSync& operator=(const ForbidSync&) = delete;
#ifdef MEZZO_CUDA_EMULATION
  ForbidSync() = default;
  ~ForbidSync() { EXPECT_EQ(emulated_gpu::counts().waits, waits_) << "the host waited"; }

 private:
  int64_t waits_ = emulated_gpu::counts().waits;
#else
  ForbidSync() {
    c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR);
  }
  ~ForbidSync() {
    c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED);
  }
#endif
};

}  // namespace cuda_test
