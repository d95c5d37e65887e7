// Many tests enter autocast regions without hardware support on this machine. Triggers mezzo's
// once-per-process warnings before the tests.

#include <mezzo/autocast/autocast_guard.h>

#include <gtest/gtest.h>

#include "warning_recorder.h"

namespace {

class SuppressHardwareWarnings : public testing::Environment {
 public:
  void SetUp() override {
    const test_support::WarningRecorder recorder;
    for (const auto device : {c10::kCPU, c10::kCUDA}) {
      mezzo::detail::warn_if_unsupported_hardware(device, at::kHalf);
    }
  }
};

[[maybe_unused]] const auto* const suppress_hardware_warnings =
    testing::AddGlobalTestEnvironment(new SuppressHardwareWarnings);

}  // namespace
