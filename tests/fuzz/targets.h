/// \file
/// What is fuzzed: each reader of text or files that a stranger wrote, as a function of bytes.
///
/// A target returns for whatever it is given, and lets out no exception: the errors that the reader
/// documents are caught, every other one ends the process, and so does a promise that is broken
/// (`require`). libFuzzer calls one target (one_target.cpp); the quick tests call each with the
/// inputs that are kept in corpus/ (replay_test.cpp).
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace fuzz {

void checkpoint(std::string_view bytes);
void pickle(std::string_view bytes);
void policy(std::string_view bytes);
void scaler_state(std::string_view bytes);
void words(std::string_view bytes);

inline void require(bool holds, const char* promise) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: broken promise: %s\n", promise);
  std::abort();
}

/// What `bytes` has up to the first `separator`, which is dropped from `bytes` with it.
inline std::string_view take_until(std::string_view& bytes, char separator) {
  const auto length = bytes.find(separator);
  const std::string_view taken = bytes.substr(0, length);
  bytes.remove_prefix(length == std::string_view::npos ? bytes.size() : length + 1);
  return taken;
}

inline unsigned char take_byte(std::string_view& bytes) {
  if (bytes.empty()) return 0;
  const char byte = bytes.front();
  bytes.remove_prefix(1);
  return static_cast<unsigned char>(byte);
}

}  // namespace fuzz
