/// \file
/// A comparison as a table.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/diagnose/compare_precisions.h>
#include <mezzo/diagnose/detail/number_text.h>

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <iomanip>
#include <ostream>
#include <string>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline constexpr std::array<const char*, 7> kComparisonColumns = {
    "setting", "gradient error", "cosine", "loss diff", "skipped", "ms/step", "peak MiB"};

/// A row's cells, as wide as kComparisonColumns; the table on the terminal and that on a page hold
/// the same.
inline std::array<std::string, 7> comparison_cells(const PrecisionRow& row) {
  const auto mib = [](int64_t bytes) { return digits(static_cast<double>(bytes) / 1048576, 4); };
  return {row.setting.name,
          digits(row.gradient_error),
          digits(row.cosine, 6),
          digits(row.loss_difference),
          digits(100 * row.skipped) + " %",
          digits(1000 * row.step_seconds, 4),
          row.peak_bytes ? mib(*row.peak_bytes) : "-"};
}

inline std::string proposal_line(const PrecisionComparison& comparison) {
  const PrecisionRow& proposal = comparison.proposal();
  return c10::str("proposed: ", proposal.setting.name,
                  ", the fastest with a gradient error of at most ",
                  digits(comparison.max_gradient_error));
}

/// Those that leave less error, at most `most`.
inline std::vector<PrecisionCause> worst_causes(const std::vector<PrecisionCause>& causes,
                                                double error, std::size_t most) {
  std::vector<PrecisionCause> worst;
  for (const PrecisionCause& cause : causes) {
    if (worst.size() < most && cause.error_without < error) worst.push_back(cause);
  }
  return worst;
}

inline void write_causes(std::ostream& stream, const char* what,
                         const std::vector<PrecisionCause>& causes, double error) {
  for (const PrecisionCause& cause : worst_causes(causes, error, 5)) {
    stream << "  " << std::left << std::setw(10) << digits(cause.error_without) << std::right
           << " with the " << what << " " << cause.name << " in float32\n";
  }
}

}  // namespace detail

inline std::ostream& operator<<(std::ostream& stream, const PrecisionComparison& comparison) {
  std::size_t width = 24;
  for (const PrecisionRow& row : comparison.rows) {
    width = std::max(width, row.setting.name.size() + 2);
  }
  const auto write_cells = [&](const auto& cells) {
    stream << std::left << std::setw(static_cast<int>(width)) << cells[0] << std::right;
    for (std::size_t i = 1; i < cells.size(); ++i) stream << std::setw(16) << cells[i];
    stream << "\n";
  };
  stream << "precisions on " << comparison.device << "; gradients and losses against float32's\n";
  write_cells(detail::kComparisonColumns);
  for (const PrecisionRow& row : comparison.rows) {
    if (row.failure.empty()) {
      write_cells(detail::comparison_cells(row));
    } else {
      stream << row.setting.name << ": " << row.failure << "\n";
    }
  }
  if (comparison.rows.empty()) return stream;
  stream << detail::proposal_line(comparison) << "\n";
  for (const PrecisionRow& row : comparison.rows) {
    if (row.ops.empty() && row.modules.empty()) continue;
    stream << row.setting.name
           << ", gradient error of the first batch: " << detail::digits(row.single_batch_error)
           << "; it is\n";
    detail::write_causes(stream, "op", row.ops, row.single_batch_error);
    detail::write_causes(stream, "module", row.modules, row.single_batch_error);
  }
  const std::string edits = comparison.proposal().setting.policy.to_string();
  if (!edits.empty()) stream << "its policy:\n" << edits;
  return stream;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
