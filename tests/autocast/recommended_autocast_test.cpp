#include <mezzo/autocast/autocast_options.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <optional>
#include <string>

namespace {

using mezzo::AutocastOptions;
using mezzo::detail::ComputeCapability;
using mezzo::detail::CpuFeatures;
using mezzo::detail::recommend_cpu;
using mezzo::detail::recommend_cuda;
using testing::HasSubstr;
using testing::ThrowsMessage;

static_assert(mezzo::default_autocast_dtype(torch::kCPU) == torch::kBFloat16);
static_assert(mezzo::default_autocast_dtype(torch::kCUDA) == torch::kHalf);
static_assert(mezzo::default_autocast_dtype(torch::kMeta) == torch::ScalarType::Undefined);
static_assert(mezzo::is_autocast_dtype_supported(torch::kCPU, torch::kHalf));
static_assert(mezzo::is_autocast_dtype_supported(torch::kCUDA, torch::kBFloat16));
static_assert(!mezzo::is_autocast_dtype_supported(torch::kCUDA, torch::kFloat));
static_assert(!mezzo::is_autocast_dtype_supported(torch::kMeta, torch::kHalf));

TEST(CpuFeatures, MatchProcCpuinfo) {
  std::ifstream file("/proc/cpuinfo");
  if (!mezzo::detail::cpu_features().known || !file) {
    GTEST_SKIP() << "no x86-64, or no /proc/cpuinfo";
  }
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const CpuFeatures cpu = mezzo::detail::cpu_features();
  EXPECT_EQ(cpu.bf16, text.find(" avx512_bf16") != std::string::npos);
  EXPECT_EQ(cpu.fp16, text.find(" avx512_fp16") != std::string::npos);
}

TEST(RecommendedAutocast, ReturnsBFloat16ForNativeCpu) {
  const AutocastOptions zen = recommend_cpu({.known = true, .bf16 = true});
  EXPECT_TRUE(zen.enabled);
  EXPECT_EQ(zen.device_type, torch::kCPU);
  EXPECT_EQ(zen.dtype, torch::kBFloat16);
  EXPECT_EQ(zen.reason, "bfloat16: this CPU has avx512_bf16");
}

TEST(RecommendedAutocast, DisabledForEmulatingCpu) {
  const AutocastOptions emulated = recommend_cpu({.known = true});
  EXPECT_FALSE(emulated.enabled);
  EXPECT_TRUE(mezzo::is_autocast_dtype_supported(torch::kCPU, *emulated.dtype))
      << "a guard must accept it";
  EXPECT_EQ(emulated.reason,
            "float32 (autocast off): this CPU has no bfloat16 instructions, and emulated bfloat16 "
            "is slower than float32");
}

TEST(RecommendedAutocast, DisabledForUnknownCpu) {
  const AutocastOptions setting = recommend_cpu({});
  EXPECT_FALSE(setting.enabled);
  EXPECT_THAT(setting.reason, HasSubstr("on x86-64 only; set the dtype yourself"));
}

TEST(RecommendedAutocast, FollowsComputeCapabilityOnCuda) {
  const AutocastOptions hopper = recommend_cuda(ComputeCapability{9, 0});
  EXPECT_TRUE(hopper.enabled);
  EXPECT_EQ(hopper.dtype, torch::kBFloat16);
  EXPECT_EQ(hopper.reason,
            "bfloat16: a GPU of compute capability 9.0 multiplies it natively, in float32's range");
  EXPECT_EQ(recommend_cuda(ComputeCapability{8, 0}).dtype, torch::kBFloat16);

  const AutocastOptions turing = recommend_cuda(ComputeCapability{7, 5});
  EXPECT_TRUE(turing.enabled);
  EXPECT_EQ(turing.dtype, torch::kHalf);
  EXPECT_EQ(turing.reason,
            "float16: a GPU of compute capability 7.5 multiplies it natively, but not bfloat16; "
            "scale the loss");
  EXPECT_EQ(recommend_cuda(ComputeCapability{7, 0}).dtype, torch::kHalf);

  const AutocastOptions pascal = recommend_cuda(ComputeCapability{6, 1});
  EXPECT_FALSE(pascal.enabled);
  EXPECT_EQ(pascal.reason,
            "float32 (autocast off): a GPU of compute capability 6.1 has no tensor cores");
}

TEST(RecommendedAutocast, DisabledWithoutGpu) {
  EXPECT_EQ(recommend_cuda(std::nullopt).reason,
            "float32 (autocast off): libtorch finds no CUDA device");
  if (!torch::cuda::is_available()) {
    EXPECT_FALSE(mezzo::recommended_autocast(torch::kCUDA).enabled);
    EXPECT_THAT(
        [] {
          mezzo::recommended_autocast({torch::kCUDA, 3});
        },
        ThrowsMessage<c10::Error>(HasSubstr("there is no cuda:3; libtorch finds 0")));
  }
}

TEST(RecommendedAutocast, ThrowsForUnsupportedDevice) {
  EXPECT_THAT(
      [] { mezzo::recommended_autocast(torch::kMeta); },
      ThrowsMessage<c10::Error>(HasSubstr(
          "unsupported autocast device_type 'meta'; this libtorch has autocast for cpu, cuda,")));
}

TEST(ComputeCapability, ReadFromDriver) {
  const auto second = mezzo::detail::query_compute_capability(1, FAKE_CUDA_DRIVER);
  ASSERT_TRUE(second);
  EXPECT_EQ(second->major, 8);
  EXPECT_EQ(second->minor, 6);
}

TEST(ComputeCapability, UnknownWithoutDriverOrDevice) {
  EXPECT_FALSE(mezzo::detail::query_compute_capability(7, FAKE_CUDA_DRIVER));
  EXPECT_FALSE(mezzo::detail::query_compute_capability(0, "no_such_driver.so"));
  EXPECT_FALSE(mezzo::detail::query_compute_capability(0, "libm.so.6"));
}

}  // namespace
