/// \file
/// bert_ner: fine-tunes BERT for named-entity recognition in mixed precision. See README.md.
#include <torch/torch.h>

#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <exception>
#include <iostream>
#include <string>
#include <variant>
#include <vector>

#include "machine.h"
#include "options.h"
#include "ranks.h"
#include "run.h"
#include "table.h"
#include "tagging.h"
#include "text.h"

namespace {

using bert_ner::Ranks;

/// Prints a table for a person or, with "--json -", JSON; `--json FILE` writes a file too.
void print(const std::vector<bert_ner::TableRow>& rows, const bert_ner::RunOptions& options,
           const Ranks& ranks) {
  const auto json = bert_ner::table_json(rows, options, ranks.size()).dump(2) + "\n";
  if (options.json == "-") {
    std::cout << json << std::flush;
    return;
  }
  std::cout << bert_ner::format_table(rows) << "\n";
  if (const auto note = bert_ner::reading_note(rows)) std::cout << *note << "\n";
  std::cout << std::flush;
  if (!options.json.empty()) bert_ner::write_file(options.json, {json});
}

/// Runs what `make_rows` runs. Whether its results can be written is tried before the hours of
/// training; of several ranks the first writes them.
template <class MakeRows>
void run_and_print(const bert_ner::RunOptions& given, const Ranks& ranks, MakeRows make_rows) {
  auto options = given;
  const auto if_first = [&](const auto& work) {
    ranks.together([&] {
      if (ranks.is_first()) work();
    });
  };
  ranks.together([&] { options = bert_ner::options_in_effect(given); });
  if_first([&] {
    if (!options.json.empty() && options.json != "-") bert_ner::check_writable(options.json);
  });
  const auto rows = make_rows();
  if_first([&] { print(rows, options, ranks); });
}

void run_table(const bert_ner::TableRequest& request, const Ranks& ranks) {
  run_and_print(request.options, ranks, [&] {
    bert_ner::set_threads(request.options.threads, ranks.on_this_machine());  // as the rows do
    const auto warning = bert_ner::slow_autocast_warning(request.options);
    if (!warning.empty() && ranks.is_first()) std::cerr << "note: " << warning << std::endl;
    return ranks.is_distributed() ? bert_ner::run_rows(request.options, ranks)
                                  : bert_ner::run_rows(request.options, request.arguments);
  });
}

void run(const std::vector<std::string>& arguments, Ranks& ranks) {
  if (bert_ner::asks_for_ranks(arguments)) ranks = Ranks::join();
  bert_ner::Request request;
  ranks.together([&] {
    if (fcntl(STDOUT_FILENO, F_GETFD) < 0) {  // the next file to be opened would take its place
      throw bert_ner::InputError("standard output: is closed; send it to a file or to /dev/null");
    }
    request = bert_ner::parse_command_line(arguments);
  });
  if (const auto* help = std::get_if<bert_ner::HelpRequest>(&request)) {
    if (ranks.is_first()) std::cout << help->text;
  } else if (const auto* options = std::get_if<bert_ner::PredictOptions>(&request)) {
    ranks.together([&] {
      if (ranks.is_first()) bert_ner::predict(*options, std::cout);
    });
  } else if (const auto* table = std::get_if<bert_ner::TableRequest>(&request)) {
    run_table(*table, ranks);
  } else {
    const auto& one = std::get<bert_ner::RunOptions>(request);
    run_and_print(one, ranks, [&] {
      return std::vector<bert_ner::TableRow>{{bert_ner::run_training(one, ranks)}};
    });
  }
  ranks.together([] {
    if (std::cout.flush()) return;
    throw bert_ner::InputError(
        "standard output: cannot be written; make room where it goes and try again");
  });
}

}  // namespace

int main(int argc, char** argv) {
  bert_ner::set_library_defaults();
  std::signal(SIGXFSZ, SIG_IGN);  // a file size limit is then an error that says which file
  Ranks ranks;
  try {
    run({argv + 1, argv + argc}, ranks);
    return 0;
  } catch (const bert_ner::Interrupted& interrupted) {
    std::signal(interrupted.signal, SIG_DFL);
    return std::raise(interrupted.signal);  // so that a shell knows
  } catch (...) {
    const auto exception = std::current_exception();
    const auto failure = bert_ner::failure_of(exception);
    const std::string who = ranks.is_distributed() && !failure.is_of_all_ranks
                                ? "rank " + std::to_string(ranks.rank()) + ": "
                                : "";
    if (!failure.message.empty()) std::cerr << "bert_ner: " << who << failure.message << std::endl;
    if (!failure.is_of_all_ranks) ranks.end_all(failure.status);
    return failure.status;
  }
}
