/// \file
/// bert_ner: fine-tunes BERT for named-entity recognition in mixed precision. See README.md.
#include <torch/torch.h>

#include <csignal>
#include <exception>
#include <iostream>
#include <string>
#include <variant>
#include <vector>

#include "atomic_file.h"
#include "command_line.h"
#include "input_error.h"
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

void write_results(const std::vector<bert_ner::RunResult>& rows,
                   const bert_ner::RunOptions& options) {
  if (options.json.empty()) return;
  bert_ner::AtomicFile file(options.json);
  file.write(bert_ner::table_json(rows, options).dump(2) + "\n");
  static_cast<void>(file.commit());
}

void run_one(const bert_ner::RunOptions& options) {
  const std::vector rows{bert_ner::run_training(options)};
  write_results(rows, options);
  // A row of the table has its result read from the file; a person wants to see it.
  if (options.json.empty()) std::cout << bert_ner::format_table(rows) << std::flush;
}

void run_table(const bert_ner::TableRequest& request) {
  const auto warning = bert_ner::slow_autocast_warning(request.options);
  if (!warning.empty()) std::cerr << "note: " << warning << std::endl;
  const auto rows = bert_ner::run_rows(request.arguments);
  write_results(rows, request.options);
  std::cout << bert_ner::format_table(rows) << std::flush;
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
    answer(bert_ner::parse_command_line({argv + 1, argv + argc}));
    return 0;
  } catch (const bert_ner::UsageError& error) {
    return fail(std::string(error.what()) + " (bert_ner --help lists the flags)", kUsage);
  } catch (const c10::Error& error) {
    return fail(error.what_without_backtrace(), kFailure);
  } catch (const std::exception& error) {
    return fail(error.what(), kFailure);
  }
}
