#include "table.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <stdexcept>
#include <system_error>

#include "formatted.h"
#include "json_file.h"
#include "machine.h"

namespace bert_ner {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kColumns = 7;
constexpr std::array kRows = {Precision::fp32, Precision::amp_no_scale, Precision::amp};
using Cells = std::array<std::string, kColumns>;

double relative_speed(const RunResult& row, const RunResult& first) {
  return first.tokens_per_second > 0 ? row.tokens_per_second / first.tokens_per_second : 0.0;
}

Cells cells_of(const RunResult& row, const RunResult& first) {
  constexpr double kMebibyte = 1024.0 * 1024.0;
  return {row.name,
          formatted("%g", row.learning_rate),
          formatted("%.3f", row.f1),
          formatted("%.3f", row.precision),
          formatted("%.3f", row.recall),
          formatted("%.0f MiB", static_cast<double>(row.peak_memory_bytes) / kMebibyte),
          formatted("%.2f", relative_speed(row, first))};
}

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

/// This very program, run with other arguments; its standard output comes through a pipe. It ends
/// with this process, however this one ends.
class Row {
 public:
  explicit Row(const std::vector<std::string>& arguments) {
    const std::string self = fs::read_symlink("/proc/self/exe").string();
    std::vector<char*> pointers{const_cast<char*>(self.c_str())};
    for (const auto& argument : arguments) pointers.push_back(const_cast<char*>(argument.c_str()));
    pointers.push_back(nullptr);
    std::array<int, 2> ends{};
    if (pipe2(ends.data(), O_CLOEXEC) != 0) fail("cannot make a pipe");
    output_ = ends[0];
    const pid_t parent = getpid();
    child_ = fork();
    if (child_ < 0) fail("cannot start a run");
    if (child_ == 0) become(self.c_str(), pointers.data(), ends[1], parent);
    close(ends[1]);
  }
  ~Row() { close(output_); }
  Row(const Row&) = delete;
  Row& operator=(const Row&) = delete;

  /// All that it prints.
  std::string read_all() const {
    std::string text;
    std::array<char, 4096> buffer;
    while (true) {
      const auto count = read(output_, buffer.data(), buffer.size());
      if (count == 0) return text;
      if (count > 0) text.append(buffer.data(), static_cast<std::size_t>(count));
      if (count < 0 && errno != EINTR) fail("cannot read the results of a run");
    }
  }

  /// Waits for its end. \returns as waitpid does
  int wait() const {
    int status = 0;
    while (waitpid(child_, &status, 0) < 0) {
      if (errno != EINTR) fail("waitpid");
    }
    return status;
  }

 private:
  /// In the child, where only what is safe in a signal handler may be called.
  [[noreturn]] static void become(const char* self, char* const* arguments, int output,
                                  pid_t parent) {
    constexpr int kCannotRun = 127;
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) _exit(kCannotRun);  // it ended before we asked
    dup2(output, STDOUT_FILENO);
    execv(self, arguments);
    _exit(kCannotRun);
  }

  int output_ = -1;
  pid_t child_ = -1;
};

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

nlohmann::json table_json(std::span<const RunResult> rows, const RunOptions& options, int ranks) {
  nlohmann::json list = nlohmann::json::array();
  for (const auto& row : rows) {
    nlohmann::json entry = row;
    entry["relative_speed"] = relative_speed(row, rows.front());
    list.push_back(std::move(entry));
  }
  return {{"rows", std::move(list)},          {"device", options.device},
          {"threads", at::get_num_threads()}, {"ranks", ranks},
          {"model", options.model},           {"data", options.data},
          {"training", options.training}};
}

std::string slow_autocast_warning(const RunOptions& options) {
  const auto device = find_device(options.device);
  const auto chosen = setting_for(Precision::amp, device);
  const auto native = mezzo::recommended(device);
  if (!chosen.enabled || native.enabled) return {};
  return native.reason;
}

std::vector<RunResult> run_rows(const std::vector<std::string>& arguments) {
  std::vector<RunResult> rows;
  for (const auto precision : kRows) {
    auto row_arguments = arguments;
    row_arguments.insert(row_arguments.end(), {"--precision", flag_of(precision), "--json", "-"});
    const Row row(row_arguments);
    const auto results = row.read_all();
    const int status = row.wait();
    const auto name = "the run of " + title_of(precision);
    if (WIFSIGNALED(status)) {
      throw std::runtime_error(name + " was ended by signal " + std::to_string(WTERMSIG(status)) +
                               "; run it alone with --precision " + flag_of(precision));
    }
    if (WEXITSTATUS(status) != 0) throw RowFailed{WEXITSTATUS(status)};
    rows.push_back(parse_json(results, name).at("rows").at(0).get<RunResult>());
  }
  return rows;
}

std::vector<RunResult> run_rows(const RunOptions& options, const Ranks& ranks) {
  std::vector<RunResult> rows;
  auto row_options = options;
  for (const auto precision : kRows) {
    row_options.training.precision = precision;
    ranks.together(
        [&] { restart_peak_memory(find_device(options.device, ranks.place_on_this_machine())); });
    rows.push_back(run_training(row_options, ranks));
  }
  return rows;
}

}  // namespace bert_ner
