/// \file
/// Finding, what every tool of diagnose/ says: how bad, where, why, and what to do.
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

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
