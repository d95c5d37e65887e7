/// \file
/// Numbers, shapes and table rows as text, independent of the locale.
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
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns `value` as std::to_chars writes it with `format`; "nan" for either sign.
template <class... Format>
std::string format_number(double value, Format... format) {
  std::array<char, 64> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value, format...).ptr;
  const std::string number(text.data(), end);
  return number == "-nan" ? "nan" : number;
}

/// Returns `value` in `significant` digits: "0.0123", "1.2e-05", "inf", "nan".
inline std::string format_significant(double value, int significant = 3) {
  return format_number(value, std::chars_format::general, significant);
}

/// Returns a shape as "[8, 4]".
inline std::string format_sizes(c10::ArrayRef<std::int64_t> sizes) {
  std::string text;
  for (const std::int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

/// Returns a row of a table. Cells are right-aligned to their width, or left-aligned if the width
/// is negative; a longer cell shifts the cells after it.
inline std::string format_row(const std::vector<int>& widths,
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
