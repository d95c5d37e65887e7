/// \file
/// The three runs side by side.
#pragma once

#include <mezzo/precision.h>

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
nlohmann::json table_json(std::span<const RunResult> rows, const RunOptions& options);

/// A warning where autocast will be slower than float32 on this machine, with the reason; else
/// empty. The speed column will then disappoint, so it is said before the runs begin.
std::string slow_autocast_warning(const RunOptions& options);

/// Runs fp32, amp no scale and amp dynamic scale, each in a process of its own, since the peak
/// memory of one process would be that of its largest run. \param arguments this program's own,
/// which the three processes get too, plus their --precision \throws std::runtime_error if one of
/// them fails; it has said why on standard error
std::vector<RunResult> run_rows(const std::vector<std::string>& arguments);

}  // namespace bert_ner
