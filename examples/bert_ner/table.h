/// \file
/// The runs of all precisions side by side.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "options.h"
#include "run.h"

namespace bert_ner {

/// A row of the table: the runs in one precision, with one seed each.
using TableRow = std::vector<RunResult>;

/// The rows that a table of this device has: float16 where the amp rows compute in another dtype
/// and
/// the device has instructions for it. \throws InputError where the device is not there
std::vector<Precision> table_precisions(const RunOptions& options);

/// name | initial learning rate | F1 | P | R | peak memory | bytes a parameter | tokens/s |
/// relative speed | skipped steps | loss scale, as a Markdown table. Of several seeds the scores
/// are means, with the lowest and the highest; speeds are means, memory is the most, steps are
/// added up. The relative speed is that to the first row's run with the same seed.
std::string format_table(std::span<const TableRow> rows);

/// What to read from a table of several rows, in a sentence or two; else nothing.
std::optional<std::string> reading_note(std::span<const TableRow> rows);

/// The same for programs: an array of rows, each of the first seed's run with its relative_speed
/// and, where there are several seeds, all its runs; and what they ran on.
nlohmann::json table_json(std::span<const TableRow> rows, const RunOptions& options, int ranks);

/// A warning where autocast will be slower than float32 on this machine, with the reason; else
/// empty. The speed column will then disappoint, so it is said before the runs begin.
std::string slow_autocast_warning(const RunOptions& options);

/// One of the runs failed, and has said why on standard error.
struct RowFailed {
  int status;  ///< that it ended with
};

/// Runs every row and seed, each in a process of its own, since the peak memory of one process
/// would be that of its largest run. \param arguments this program's own, which these processes get
/// too, plus their --precision and --seed. They end with this process.
/// \throws RowFailed if one of them fails, std::runtime_error if one is ended by a signal
std::vector<TableRow> run_rows(const RunOptions& options,
                               const std::vector<std::string>& arguments);

/// The same runs of all ranks together, one after the other in these processes: MPI starts
/// once a process. What a row left behind counts into the next one's peak memory.
/// \throws as run_training
std::vector<TableRow> run_rows(const RunOptions& options, const Ranks& ranks);

}  // namespace bert_ner
