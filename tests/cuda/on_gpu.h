#pragma once

#include <c10/cuda/CUDAFunctions.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <vector>

namespace cuda_test {

/// Skipped, in words, where there is no GPU.
class OnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "libtorch sees no CUDA device here";
    torch::manual_seed(1);
  }
};

/// Of every dtype, size and layout; more of them than a launch takes.
inline std::vector<torch::Tensor> mixed_gradients() {
  std::vector<torch::Tensor> all;
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf, torch::kDouble}) {
    const auto random = [dtype](at::IntArrayRef shape) {
      return torch::randn(shape).to(dtype).to(torch::kCUDA);
    };
    for (const int64_t size : {0, 1, 3, 1000, 70001}) all.push_back(random({size}));
    all.push_back(random({40, 30}).t());
    all.push_back(random({200}).slice(0, 3));  // not aligned to 16 bytes
  }
  for (int i = 0; i < 1000; ++i) all.push_back(torch::randn({i}).to(torch::kCUDA));
  return all;
}

/// Every call that would wait for the device throws while this lives.
class ForbidSync {
 public:
  ForbidSync() {
    c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR);
  }
  ~ForbidSync() {
    c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED);
  }
  ForbidSync(const ForbidSync&) = delete;
  ForbidSync& operator=(const ForbidSync&) = delete;
};

}  // namespace cuda_test
