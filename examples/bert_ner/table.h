/// \file
/// The table of all precisions.
#pragma once

#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "machine.h"
#include "options.h"
#include "run.h"
#include "text.h"

namespace bert_ner {

/// A row of the table: the runs in one precision, with one seed each.
struct TableRow {
  std::vector<RunResult> runs;
  /// For each run, the speed of its first steps relative to the same steps in float32, just before
  /// the run and just after it. Other load of the machine slows all three down, so that the ratios
  /// hold on a busy machine too, with a wider range. Empty for a single run.
  std::vector<double> relative_speeds;
};

inline double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

inline double mean(const TableRow& row, double RunResult::*member) {
  std::vector<double> values;
  for (const auto& run : row.runs) values.push_back(run.*member);
  return mean(values);
}

/// Returns half the range of the values.
inline double half_range(const std::vector<double>& values) {
  const auto [lowest, highest] = std::ranges::minmax(values);
  return (highest - lowest) / 2;
}

/// Returns the largest peak memory of the row's runs, in bytes.
inline double peak_memory(const TableRow& row) {
  return static_cast<double>(
      std::ranges::max(row.runs, {}, &RunResult::peak_memory_bytes).peak_memory_bytes);
}

/// Formats the rows as a Markdown table. Memory is the largest of all seeds, also relative to the
/// first row; skipped steps are the sum; F1 with several seeds is the mean, with minimum and
/// maximum; speed is the mean of relative_speeds, with half their range.
inline std::string format_table(const std::vector<TableRow>& rows) {
  using Cells = std::array<std::string, 7>;
  std::vector<Cells> lines{{"name", "F1", "memory", "bytes/param", "tokens/s", "speed", "skipped"}};
  for (const auto& row : rows) {
    const auto [lowest, highest] = std::ranges::minmax(row.runs, {}, &RunResult::f1);
    const auto range = format(" (%.3f-%.3f)", lowest.f1, highest.f1);
    const double memory = peak_memory(row);
    int64_t skipped = 0;
    for (const auto& run : row.runs) skipped += run.skipped_steps;
    lines.push_back(
        {row.runs.front().name,
         format("%.3f", mean(row, &RunResult::f1)) + (row.runs.size() > 1 ? range : ""),
         format("%.0f MiB (%.2f)", memory / (1 << 20), memory / peak_memory(rows.front())),
         format("%.1f", row.runs.front().bytes_per_parameter),
         format("%.0f", mean(row, &RunResult::tokens_per_second)),
         row.relative_speeds.empty()
             ? "-"
             : format("%.2f ± %.2f", mean(row.relative_speeds), half_range(row.relative_speeds)),
         std::to_string(skipped)});
  }
  const auto width_of = [](const std::string& cell) {  // in characters of UTF-8
    return static_cast<std::size_t>(
        std::ranges::count_if(cell, [](char c) { return (c & 0xC0) != 0x80; }));
  };
  std::string text;
  for (const auto& cells : lines) {
    std::string rule;
    for (std::size_t i = 0; i < cells.size(); ++i) {
      std::size_t width = 0;
      for (const auto& line : lines) width = std::max(width, width_of(line[i]));
      const std::string padding(width - width_of(cells[i]), ' ');
      text += "| " + (i == 0 ? cells[i] + padding : padding + cells[i]) + " ";
      rule += "|" + std::string(width + 1, '-') + (i == 0 ? "-" : ":");
    }
    text += "|\n";
    if (&cells == &lines.front()) text += rule + "|\n";
  }
  return text;
}

/// Returns the table as JSON: options, threads, and for each row the run of the first seed, its
/// relative speeds and, with several seeds, all runs.
inline json table_json(const std::vector<TableRow>& rows, const Options& options) {
  json entries = json::array();
  for (const auto& row : rows) {
    json entry = row.runs.front();
    entry["relative_speeds"] = row.relative_speeds;
    entry["relative_memory"] = peak_memory(row) / peak_memory(rows.front());
    if (row.runs.size() > 1) entry["runs"] = row.runs;
    entries.push_back(std::move(entry));
  }
  return {{"rows", std::move(entries)},       {"device", options.device},
          {"threads", at::get_num_threads()}, {"data", options.data},
          {"model", options.model},           {"training", options.training}};
}

/// Runs a row in a subprocess of this program. If it fails, exits with its status.
/// \param arguments this program's arguments, followed by overrides
inline RunResult run_in_subprocess(const std::vector<std::string>& arguments) {
  std::string command = "exec " + fs::read_symlink("/proc/self/exe").string();
  for (auto argument : arguments) {
    for (std::size_t at = 0; (at = argument.find('\'', at)) != std::string::npos; at += 4) {
      argument.replace(at, 1, "'\\''");
    }
    command += " '" + argument + "'";
  }
  std::FILE* const output = popen(command.c_str(), "r");
  std::string text;
  for (int c = 0; output != nullptr && (c = std::fgetc(output)) != EOF;) {
    text += static_cast<char>(c);
  }
  const int status = output == nullptr ? -1 : pclose(output);
  if (status != 0) std::exit(WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status));
  return parse_json(text, "the output of a row").at("rows").at(0).get<RunResult>();
}

/// Returns the precisions of the table. The float16 row is included if the amp rows use another
/// dtype and the device multiplies float16 natively.
inline std::vector<Precision> table_precisions(const mezzo::AutocastOptions& amp,
                                               bool has_float16_products) {
  auto rows = precisions();
  if (describe(amp) == "float16" || !has_float16_products) rows.pop_back();
  return rows;
}

/// Runs every row and seed in a separate process, so that peak memory is that of one run, and a few
/// float32 steps before the first and after each. Warns if autocast is slower than float32 on this
/// device. \param arguments this program's arguments, to which --precision and --seed are appended
/// \throws InputError if the device does not exist
inline std::vector<TableRow> run_rows(const Options& options,
                                      const std::vector<std::string>& arguments) {
  const auto device = find_device(options.device);
  const auto amp = make_autocast_options(find_precision("amp"), device);
  const auto native = mezzo::recommended_autocast(device);
  if (amp.enabled && !native.enabled) std::cerr << "note: " << native.reason << std::endl;

  const auto run = [&](const std::string& precision, uint64_t seed, std::vector<std::string> more) {
    auto all = arguments;
    all.insert(all.end(), {"--precision", precision, "--seed", std::to_string(seed), "--seeds", "1",
                           "--json", "-"});
    all.insert(all.end(), more.begin(), more.end());
    return run_in_subprocess(all);
  };
  const auto time_float32 = [&](uint64_t seed) {
    const auto steps =
        options.max_steps > 0 ? std::min(options.max_steps, kFirstSteps) : kFirstSteps;
    return run("fp32", seed, {"--quiet", "--max-steps", std::to_string(steps)})
        .first_tokens_per_second;
  };
  const auto precisions = table_precisions(amp, has_float16(device));
  std::vector<TableRow> rows(precisions.size());
  for (int i = 0; i < options.seeds; ++i) {
    const auto seed = options.training.seed + static_cast<uint64_t>(i);
    double before = time_float32(seed);
    for (std::size_t row = 0; row < rows.size(); ++row) {
      const auto& result = rows[row].runs.emplace_back(run(precisions[row].flag, seed, {}));
      const double after = time_float32(seed);
      for (const double float32 : {before, after}) {
        rows[row].relative_speeds.push_back(float32 > 0 ? result.first_tokens_per_second / float32
                                                        : 0.0);
      }
      before = after;
    }
  }
  return rows;
}

}  // namespace bert_ner
