/// \file
/// bert_ner: fine-tunes BERT for named-entity recognition in mixed precision. See README.md.
#include <torch/torch.h>

#include <csignal>
#include <exception>
#include <iostream>
#include <string>
#include <string_view>
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
void run_and_print(const bert_ner::RunOptions& options, MakeTable make_table) {
  const bool has_file = !options.json.empty() && options.json != "-";
  if (has_file) bert_ner::check_writable(options.json);  // now, not after hours of training
  const bert_ner::Table table = make_table();
  const auto json = bert_ner::table_json(table, options).dump(2) + "\n";
  std::cout << (options.json == "-" ? json : bert_ner::format_table(table)) << std::flush;
  if (has_file) bert_ner::write_file(options.json, [&](std::ostream& file) { file << json; });
}

void run(const std::vector<std::string>& arguments) {
  using Kind = bert_ner::Command::Kind;
  const auto command = bert_ner::parse_command_line(arguments);
  const auto& options = command.run;
  switch (command.kind) {
    case Kind::help:
      std::cout << command.help;
      break;
    case Kind::predict:
      bert_ner::predict(command.predict, std::cout);
      break;
    case Kind::run:
      run_and_print(options, [&] {
        return bert_ner::Table{{{bert_ner::run_training(options)}}, {}};
      });
      break;
    case Kind::table:
      run_and_print(options, [&] {
        bert_ner::set_threads(options.threads);  // as the rows do
        const auto warning = bert_ner::slow_autocast_warning(options);
        if (!warning.empty()) std::cerr << "note: " << warning << std::endl;
        return bert_ner::run_rows(options, arguments);
      });
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
