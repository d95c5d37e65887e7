/// \file
/// bert_ner: fine-tunes BERT for named-entity recognition in mixed precision. See README.md.
#include <fcntl.h>
#include <torch/torch.h>
#include <unistd.h>

#include <csignal>
#include <exception>
#include <iostream>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "atomic_file.h"
#include "command_line.h"
#include "input_error.h"
#include "machine.h"
#include "predict.h"
#include "run.h"
#include "table.h"

namespace {

constexpr int kFailure = 1;
constexpr int kUsage = 2;

template <typename... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};

/// Where the results go: a table for a person on standard output and, if --json names one, a file,
/// which is opened before the hours of training; or, with "--json -", JSON on standard output.
class Results {
 public:
  explicit Results(const bert_ner::RunOptions& options) : options_(options) {
    if (!options.json.empty() && options.json != kStandardOutput) file_.emplace(options.json);
  }

  void write(const std::vector<bert_ner::RunResult>& rows) {
    const std::string json = bert_ner::table_json(rows, options_).dump(2) + "\n";
    std::cout << (options_.json == kStandardOutput ? json : bert_ner::format_table(rows))
              << std::flush;
    if (!file_) return;
    file_->write(json);
    static_cast<void>(file_->commit());
  }

 private:
  static constexpr const char* kStandardOutput = "-";
  bert_ner::RunOptions options_;
  std::optional<bert_ner::AtomicFile> file_;
};

void run_one(const bert_ner::RunOptions& options) {
  Results results(bert_ner::options_in_effect(options));
  results.write({bert_ner::run_training(options)});
}

void run_table(const bert_ner::TableRequest& request) {
  Results results(bert_ner::options_in_effect(request.options));
  bert_ner::set_threads(request.options.threads);  // as the rows do, and the results say
  const auto warning = bert_ner::slow_autocast_warning(request.options);
  if (!warning.empty()) std::cerr << "note: " << warning << std::endl;
  results.write(bert_ner::run_rows(request.arguments));
}

void require_standard_output() {
  if (fcntl(STDOUT_FILENO, F_GETFD) >= 0) return;
  // The next file to be opened would take its place.
  throw bert_ner::InputError("standard output: is closed; send it to a file or to /dev/null");
}

void flush_standard_output() {
  std::cout.flush();
  if (std::cout) return;
  throw bert_ner::InputError(
      "standard output: cannot be written; make room where it goes and try again");
}

void answer(const bert_ner::Request& request) {
  std::visit(Overloaded{[](const bert_ner::HelpRequest& help) { std::cout << help.text; },
                        [](const bert_ner::TableRequest& table) { run_table(table); },
                        [](const bert_ner::RunOptions& run) { run_one(run); },
                        [](const bert_ner::PredictOptions& options) {
                          bert_ner::predict(options, std::cout);
                        }},
             request);
}

int fail(const std::string& message, int status) {
  std::cerr << "bert_ner: " << message.substr(0, message.find('\n')) << std::endl;
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file size limit is then an error that says which file
  try {
    require_standard_output();
    answer(bert_ner::parse_command_line({argv + 1, argv + argc}));
    flush_standard_output();
    return 0;
  } catch (const bert_ner::RowFailed& failure) {
    return failure.status;
  } catch (const bert_ner::UsageError& error) {
    return fail(std::string(error.what()) + " (bert_ner --help lists the flags)", kUsage);
  } catch (const c10::Error& error) {
    return fail(error.what_without_backtrace(), kFailure);
  } catch (const std::exception& error) {
    return fail(error.what(), kFailure);
  }
}
