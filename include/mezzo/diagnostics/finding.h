/// \file
/// Finding: one result of a diagnostic tool, with severity, location, description and remedy.
#pragma once

#include <mezzo/base/version.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <sstream>
#include <string>
#include <string_view>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Severity of a finding, in increasing order.
enum class FindingSeverity : std::uint8_t {
  note,     ///< for information
  warning,  ///< costs speed, memory or precision
  error,    ///< produces inf or NaN, or throws
};

/// Returns "note", "warning" or "error".
inline std::string_view to_string(FindingSeverity severity) {
  constexpr std::array<std::string_view, 3> names = {"note", "warning", "error"};
  return names.at(static_cast<std::size_t>(severity));
}

/// One result of a diagnostic tool. If the evidence does not determine the cause, `description` or
/// `remedy` contains "unknown", and `remedy` names the next thing to check.
struct Finding {
  FindingSeverity severity = FindingSeverity::note;  ///< how serious it is
  std::string check = {};        ///< the check that produced it, such as "range"
  std::string location = {};     ///< module, parameter, op or step, such as "after encoder.0"
  std::string description = {};  ///< what was observed, with values, and its consequence
  std::string remedy = {};       ///< advice or a line of code; empty if none is known

  /// Returns "location: description; remedy" as one line.
  std::string message() const {
    return location + ": " + description + (remedy.empty() ? "" : "; " + remedy);
  }
};

/// Prints a finding, wrapped at 100 columns, with the remedy unbroken on its own line.
inline std::ostream& operator<<(std::ostream& stream, const Finding& finding) {
  constexpr std::size_t kWidth = 100, kIndent = 11;
  std::string text, line = "  " + std::string(to_string(finding.severity));
  line.resize(kIndent, ' ');
  std::istringstream words(finding.location + ": " + finding.description);
  for (std::string word; words >> word; line += word) {
    if (line.size() > kIndent && line.size() + 1 + word.size() > kWidth) {
      text += line + "\n";
      line.assign(kIndent, ' ');
    } else if (line.size() > kIndent) {
      line += ' ';
    }
  }
  text += line + "\n";
  if (!finding.remedy.empty()) text += std::string(kIndent, ' ') + "> " + finding.remedy + "\n";
  return stream << text;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
