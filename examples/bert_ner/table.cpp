#include "table.h"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <stdexcept>
#include <system_error>

#include "input_error.h"
#include "json_file.h"
#include "machine.h"

namespace bert_ner {
namespace {

namespace fs = std::filesystem;

template <typename... Values>
std::string format(const char* pattern, Values... values) {
  char text[64];
  std::snprintf(text, sizeof text, pattern, values...);
  return text;
}

constexpr std::size_t kColumns = 7;
using Cells = std::array<std::string, kColumns>;

double relative_speed(const RunResult& row, const RunResult& first) {
  return first.tokens_per_second > 0 ? row.tokens_per_second / first.tokens_per_second : 0.0;
}

Cells cells_of(const RunResult& row, const RunResult& first) {
  constexpr double kMebibyte = 1024.0 * 1024.0;
  return {row.name,
          format("%g", row.learning_rate),
          format("%.3f", row.f1),
          format("%.3f", row.precision),
          format("%.3f", row.recall),
          format("%.0f MiB", static_cast<double>(row.peak_memory_bytes) / kMebibyte),
          format("%.2f", relative_speed(row, first))};
}

/// A folder for the results of other processes, gone when this one is done with them.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (fs::temp_directory_path() / "bert_ner.XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) {
      throw InputError(pattern + ": cannot be created: " + std::generic_category().message(errno) +
                       "; set TMPDIR to a folder that can be written");
    }
    path_ = pattern;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

/// Runs this very program with other arguments and waits for it. \returns its exit status
int run_self(const std::vector<std::string>& arguments) {
  const std::string self = fs::read_symlink("/proc/self/exe").string();
  std::vector<char*> pointers{const_cast<char*>(self.c_str())};
  for (const auto& argument : arguments) pointers.push_back(const_cast<char*>(argument.c_str()));
  pointers.push_back(nullptr);
  pid_t child = 0;
  const int error = posix_spawn(&child, self.c_str(), nullptr, nullptr, pointers.data(), environ);
  if (error != 0) throw std::system_error(error, std::generic_category(), "cannot start " + self);
  int status = 0;
  while (waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) throw std::system_error(errno, std::generic_category(), "waitpid");
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

std::string format_table(std::span<const RunResult> rows) {
  std::vector<Cells> lines{
      {"name", "initial learning rate", "F1", "P", "R", "peak memory", "relative speed"}};
  for (const auto& row : rows) lines.push_back(cells_of(row, rows.front()));
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
  return text;
}

nlohmann::json table_json(std::span<const RunResult> rows, const RunOptions& options) {
  nlohmann::json list = nlohmann::json::array();
  for (const auto& row : rows) {
    nlohmann::json entry = row;
    entry["relative_speed"] = relative_speed(row, rows.front());
    list.push_back(std::move(entry));
  }
  return {{"rows", std::move(list)}, {"device", options.device}, {"threads", at::get_num_threads()},
          {"model", options.model},  {"data", options.data},     {"training", options.training}};
}

std::string slow_autocast_warning(const RunOptions& options) {
  const auto device = find_device(options.device);
  const auto chosen = setting_for(Precision::amp, device);
  const auto native = mezzo::recommended(device);
  if (!chosen.enabled || native.enabled) return {};
  return native.reason;
}

std::vector<RunResult> run_rows(const std::vector<std::string>& arguments) {
  const TemporaryFolder folder;
  std::vector<RunResult> rows;
  for (const auto precision : {Precision::fp32, Precision::amp_no_scale, Precision::amp}) {
    const auto file = folder.path() / (flag_of(precision) + ".json");
    auto row_arguments = arguments;
    row_arguments.insert(row_arguments.end(), {"--precision", flag_of(precision), "--json", file});
    const int status = run_self(row_arguments);
    if (status != 0) {
      throw std::runtime_error("the run of " + title_of(precision) + " ended with status " +
                               std::to_string(status));
    }
    rows.push_back(read_json(file).at("rows").at(0).get<RunResult>());
  }
  return rows;
}

}  // namespace bert_ner
