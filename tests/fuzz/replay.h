#pragma once

#include <exception>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "../support/scratch.h"

namespace fuzz {

/// Gives `target` every input that is kept for it in corpus/. It ends the process at the first that
/// it does not survive.
/// \returns the inputs that it did not read: those at which it threw, or that there is none
inline std::vector<std::string> unread(std::string_view name, void (*target)(std::string_view)) {
  std::vector<std::string> failed = {"no input is kept in corpus/" + std::string(name)};
  for (const auto& entry :
       std::filesystem::directory_iterator(std::filesystem::path(MEZZO_FUZZ_CORPUS) / name)) {
    failed.front().clear();
    try {
      target(test_support::bytes_of(entry.path()));
    } catch (const std::exception& error) {
      failed.push_back(entry.path().filename().string() + ": " + error.what());
    }
  }
  std::erase(failed, "");
  return failed;
}

}  // namespace fuzz
