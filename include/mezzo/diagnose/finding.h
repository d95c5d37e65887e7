/// \file
/// Finding, what every tool of diagnose/ says: how bad, where, why, and what to do; and numbers and
/// tables as text, in any locale.
#pragma once

#include <mezzo/base/version.h>

#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <ostream>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// How bad a finding is.
enum class FindingSeverity : std::uint8_t {
  note,     ///< good to know
  warning,  ///< costs speed, memory or digits
  error,    ///< makes inf or NaN, or throws
};

/// Returns "note", "warning" or "error".
inline std::string_view to_string(FindingSeverity severity) {
  constexpr std::array<std::string_view, 3> names = {"note", "warning", "error"};
  return names.at(static_cast<std::size_t>(severity));
}

/// One thing that a tool found. Where the evidence does not decide, `reason` says "not known", and
/// `remedy` what to look at next.
struct Finding {
  FindingSeverity severity = FindingSeverity::note;  ///< how bad it is
  std::string topic = {};                            ///< what it is about: "range"
  std::string where = {};   ///< a module, parameter, op or step: "after encoder.0"
  std::string reason = {};  ///< what was seen, with numbers, and why it matters
  std::string remedy = {};  ///< what to do, or a line of code; empty where nothing is known to help

  /// Returns "where: reason; remedy", in one line.
  std::string message() const {
    return where + ": " + reason + (remedy.empty() ? "" : "; " + remedy);
  }
};

/// Writes a finding for a terminal of 100 columns, with the remedy unbroken on a line of its own.
inline std::ostream& operator<<(std::ostream& stream, const Finding& finding) {
  constexpr std::size_t kWidth = 100, kIndent = 11;
  std::string text = "  " + std::string(to_string(finding.severity));
  text.resize(kIndent, ' ');
  std::size_t column = kIndent;
  std::istringstream words(finding.where + ": " + finding.reason);
  for (std::string word; words >> word; column += word.size()) {
    if (column > kIndent && column + 1 + word.size() > kWidth) {
      text += "\n" + std::string(kIndent, ' ');
      column = kIndent;
    } else if (column > kIndent) {
      text += ' ';
      ++column;
    }
    text += word;
  }
  text += "\n";
  if (!finding.remedy.empty()) text += std::string(kIndent, ' ') + "> " + finding.remedy + "\n";
  return stream << text;
}

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
