#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <string_view>

#include "../support/scratch.h"

namespace fuzz {

/// Gives `target` every input that is kept for it in corpus/. It ends the process at the first that
/// it does not survive, whose name then stands last.
inline void replay(std::string_view name, void (*target)(std::string_view)) {
  int count = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::filesystem::path(MEZZO_FUZZ_CORPUS) / name)) {
    SCOPED_TRACE(entry.path().filename().string());
    const std::string input = test_support::bytes_of(entry.path());
    EXPECT_NO_THROW(target(input));
    ++count;
  }
  EXPECT_GT(count, 0) << "no input is kept for " << name;
}

}  // namespace fuzz
