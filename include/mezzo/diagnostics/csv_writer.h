/// \file
/// CsvWriter: writes step metrics to a CSV file.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/diagnostics/detail/flushed_file.h>
#include <mezzo/diagnostics/detail/format.h>
#include <mezzo/diagnostics/step_metrics.h>

#include <filesystem>
#include <ios>
#include <string>
#include <system_error>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Options of a CsvWriter.
struct CsvWriterOptions {
  /// Appends to an existing file, for resumed runs. Steps after the checkpoint then occur twice.
  bool append = false;
};

/// A MetricsLogger callback that writes a row per step, below a header row. Unset values are empty;
/// non-finite ones are "nan", "inf" and "-inf". Numbers are written with full precision in any
/// locale. Each row is flushed, so that a killed process loses none.
class CsvWriter {
 public:
  /// Opens `path`, truncates it unless `append`, and writes the header row into an empty file.
  /// \throws c10::Error if the file cannot be written
  explicit CsvWriter(const std::string& path, CsvWriterOptions options = {})
      : file_(path, options.append ? std::ios::app : std::ios::trunc) {
    std::error_code error;  // ignored, for paths without a size
    if (options.append && std::filesystem::file_size(path, error) > 0) return;
    std::string row = "step,wall_time";
    for (const auto& [name, value] : StepMetrics().scalars()) row += std::string(",") + name;
    file_.write(row + "\n");
  }

  /// Writes a row; called by MetricsLogger.
  void operator()(const StepMetrics& metrics) {
    std::string row = std::to_string(metrics.step) + "," + detail::format_number(metrics.wall_time);
    for (const auto& [name, value] : metrics.scalars()) {
      row += ",";
      if (value) row += detail::format_number(*value);
    }
    file_.write(row + "\n");
  }

 private:
  detail::FlushedFile file_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
