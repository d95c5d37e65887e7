// Many tests enter regions that this machine has no device or no instructions for. mezzo warns of
// that once a process, which is here, where nobody listens, and enters no region.

#include <mezzo/autocast/autocast.h>

#include <gtest/gtest.h>

#include "warnings.h"

namespace {

class SilentHardware : public testing::Environment {
 public:
  void SetUp() override {
    const test_support::Warnings unheard;
    for (const auto device : {c10::kCPU, c10::kCUDA}) {
      mezzo::detail::warn_of_hardware(device, at::kHalf);
    }
  }
};

[[maybe_unused]] const auto* const silent_hardware =
    testing::AddGlobalTestEnvironment(new SilentHardware);

}  // namespace
