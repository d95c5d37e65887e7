// What fuzzing has found in the library's readers, once more: tests/fuzz/run finds new cases.

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

/// Gives `target` every input that is kept for it in corpus/. It ends the process at the first that
/// it does not survive.
/// \returns the inputs that it did not read: those at which it threw, or that there is none
std::vector<std::string> unread(std::string_view name, void (*target)(std::string_view)) {
  std::vector<std::string> failed = {"no input is kept in corpus/" + std::string(name)};
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
  EXPECT_THAT(unread("checkpoint", fuzz::checkpoint), IsEmpty());
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
  EXPECT_THAT(unread("policy", fuzz::policy), IsEmpty());
}
TEST(FuzzCorpus, ScalerStateInputsLoadOrThrow) {
  EXPECT_THAT(unread("scaler_state", fuzz::scaler_state), IsEmpty());
}
TEST(FuzzCorpus, FlagInputsParseOrThrow) { EXPECT_THAT(unread("words", fuzz::words), IsEmpty()); }

}  // namespace
