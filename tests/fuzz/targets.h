/// \file
/// Fuzz targets: functions of bytes that call a parser of untrusted files or text.
///
/// A target catches the errors that the parser documents. Any other exception and a failed
/// `require` end the process. libFuzzer calls one target (one_target.cpp); replay_test.cpp calls
/// each target with the inputs in corpus/.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

namespace fuzz {

void checkpoint(std::string_view bytes);
void flags(std::string_view bytes);
void op_overrides(std::string_view bytes);
void pickle(std::string_view bytes);
void safetensors(std::string_view bytes);
void scaler_state(std::string_view bytes);

inline void require(bool holds, const char* property) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: does not hold: %s\n", property);
  std::abort();
}

/// Removes the bytes up to the first `separator`, and the separator, and returns these bytes.
inline std::string_view take_until(std::string_view& bytes, char separator) {
  const auto length = bytes.find(separator);
  const std::string_view taken = bytes.substr(0, length);
  bytes.remove_prefix(length == std::string_view::npos ? bytes.size() : length + 1);
  return taken;
}

/// Removes the first byte and returns it; 0 if there is none.
inline unsigned char take_byte(std::string_view& bytes) {
  if (bytes.empty()) return 0;
  const char byte = bytes.front();
  bytes.remove_prefix(1);
  return static_cast<unsigned char>(byte);
}

/// Applies `edits`, each an offset in two bytes, the number of removed bytes, the number of added
/// bytes, and the added bytes.
inline std::string apply_edits(std::string file, std::string_view edits) {
  while (!edits.empty()) {
    const std::size_t high = take_byte(edits), low = take_byte(edits);
    const std::size_t offset = (high * 256 + low) % (file.size() + 1);
    const std::size_t removed = take_byte(edits), added = take_byte(edits);
    file.replace(offset, removed == 255 ? file.size() : removed, edits.substr(0, added));
    edits.remove_prefix(std::min(added, edits.size()));
  }
  return file;
}

}  // namespace fuzz
