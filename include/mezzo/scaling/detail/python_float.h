#pragma once

#include <mezzo/base/version.h>

#include <charconv>
#include <iterator>
#include <string>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A scale as Python prints it: "32768.0", "3.0517578125e-05".
inline std::string python_float(double value) {
  char text[64];
  const bool is_fixed = value == 0 || (value >= 1e-4 && value < 1e16);
  const auto format = is_fixed ? std::chars_format::fixed : std::chars_format::scientific;
  const auto end = std::to_chars(std::begin(text), std::end(text), value, format).ptr;
  std::string result(text, end);
  if (is_fixed && result.find('.') == std::string::npos) result += ".0";
  return result;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
