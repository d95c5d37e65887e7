// Runs benchmarks/cuda/cuda_bench.cpp to its end on the emulated GPU, on small shapes, so that no
// GPU time is lost to a crash. The measured times mean nothing.

#include "../../benchmarks/cuda/cuda_bench.cpp"

#include <gtest/gtest.h>

#include <string>

namespace {

TEST(CudaBench, PrintsRowForEachVariant) {
  emulated_gpu::begin(1);
  testing::internal::CaptureStdout();
  EXPECT_TRUE(run_all({.rounds = 1, .is_small = true}));
  const std::string rows = testing::internal::GetCapturedStdout();
  for (const char* const what : {"copy", "check BERT", "step 5 tensors of 10", "training, batch 2",
                                 "unscale half", "update AdamW8bit float"}) {
    EXPECT_NE(rows.find(std::string("{\"what\": \"") + what + "\", \"peer\""), std::string::npos)
        << rows;
  }
  emulated_gpu::run_all();
}

}  // namespace
