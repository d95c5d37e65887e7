/// \file
/// bert_ner: fine-tunes BERT for named-entity recognition in mixed precision. See README.md.
#include <torch/torch.h>

#include <fcntl.h>
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
#include "failure.h"
#include "input_error.h"
#include "machine.h"
#include "machine_notes.h"
#include "predict.h"
#include "ranks.h"
#include "run.h"
#include "table.h"

namespace {

template <typename... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};

using bert_ner::Ranks;

/// Where the results go: a table for a person on standard output and, if --json names one, a file,
/// which is opened before the hours of training; or, with "--json -", JSON on standard output. Of
/// several ranks the first writes them.
class Results {
 public:
  Results(const bert_ner::RunOptions& options, const Ranks& ranks) : ranks_(ranks) {
    ranks.together([&] {
      options_ = bert_ner::options_in_effect(options);
      if (!ranks.is_first() || options.json.empty() || options.json == kStandardOutput) return;
      file_.emplace(options.json);
    });
  }

  void write(const std::vector<bert_ner::TableRow>& rows) {
    ranks_.together([&] {
      if (ranks_.is_first()) write_here(rows);
    });
  }

 private:
  static constexpr const char* kStandardOutput = "-";

  void write_here(const std::vector<bert_ner::TableRow>& rows) {
    const auto notes = notes_on(rows);
    const std::string json =
        bert_ner::table_json(rows, notes, options_, ranks_.size()).dump(2) + "\n";
    if (options_.json == kStandardOutput) {
      std::cout << json;
    } else {
      std::cout << bert_ner::format_table(rows) << "\n";
      for (const auto& note : notes) std::cout << note << "\n";
    }
    std::cout << std::flush;
    if (!file_) return;
    file_->write(json);
    static_cast<void>(file_->commit());
  }

  /// What to read from the rows, and what the machine means for them.
  std::vector<std::string> notes_on(const std::vector<bert_ner::TableRow>& rows) const {
    std::vector<std::string> notes;
    if (auto note = bert_ner::reading_note(rows)) notes.push_back(*std::move(note));
    for (auto& note : bert_ner::machine_notes(bert_ner::machine_facts(options_))) {
      notes.push_back(std::move(note));
    }
    std::vector<bert_ner::RunResult> runs;
    for (const auto& row : rows) runs.insert(runs.end(), row.begin(), row.end());
    if (auto note = bert_ner::busy_note(runs)) notes.push_back(*std::move(note));
    return notes;
  }

  Ranks ranks_;
  bert_ner::RunOptions options_;
  std::optional<bert_ner::AtomicFile> file_;
};

void run_one(const bert_ner::RunOptions& options, const Ranks& ranks) {
  Results results(options, ranks);
  results.write({{bert_ner::run_training(options, ranks)}});
}

void run_table(const bert_ner::TableRequest& request, const Ranks& ranks) {
  Results results(request.options, ranks);
  bert_ner::set_threads(request.options.threads,
                        ranks.on_this_machine());  // as the rows do, and the results say
  const auto warning = bert_ner::slow_autocast_warning(request.options);
  if (!warning.empty() && ranks.is_first()) std::cerr << "note: " << warning << std::endl;
  results.write(ranks.is_distributed() ? bert_ner::run_rows(request.options, ranks)
                                       : bert_ner::run_rows(request.options, request.arguments));
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

void answer(const bert_ner::Request& request, const Ranks& ranks) {
  const auto if_first = [&](const auto& work) {
    ranks.together([&] {
      if (ranks.is_first()) work();
    });
  };
  std::visit(Overloaded{[&](const bert_ner::HelpRequest& help) {
                          if_first([&] { std::cout << help.text; });
                        },
                        [&](const bert_ner::TableRequest& table) { run_table(table, ranks); },
                        [&](const bert_ner::RunOptions& run) { run_one(run, ranks); },
                        [&](const bert_ner::PredictOptions& options) {
                          if_first([&] { bert_ner::predict(options, std::cout); });
                        }},
             request);
}

void run(const std::vector<std::string>& arguments, Ranks& ranks) {
  if (bert_ner::asks_for_ranks(arguments)) ranks = Ranks::join();
  bert_ner::Request request;
  ranks.together([&] {
    require_standard_output();
    request = bert_ner::parse_command_line(arguments);
  });
  answer(request, ranks);
  ranks.together(flush_standard_output);
}

}  // namespace

int main(int argc, char** argv) {
  bert_ner::set_library_defaults();
  std::signal(SIGXFSZ, SIG_IGN);  // a file size limit is then an error that says which file
  Ranks ranks;
  try {
    run({argv + 1, argv + argc}, ranks);
    return 0;
  } catch (...) {
    const auto exception = std::current_exception();
    const auto failure = bert_ner::failure_of(exception);
    const bool is_known_to_all = bert_ner::is_of_all_ranks(exception);
    const std::string who = ranks.is_distributed() && !is_known_to_all
                                ? "rank " + std::to_string(ranks.rank()) + ": "
                                : "";
    if (!failure.message.empty()) std::cerr << "bert_ner: " << who << failure.message << std::endl;
    if (!is_known_to_all) ranks.end_all(failure.status);
    return failure.status;
  }
}
