#pragma once

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "cuda_device.h"

#ifndef MEZZO_CUDA_EMULATION
#include <c10/cuda/CUDAFunctions.h>
#endif

namespace cuda_test {

/// Skips its tests without a GPU.
class CudaTest : public testing::Test {
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

/// Skips its tests in a program without mezzo's kernels.
class KernelsCuda : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (has_gpu() && !has_mezzo_kernels()) GTEST_SKIP() << "this program has no mezzo kernels";
  }
};

/// Elements of a tensor of many blocks, and tensors for more than one launch. Fewer on the emulated
/// GPU, which is a thousand times slower.
inline constexpr int64_t kManyElements = kIsEmulated ? 9001 : 70001;
inline constexpr int kManyTensors = kIsEmulated ? 310 : 1000;

/// Gradients of every dtype, size and layout, for more than one launch.
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

/// Forbids host syncs: on a GPU they throw; on the emulated GPU the test fails at the end of the
/// guard.
class ForbidSyncGuard {
 public:
  ForbidSyncGuard(const ForbidSyncGuard&) = delete;
  ForbidSyncGuard& operator=(const ForbidSyncGuard&) = delete;
#ifdef MEZZO_CUDA_EMULATION
  ForbidSyncGuard() = default;
  ~ForbidSyncGuard() { EXPECT_EQ(emulated_gpu::counts().syncs, syncs_) << "the host synchronized"; }

 private:
  int64_t syncs_ = emulated_gpu::counts().syncs;
#else
  ForbidSyncGuard() {
    c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR);
  }
  ~ForbidSyncGuard() {
    c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED);
  }
#endif
};

}  // namespace cuda_test
