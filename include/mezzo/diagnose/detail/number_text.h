/// \file
/// Numbers, names and tables as text. None of it depends on the process's locale.
#pragma once

#include <mezzo/base/version.h>

#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns `value` by std::to_chars with these arguments; "nan" of either sign.
template <class... Format>
std::string number_text(double value, Format... format) {
  std::array<char, 64> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value, format...).ptr;
  const std::string number(text.data(), end);
  return number == "-nan" ? "nan" : number;
}

/// Returns `value` in so many significant digits: "0.0123", "1.2e-05", "inf", "nan".
inline std::string digits(double value, int significant = 3) {
  return number_text(value, std::chars_format::general, significant);
}

/// Returns "[8, 4]".
inline std::string sizes_text(c10::ArrayRef<std::int64_t> sizes) {
  std::string text;
  for (const std::int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

/// Returns the name of the module that a parameter belongs to; "(model)" for the model itself.
inline std::string layer_name(const std::string& parameter) {
  const std::size_t dot = parameter.rfind('.');
  return dot == std::string::npos ? "(model)" : parameter.substr(0, dot);
}

/// Returns a line of a table on a terminal. Each cell is as wide as `widths` says, aligned right,
/// or left where the width is negative; a longer cell moves the cells behind it.
inline std::string table_line(const std::vector<int>& widths,
                              const std::vector<std::string>& cells) {
  std::string line;
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const auto width = static_cast<std::size_t>(std::abs(widths[i]));
    const std::string gap(width - std::min(width, cells[i].size()), ' ');
    line += widths[i] < 0 ? cells[i] + gap : gap + cells[i];
  }
  return line + "\n";
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
