/// \file
/// bert_ner: fine-tunes BERT for named-entity recognition in mixed precision. See README.md.
#include <torch/torch.h>

#include <csignal>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "machine.h"
#include "options.h"
#include "run.h"
#include "table.h"
#include "tagging.h"
#include "text.h"

namespace {

void run(const std::vector<std::string>& arguments) {
  using Kind = bert_ner::Options::Kind;
  const auto options = bert_ner::parse_command_line(arguments);
  if (options.threads > 0) at::set_num_threads(options.threads);
  if (options.kind == Kind::help) {
    std::cout << options.help;
  } else if (options.kind == Kind::predict) {
    bert_ner::predict(options, std::cout);
  } else {
    const bool has_file = !options.json.empty() && options.json != "-";
    if (has_file) bert_ner::write_file(options.json, nullptr);  // fails before the training
    const auto rows = options.kind == Kind::table
                          ? bert_ner::run_rows(options, arguments)
                          : std::vector{bert_ner::TableRow{{bert_ner::Run(options).execute()}, {}}};
    if (bert_ner::stop_signal != 0) return;
    const auto json = bert_ner::table_json(rows, options).dump(2) + "\n";
    std::cout << (options.json == "-" ? json : bert_ner::format_table(rows));
    if (has_file) bert_ner::write_file(options.json, [&](std::ostream& file) { file << json; });
  }
  if (std::cout.flush()) return;
  throw bert_ner::InputError("standard output: cannot be written");
}

/// Prints an error. \returns `status`
int fail(int status, const std::string& message) {
  std::cerr << "bert_ner: " << message << std::endl;
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  bert_ner::set_library_defaults();
  std::signal(SIGXFSZ,
              SIG_IGN);  // so that exceeding a file size limit is an error with the file's name
  try {
    run({argv + 1, argv + argc});
    const int signal = bert_ner::stop_signal;
    if (signal == 0) return 0;
    std::signal(signal, SIG_DFL);
    return std::raise(signal);  // so that the shell sees the signal
  } catch (const CLI::ParseError& error) {
    return fail(2, bert_ner::message_of(error) + " (bert_ner --help lists the flags)");
  } catch (const std::exception& error) {
    return fail(1, bert_ner::message_of(error));
  }
}
