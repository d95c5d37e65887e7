// Runs each fuzz target on the inputs in corpus/. tests/fuzz/run finds new inputs.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <exception>
#include <filesystem>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "../support/temp_dir.h"
#include "targets.h"

namespace {

using testing::IsEmpty;

/// Calls `target` with each input in corpus/NAME.
/// \returns a message for each input at which it threw, or if there is no input
std::vector<std::string> failed_inputs(std::string_view name, void (*target)(std::string_view)) {
  std::vector<std::string> failed = {"no inputs in corpus/" + std::string(name)};
  for (const auto& entry :
       std::filesystem::directory_iterator(std::filesystem::path(MEZZO_FUZZ_CORPUS) / name)) {
    failed.front().clear();
    try {
      target(test_support::read_file(entry.path()));
    } catch (const std::exception& error) {
      failed.push_back(entry.path().filename().string() + ": " + error.what());
    }
  }
  std::erase(failed, "");
  return failed;
}

TEST(FuzzCorpus, CheckpointInputsLoadOrThrow) {
  EXPECT_THAT(failed_inputs("checkpoint", fuzz::checkpoint), IsEmpty());
}
TEST(FuzzCorpus, PickleInputsLoadOrThrow) {
  fuzz::pickle("");
  std::mt19937_64 engine(1);
  for (int i = 0; i < 600; ++i) {
    std::string decisions;
    for (auto length = engine() % 300; length > 0; --length) {
      const auto number = engine();
      decisions += static_cast<char>(number % 8 == 0 ? number >> 8 : 0);
    }
    fuzz::pickle(decisions);
  }
}
TEST(FuzzCorpus, OpOverrideInputsParseOrThrow) {
  EXPECT_THAT(failed_inputs("op_overrides", fuzz::op_overrides), IsEmpty());
}
TEST(FuzzCorpus, SafetensorsInputsLoadOrThrow) {
  EXPECT_THAT(failed_inputs("safetensors", fuzz::safetensors), IsEmpty());
}
TEST(FuzzCorpus, ScalerStateInputsLoadOrThrow) {
  EXPECT_THAT(failed_inputs("scaler_state", fuzz::scaler_state), IsEmpty());
}
TEST(FuzzCorpus, FlagInputsParseOrThrow) {
  EXPECT_THAT(failed_inputs("flags", fuzz::flags), IsEmpty());
}

}  // namespace
