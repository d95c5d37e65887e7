// Warnings of regions on a device or in a dtype that this machine lacks.

#include <mezzo/autocast/autocast_guard.h>
#include <mezzo/autocast/autocast_module.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "../support/warning_recorder.h"

namespace {

using mezzo::AutocastGuard;
using mezzo::AutocastOptions;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

/// Resets warn-once, as in a new process.
std::vector<std::string> first_warnings(const std::function<void()>& work) {
  const c10::WarningUtils::WarnAlways always;
  const test_support::WarningRecorder warnings;
  work();
  return warnings.texts;
}

const AutocastOptions kOnCuda{.device_type = torch::kCUDA};

TEST(AutocastHardwareWarnings, CudaUnavailableMatchesPythonText) {
  if (torch::cuda::is_available()) GTEST_SKIP() << "CUDA is available";
  const std::vector<std::pair<const char*, std::function<void()>>> forms{
      {"Autocast", [] { const AutocastGuard<torch::kCUDA> region; }},
      {"AutocastModule", [] { mezzo::AutocastModule net(torch::nn::Linear(1, 1), kOnCuda); }},
      {"now", [] { mezzo::autocast(kOnCuda, [] {}); }},
      {"callable", [] { (void)mezzo::autocast_wrap(kOnCuda, [] {}); }},
  };
  for (const auto& [name, enter] : forms) {
    EXPECT_THAT(
        first_warnings(enter),
        ElementsAre(
            AllOf(HasSubstr("User provided device_type of 'cuda', but CUDA is not "
                            "available."),
                  HasSubstr("mezzo::AutocastGuard autocast(mezzo::recommended_autocast(device))"))))
        << name;
  }
}

TEST(AutocastHardwareWarnings, WarnOncePerProcess) {
  const auto enter = [] {
    const AutocastGuard<torch::kCUDA> cuda;
    const AutocastGuard<torch::kCPU, torch::kHalf> half;
  };
  {
    const test_support::WarningRecorder first;
    enter();
  }
  const test_support::WarningRecorder warnings;
  enter();
  EXPECT_THAT(warnings.texts, IsEmpty());
}

TEST(AutocastHardwareWarnings, SilentWhenDisabledOrNative) {
  EXPECT_THAT(first_warnings([] {
                const AutocastGuard<torch::kCPU> bfloat16;
                const AutocastGuard<torch::kCUDA> off({.enabled = false});
                const AutocastGuard<torch::kCPU, torch::kHalf> half_off({.enabled = false});
                const AutocastGuard cpu(mezzo::recommended_autocast(torch::kCPU));
                const AutocastGuard cuda(mezzo::recommended_autocast(torch::kCUDA));
              }),
              IsEmpty());
}

TEST(AutocastHardwareWarnings, WarnAboutEmulatedFloat16) {
  const std::string warning = mezzo::detail::float16_cpu_warning(mezzo::detail::cpu_features());
  const auto heard = first_warnings([] { const AutocastGuard<torch::kCPU, torch::kHalf> region; });
  if (warning.empty()) {
    EXPECT_THAT(heard, IsEmpty());
  } else {
    EXPECT_THAT(heard, ElementsAre(warning));
  }
}

TEST(AutocastHardwareWarnings, Float16WarningNamesCost) {
  using mezzo::detail::float16_cpu_warning;
  EXPECT_THAT(float16_cpu_warning({.known = true, .bf16 = true}),
              AllOf(HasSubstr("this CPU has no float16 instructions"),
                    HasSubstr("emulated float16 is slower than float32"),
                    HasSubstr("mezzo::recommended_autocast(torch::kCPU)")));
  EXPECT_EQ(float16_cpu_warning({.known = true, .fp16 = true}), "");
  EXPECT_EQ(float16_cpu_warning({}), "") << "unknown CPU";
}

}  // namespace
