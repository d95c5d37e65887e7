#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/autocast/autocast_options.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <string>

namespace {

using mezzo::autocast_from_env;
using mezzo::AutocastOptions;
using mezzo::detail::CpuFeatures;
using mezzo::detail::parse_mixed_precision;
using testing::HasSubstr;
using testing::ThrowsMessage;

/// Sets an environment variable for one scope; nullptr removes it.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const char* value) : name_(name) {
    if (const char* found = std::getenv(name)) {
      found_ = found;
    }
    set(value);
  }
  ~ScopedVariable() { set(found_ ? found_->c_str() : nullptr); }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;

 private:
  void set(const char* value) const {
    if (value == nullptr) {
      unsetenv(name_);
    } else {
      setenv(name_, value, 1);
    }
  }

  const char* name_;
  std::optional<std::string> found_;
};

ScopedVariable environment(const char* value) { return {"MEZZO_MIXED_PRECISION", value}; }

TEST(AutocastFromEnv, ReturnsDeviceDefaultWhenUnset) {
  for (const char* value : {static_cast<const char*>(nullptr), ""}) {
    const ScopedVariable variable = environment(value);
    const AutocastOptions cpu = autocast_from_env(torch::kCPU);
    EXPECT_TRUE(cpu.enabled);
    EXPECT_EQ(cpu.dtype, torch::kBFloat16);
    EXPECT_EQ(cpu.reason, "bfloat16: the default on the CPU");
    EXPECT_EQ(autocast_from_env(torch::kCUDA).dtype, torch::kHalf);
    EXPECT_EQ(autocast_from_env(torch::kCUDA).reason, "float16: the default on CUDA");
  }
}

TEST(AutocastFromEnv, ReturnsFallbackWhenUnset) {
  const ScopedVariable variable = environment(nullptr);
  const AutocastOptions choice{.device_type = torch::kCPU, .enabled = false, .reason = "as said"};
  EXPECT_FALSE(autocast_from_env(torch::kCPU, choice).enabled);
  EXPECT_EQ(autocast_from_env(torch::kCPU, choice).reason, "as said");
}

TEST(AutocastFromEnv, VariableOverridesFallback) {
  const ScopedVariable variable = environment("fp16");
  EXPECT_EQ(autocast_from_env(torch::kCPU, {.device_type = torch::kCPU}).dtype, torch::kHalf);
}

TEST(AutocastFromEnv, ConfiguresGuard) {
  const auto dtype = [] {
    const mezzo::AutocastGuard guard(autocast_from_env(torch::kCPU));
    return torch::mm(torch::ones({2, 2}), torch::ones({2, 2})).scalar_type();
  };
  const auto dtype_under = [&dtype](const char* value) {
    const ScopedVariable variable = environment(value);
    return dtype();
  };
  EXPECT_EQ(dtype_under("no"), torch::kFloat);
  EXPECT_EQ(dtype_under("bf16"), torch::kBFloat16);
  EXPECT_EQ(dtype_under("fp16"), torch::kHalf);
}

TEST(AutocastFromEnv, NoDisablesAutocastOnCuda) {
  const ScopedVariable variable = environment("no");
  const AutocastOptions cuda = autocast_from_env(torch::kCUDA);
  EXPECT_FALSE(cuda.enabled);
  EXPECT_EQ(cuda.device_type, torch::kCUDA);
  EXPECT_EQ(cuda.reason, "float32 (autocast off): MEZZO_MIXED_PRECISION=no");
}

TEST(AutocastFromEnv, AutoReturnsRecommendation) {
  const ScopedVariable variable = environment("auto");
  const AutocastOptions asked = autocast_from_env(torch::kCPU);
  const AutocastOptions recommended = mezzo::recommended_autocast(torch::kCPU);
  EXPECT_EQ(asked.enabled, recommended.enabled);
  EXPECT_EQ(asked.reason, recommended.reason);
}

TEST(AutocastFromEnv, ThrowsForUnknownValue) {
  for (const char* value : {"1", "on", "off", "BF16", "bfloat16", "float16", "half", "no "}) {
    const ScopedVariable variable = environment(value);
    EXPECT_THAT([] { autocast_from_env(torch::kCPU); },
                ThrowsMessage<c10::Error>(HasSubstr("MEZZO_MIXED_PRECISION=" + std::string(value) +
                                                    " is not a known value; use no, fp16, bf16 or "
                                                    "auto")));
  }
}

TEST(AutocastFromEnv, ThrowsForUnsupportedDevice) {
  const ScopedVariable variable = environment(nullptr);
  EXPECT_THAT(
      [] { autocast_from_env(torch::kMeta); },
      ThrowsMessage<c10::Error>(HasSubstr(
          "unsupported autocast device_type 'meta'; this libtorch has autocast for cpu, cuda,")));
}

TEST(AutocastFromEnv, ReasonWarnsAboutEmulatedDtype) {
  const CpuFeatures plain{.known = true};
  EXPECT_EQ(
      parse_mixed_precision("bf16", torch::kCPU, plain).reason,
      "bfloat16: MEZZO_MIXED_PRECISION=bf16, though this CPU has no bfloat16 instructions, and "
      "emulated bfloat16 is slower than float32");
  EXPECT_EQ(parse_mixed_precision("fp16", torch::kCPU, plain).reason,
            "float16: MEZZO_MIXED_PRECISION=fp16, though this CPU has no float16 instructions, and "
            "emulated float16 is slower than float32");
}

TEST(AutocastFromEnv, ReasonNamesVariableForNativeDtype) {
  const CpuFeatures able{.known = true, .bf16 = true, .fp16 = true};
  EXPECT_EQ(parse_mixed_precision("bf16", torch::kCPU, able).reason,
            "bfloat16: MEZZO_MIXED_PRECISION=bf16");
  EXPECT_EQ(parse_mixed_precision("fp16", torch::kCPU, able).reason,
            "float16: MEZZO_MIXED_PRECISION=fp16");
  EXPECT_EQ(parse_mixed_precision("fp16", torch::kCUDA, {}).reason,
            "float16: MEZZO_MIXED_PRECISION=fp16");
}

}  // namespace
