/// \file
/// bert_ner: fine-tunes BERT for named-entity recognition in mixed precision. See README.md.
#include <torch/torch.h>

#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <exception>
#include <iostream>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "machine.h"
#include "options.h"
#include "run.h"
#include "table.h"
#include "tagging.h"
#include "text.h"

namespace {

/// Runs what `make_rows` runs and prints its table, or JSON with "--json -"; `--json FILE` writes a
/// file too.
template <class MakeTable>
void run_and_print(const bert_ner::RunOptions& given, MakeTable make_table) {
  const auto options = bert_ner::options_in_effect(given);
  const bool has_file = !given.json.empty() && given.json != "-";
  if (has_file) bert_ner::check_writable(options.json);  // now, not after hours of training
  const bert_ner::Table table = make_table();
  const auto json = bert_ner::table_json(table, options).dump(2) + "\n";
  std::cout << (options.json == "-" ? json : bert_ner::format_table(table)) << std::flush;
  if (has_file) bert_ner::write_file(options.json, [&](std::ostream& file) { file << json; });
}

void run(const std::vector<std::string>& arguments) {
  if (fcntl(STDOUT_FILENO, F_GETFD) < 0) {  // the next file to be opened would take its place
    throw bert_ner::InputError("standard output: is closed; send it to a file or to /dev/null");
  }
  const auto request = bert_ner::parse_command_line(arguments);
  if (const auto* help = std::get_if<bert_ner::HelpRequest>(&request)) {
    std::cout << help->text;
  } else if (const auto* options = std::get_if<bert_ner::PredictOptions>(&request)) {
    bert_ner::predict(*options, std::cout);
  } else if (const auto* table = std::get_if<bert_ner::TableRequest>(&request)) {
    run_and_print(table->options, [&] {
      bert_ner::set_threads(table->options.threads);  // as the rows do
      const auto warning = bert_ner::slow_autocast_warning(table->options);
      if (!warning.empty()) std::cerr << "note: " << warning << std::endl;
      return bert_ner::run_rows(table->options, table->arguments);
    });
  } else {
    const auto& one = std::get<bert_ner::RunOptions>(request);
    run_and_print(one, [&] { return bert_ner::Table{{{bert_ner::run_training(one)}}, {}}; });
  }
  if (std::cout.flush()) return;
  throw bert_ner::InputError(
      "standard output: cannot be written; make room where it goes and try again");
}

/// Says what went wrong in one line. \returns the status to end with
int fail(int status, std::string_view message) {
  std::cerr << "bert_ner: " << message.substr(0, message.find('\n')) << std::endl;
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  bert_ner::set_library_defaults();
  std::signal(SIGXFSZ, SIG_IGN);  // a file size limit is then an error that says which file
  try {
    run({argv + 1, argv + argc});
    return 0;
  } catch (const bert_ner::Interrupted& interrupted) {
    std::signal(interrupted.signal, SIG_DFL);
    return std::raise(interrupted.signal);    // so that a shell knows
  } catch (const bert_ner::RowFailed& row) {  // which has said why
    return row.status;
  } catch (const bert_ner::UsageError& error) {
    return fail(2, error.what() + std::string(" (bert_ner --help lists the flags)"));
  } catch (const c10::Error& error) {
    return fail(1, error.what_without_backtrace());
  } catch (const std::exception& error) {
    return fail(1, error.what());
  }
}
