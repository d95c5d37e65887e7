/// \file
/// The three runs side by side.
#pragma once

#include <mezzo/autocast/autocast_setting.h>

#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "options.h"
#include "run.h"

namespace bert_ner {

/// name | initial learning rate | F1 | P | R | peak memory | relative speed, as a Markdown table.
/// The speed is training tokens a second, relative to the first row's.
std::string format_table(std::span<const RunResult> rows);

/// The same for programs: an array of rows, each with its relative_speed, and what they ran on.
nlohmann::json table_json(std::span<const RunResult> rows, const RunOptions& options, int ranks);

/// A warning where autocast will be slower than float32 on this machine, with the reason; else
/// empty. The speed column will then disappoint, so it is said before the runs begin.
std::string slow_autocast_warning(const RunOptions& options);

/// One of the three runs failed, and has said why on standard error.
struct RowFailed {
  int status;  ///< that it ended with
};

/// Runs fp32, amp no scale and amp dynamic scale, each in a process of its own, since the peak
/// memory of one process would be that of its largest run. \param arguments this program's own,
/// which the three processes get too, plus their --precision. They end with this process.
/// \throws RowFailed if one of them fails; it has said why on standard error
/// \throws std::runtime_error if one of them is ended by a signal
std::vector<RunResult> run_rows(const std::vector<std::string>& arguments);

/// The same three runs of all ranks together, one after the other in these processes: MPI starts
/// once a process. What a row left behind counts into the next one's peak memory.
/// \throws as run_training
std::vector<RunResult> run_rows(const RunOptions& options, const Ranks& ranks);

}  // namespace bert_ner
