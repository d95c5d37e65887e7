/// \file
/// Numbers, names and tables as text, for people and for other programs.
#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The shortest text that reads back as `value`; "nan", "inf" and "-inf" too. Knows no locale.
inline std::string number_text(double value) {
  std::array<char, 32> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  const std::string number(text.data(), end);
  return number == "-nan" ? "nan" : number;
}

/// `value` as JSON, which has no number for inf and NaN: they are strings.
inline std::string json_number(double value) {
  return nonfinite_bits(value) ? "\"" + number_text(value) + "\"" : number_text(value);
}

/// `text` as a string of JSON.
inline std::string json_text(std::string_view text) {
  std::string json = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      json += '\\';
      json += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      std::array<char, 8> escape{};
      std::snprintf(escape.data(), escape.size(), "\\u%04x", static_cast<unsigned>(c));
      json += escape.data();
    } else {
      json += c;
    }
  }
  return json + "\"";
}

/// `value` in so many significant digits: "0.0123", "1.2e-05", "inf", "nan".
inline std::string digits(double value, int significant = 3) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.*g", significant, value);
  return std::string_view(text.data()) == "-nan" ? "nan" : text.data();
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

/// `text` as HTML shows it, also inside of an attribute.
inline std::string html_text(std::string_view text) {
  std::string html;
  for (const char c : text) {
    switch (c) {
      case '&':
        html += "&amp;";
        break;
      case '<':
        html += "&lt;";
        break;
      case '>':
        html += "&gt;";
        break;
      case '"':
        html += "&quot;";
        break;
      default:
        html += c;
    }
  }
  return html;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
