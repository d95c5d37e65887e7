/// \file
/// The runs of all precisions side by side.
#pragma once

#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "options.h"
#include "run.h"

namespace bert_ner {

/// A row of the table: the runs in one precision, with one seed each.
using TableRow = std::vector<RunResult>;

/// The rows, and the speed of the same float32 steps before the first row and after each: where it
/// changed, something else used the machine, and the speeds of the rows do not compare.
struct Table {
  std::vector<TableRow> rows;
  std::vector<double> float32_speeds;  ///< tokens a second; empty for a single run
};

/// The rows of a table on this device. The float16 row is there if the amp rows compute in another
/// dtype and the device has instructions for it. \throws InputError if there is no such device
std::vector<Precision> table_precisions(const RunOptions& options);

/// Formats the rows as a Markdown table of 97 columns, and below it what stray_speeds says. With
/// several seeds, F1 is the mean, with the lowest and the highest; speeds are means, memory is the
/// largest, skipped steps are a sum. "speed" is relative to the first row's run of the same seed.
std::string format_table(const Table& table);

/// The table as JSON: for each row the run of the first seed, its relative_speed and, with several
/// seeds, all its runs; options, threads and float32_speeds, and whether the speeds compare.
nlohmann::json table_json(const Table& table, const RunOptions& options);

/// A sentence if the float32 speeds differ by more than 10 %; else empty.
std::string stray_speeds(std::span<const double> float32_speeds);

/// A warning, with the reason, if autocast will be slower than float32 on this machine; else
/// empty.
std::string slow_autocast_warning(const RunOptions& options);

/// Thrown if one of the runs failed. It has written why on standard error.
struct RowFailed {
  int status;  ///< exit status of its process, as a shell has it
};

/// Runs every row and seed in a process of its own, since the peak memory of one process is that of
/// its largest run, and a few steps in float32 between them.
/// \param arguments this program's own; each process gets them too, with its --precision and --seed
/// \throws RowFailed if one of them fails
Table run_rows(const RunOptions& options, const std::vector<std::string>& arguments);

}  // namespace bert_ner
