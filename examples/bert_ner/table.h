/// \file
/// The table of all precisions.
#pragma once

#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "machine.h"
#include "options.h"
#include "run.h"
#include "text.h"

namespace bert_ner {

/// A row of the table: the runs in one precision, with one seed each.
using TableRow = std::vector<RunResult>;

/// The rows, and the speed of the same float32 steps before the first row and after each. If it
/// varies, the machine was not idle, and the speeds of the rows are not comparable.
struct Table {
  std::vector<TableRow> rows;
  std::vector<double> float32_speeds;  ///< tokens per second; empty for a single run
};

/// Returns a warning if the float32 speeds differ by more than 10 %, else an empty string.
inline std::string speed_warning(const std::vector<double>& float32_speeds) {
  constexpr double kMaxSpeedRatio = 1.1;
  if (float32_speeds.empty()) return {};
  const auto [slowest, fastest] = std::ranges::minmax(float32_speeds);
  if (fastest <= slowest * kMaxSpeedRatio) return {};
  return format(
      "The speeds are not comparable: the same float32 steps ran at %.0f to %.0f tokens/s between "
      "the "
      "rows. Run it again on an idle machine.",
      slowest, fastest);
}

inline double mean(const TableRow& row, double RunResult::*value) {
  double sum = 0;
  for (const auto& run : row) sum += run.*value;
  return sum / static_cast<double>(row.size());
}

/// Returns the row's mean speed relative to that of the first row.
inline double relative_speed(const TableRow& row, const TableRow& first) {
  const double base = mean(first, &RunResult::tokens_per_second);
  return base > 0 ? mean(row, &RunResult::tokens_per_second) / base : 0.0;
}

/// Formats the rows as a Markdown table of 97 columns, followed by speed_warning. With several
/// seeds, F1 is the mean, with minimum and maximum; speed is the mean, memory the maximum, skipped
/// steps the sum.
inline std::string format_table(const Table& table) {
  using Cells = std::array<std::string, 7>;
  std::vector<Cells> lines{{"name", "F1", "memory", "bytes/param", "tokens/s", "speed", "skipped"}};
  for (const auto& row : table.rows) {
    const auto [lowest, highest] = std::ranges::minmax(row, {}, &RunResult::f1);
    const auto range = format(" (%.3f-%.3f)", lowest.f1, highest.f1);
    const auto memory = std::ranges::max(row, {}, &RunResult::peak_memory_bytes).peak_memory_bytes;
    int64_t skipped = 0;
    for (const auto& run : row) skipped += run.skipped_steps;
    lines.push_back({row.front().name,
                     format("%.3f", mean(row, &RunResult::f1)) + (row.size() > 1 ? range : ""),
                     format("%.0f MiB", static_cast<double>(memory) / (1 << 20)),
                     format("%.1f", row.front().bytes_per_parameter),
                     format("%.0f", mean(row, &RunResult::tokens_per_second)),
                     format("%.2f", relative_speed(row, table.rows.front())),
                     std::to_string(skipped)});
  }
  std::string text;
  for (const auto& cells : lines) {
    std::string rule;
    for (std::size_t i = 0; i < cells.size(); ++i) {
      std::size_t width = 0;
      for (const auto& line : lines) width = std::max(width, line[i].size());
      const std::string padding(width - cells[i].size(), ' ');
      text += "| " + (i == 0 ? cells[i] + padding : padding + cells[i]) + " ";
      rule += "|" + std::string(width + 1, '-') + (i == 0 ? "-" : ":");
    }
    text += "|\n";
    if (&cells == &lines.front()) text += rule + "|\n";
  }
  const auto note = speed_warning(table.float32_speeds);
  return note.empty() ? text : text + "\n" + note + "\n";
}

/// Returns the table as JSON: for each row the run of the first seed, its relative_speed and, with
/// several seeds, all runs; options, threads, float32_speeds, and whether the speeds are
/// comparable.
inline json table_json(const Table& table, const Options& options) {
  json rows = json::array();
  for (const auto& row : table.rows) {
    json entry = row.front();
    entry["relative_speed"] = relative_speed(row, table.rows.front());
    if (row.size() > 1) entry["runs"] = row;
    rows.push_back(std::move(entry));
  }
  return {{"rows", std::move(rows)},
          {"float32_speeds", table.float32_speeds},
          {"speeds_are_comparable", speed_warning(table.float32_speeds).empty()},
          {"device", options.device},
          {"threads", at::get_num_threads()},
          {"data", options.data},
          {"model", options.model},
          {"training", options.training}};
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

/// Runs every row and seed in a separate process, so that peak memory is that of one run, and a few
/// float32 steps in between. Warns if autocast is slower than float32 on this device. The float16
/// row is included if the amp rows use another dtype and the device has float16 instructions.
/// \param arguments this program's arguments, to which --precision and --seed are appended
/// \throws InputError if the device does not exist
inline Table run_rows(const Options& options, const std::vector<std::string>& arguments) {
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
  auto rows = precisions();
  if (describe(amp) == "float16" || !has_float16(device)) rows.pop_back();
  Table table{std::vector<TableRow>(rows.size()), {}};
  const auto time_float32 = [&] {
    const auto steps = std::to_string(options.max_steps > 0 ? options.max_steps : 40);
    const auto timed = run("fp32", options.training.seed, {"--quiet", "--max-steps", steps});
    table.float32_speeds.push_back(timed.tokens_per_second);
  };
  time_float32();
  for (int i = 0; i < options.seeds; ++i) {
    // Seeds in the outer loop, so that other load of the machine affects all rows.
    for (std::size_t row = 0; row < rows.size(); ++row) {
      const auto seed = options.training.seed + static_cast<uint64_t>(i);
      table.rows[row].push_back(run(rows[row].flag, seed, {}));
      time_float32();
    }
  }
  return table;
}

}  // namespace bert_ner
