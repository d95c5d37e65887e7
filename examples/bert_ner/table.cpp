#include "table.h"

#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "machine.h"
#include "text.h"

namespace bert_ner {
namespace {

constexpr std::size_t kColumns = 7;
constexpr double kMebibyte = 1024.0 * 1024.0;
using Cells = std::array<std::string, kColumns>;

double mean(const TableRow& row, double RunResult::*value) {
  double sum = 0;
  for (const auto& run : row) sum += run.*value;
  return sum / static_cast<double>(row.size());
}

double mean_relative_speed(const TableRow& row, const TableRow& first) {
  double sum = 0;
  for (std::size_t i = 0; i < row.size(); ++i) {
    if (first[i].tokens_per_second > 0)
      sum += row[i].tokens_per_second / first[i].tokens_per_second;
  }
  return sum / static_cast<double>(row.size());
}

double mebibytes(const TableRow& row) {
  return static_cast<double>(
             std::ranges::max(row, {}, &RunResult::peak_memory_bytes).peak_memory_bytes) /
         kMebibyte;
}

/// "0.495", or of several seeds "0.479 (0.460-0.499)".
std::string f1_cell(const TableRow& row) {
  const auto text = formatted("%.3f", mean(row, &RunResult::f1));
  if (row.size() == 1) return text;
  const auto [lowest, highest] = std::ranges::minmax(row, {}, &RunResult::f1);
  return text + formatted(" (%.3f-%.3f)", lowest.f1, highest.f1);
}

Cells cells_of(const TableRow& row, const TableRow& first) {
  const auto& run = row.front();
  int64_t skipped = 0;
  for (const auto& one : row) skipped += one.skipped_steps;
  return {run.name,
          f1_cell(row),
          formatted("%.0f MiB", mebibytes(row)),
          formatted("%.1f", run.bytes_a_parameter),
          formatted("%.0f", mean(row, &RunResult::tokens_per_second)),
          formatted("%.2f", mean_relative_speed(row, first)),
          std::to_string(skipped)};
}

/// \param more flags, which win over those of `arguments`
RunResult run_in_its_process(std::vector<std::string> arguments, Precision precision, uint64_t seed,
                             const std::vector<std::string>& more = {}) {
  arguments.insert(arguments.end(), {"--precision", flag_of(precision), "--seed",
                                     std::to_string(seed), "--seeds", "1", "--json", "-"});
  arguments.insert(arguments.end(), more.begin(), more.end());
  // The shell becomes this very program.
  std::string command = "exec " + std::filesystem::read_symlink("/proc/self/exe").string();
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
  if (WIFSIGNALED(status)) throw RowFailed{128 + WTERMSIG(status)};
  if (status != 0) throw RowFailed{WEXITSTATUS(status)};
  return parse_json(text, title_of(precision)).at("rows").at(0).get<RunResult>();
}

}  // namespace

std::vector<Precision> table_precisions(const RunOptions& options) {
  const auto device = find_device(options.device);
  const auto amp = setting_for(Precision::amp, device);
  const bool amp_is_float16 = amp.enabled && dtype_of(amp) == torch::kFloat16;
  std::vector<Precision> precisions;
  for (const auto precision : all_precisions()) {
    if (precision == Precision::fp16 && (amp_is_float16 || !has_float16(device))) continue;
    precisions.push_back(precision);
  }
  return precisions;
}

std::string stray_speeds(std::span<const double> float32_speeds) {
  constexpr double kMostThatCompares = 1.1;
  if (float32_speeds.empty()) return {};
  const auto [slowest, fastest] = std::ranges::minmax(float32_speeds);
  if (fastest <= slowest * kMostThatCompares) return {};
  return formatted(
      "The speeds do not compare: the same float32 steps ran at %.0f to %.0f tokens/s between the "
      "rows. Run it again on an idle machine.",
      slowest, fastest);
}

std::string format_table(const Table& table) {
  std::vector<Cells> lines{{"name", "F1", "memory", "bytes/param", "tokens/s", "speed", "skipped"}};
  for (const auto& row : table.rows) lines.push_back(cells_of(row, table.rows.front()));
  std::array<std::size_t, kColumns> widths{};
  for (const auto& line : lines) {
    for (std::size_t i = 0; i < kColumns; ++i) widths[i] = std::max(widths[i], line[i].size());
  }
  std::string text;
  for (std::size_t row = 0; row < lines.size(); ++row) {
    for (std::size_t i = 0; i < kColumns; ++i) {
      const std::string padding(widths[i] - lines[row][i].size(), ' ');
      text += "| " + (i == 0 ? lines[row][i] + padding : padding + lines[row][i]) + " ";
    }
    text += "|\n";
    if (row > 0) continue;
    for (std::size_t i = 0; i < kColumns; ++i) {
      text += "|" + std::string(widths[i] + 1, '-') + (i == 0 ? "-" : ":");
    }
    text += "|\n";
  }
  const auto note = stray_speeds(table.float32_speeds);
  return note.empty() ? text : text + "\n" + note + "\n";
}

nlohmann::json table_json(const Table& table, const RunOptions& options) {
  nlohmann::json list = nlohmann::json::array();
  for (const auto& row : table.rows) {
    nlohmann::json entry = row.front();
    entry["relative_speed"] = mean_relative_speed(row, table.rows.front());
    if (row.size() > 1) entry["runs"] = row;
    list.push_back(std::move(entry));
  }
  return {{"rows", std::move(list)},
          {"float32_speeds", table.float32_speeds},
          {"speeds_compare", stray_speeds(table.float32_speeds).empty()},
          {"device", options.device},
          {"threads", at::get_num_threads()},
          {"data", options.data},
          {"model", options.model},
          {"training", options.training}};
}

std::string slow_autocast_warning(const RunOptions& options) {
  const auto device = find_device(options.device);
  const auto chosen = setting_for(Precision::amp, device);
  const auto native = mezzo::recommended(device);
  if (!chosen.enabled || native.enabled) return {};
  return native.reason;
}

Table run_rows(const RunOptions& options, const std::vector<std::string>& arguments) {
  const auto precisions = table_precisions(options);
  Table table{.rows = std::vector<TableRow>(precisions.size()), .float32_speeds = {}};
  const auto time_float32 = [&] {
    const auto steps = std::to_string(options.max_steps > 0 ? options.max_steps : 40);
    const auto run = run_in_its_process(arguments, Precision::fp32, options.training.seed,
                                        {"--quiet", "--max-steps", steps});
    table.float32_speeds.push_back(run.tokens_per_second);
  };
  time_float32();
  for (uint64_t i = 0; i < static_cast<uint64_t>(options.seeds); ++i) {
    // Seed by seed, so that what else the machine does slows all rows down.
    for (std::size_t row = 0; row < precisions.size(); ++row) {
      table.rows[row].push_back(
          run_in_its_process(arguments, precisions[row], options.training.seed + i));
      time_float32();
    }
  }
  return table;
}

}  // namespace bert_ner
