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

/// The rows of a table on this device. The float16 row is there if the amp rows compute in another
/// dtype and the device has instructions for it. \throws InputError if there is no such device
std::vector<Precision> table_precisions(const RunOptions& options);

/// Formats the rows as a Markdown table. With several seeds, scores are means, with the lowest and
/// the highest; speeds are means, memory is the largest, steps are sums. Relative speed compares
/// with the first row's run of the same seed.
std::string format_table(std::span<const TableRow> rows);

/// The table as JSON: for each row the run of the first seed, its relative_speed and, with several
/// seeds, all its runs; and the options, threads and number of ranks.
nlohmann::json table_json(std::span<const TableRow> rows, const RunOptions& options, int ranks);

/// A warning, with the reason, if autocast will be slower than float32 on this machine; else
/// empty.
std::string slow_autocast_warning(const RunOptions& options);

/// Thrown if one of the runs failed. It has written why on standard error.
struct RowFailed {
  int status;  ///< exit status of its process
};

/// Runs every row and seed in a process of its own, since the peak memory of one process is that of
/// its largest run. These processes end with this one.
/// \param arguments this program's own; each process gets them too, with its --precision and --seed
/// \throws RowFailed if one of them fails, std::runtime_error if one is ended by a signal
std::vector<TableRow> run_rows(const RunOptions& options,
                               const std::vector<std::string>& arguments);

}  // namespace bert_ner
