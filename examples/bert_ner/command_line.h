/// \file
/// The flags, checked.
#pragma once

#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "options.h"

namespace bert_ner {

/// `--help` and what it prints.
struct HelpRequest {
  std::string text;
};

/// All precisions, one after the other. `arguments` are this program's own.
struct TableRequest {
  RunOptions options;
  std::vector<std::string> arguments;
};

using Request = std::variant<HelpRequest, TableRequest, RunOptions, PredictOptions>;

/// A flag that does not exist, lacks its value, is out of range or contradicts another.
/// what() is one line.
struct UsageError : std::runtime_error {
  using runtime_error::runtime_error;
};

/// Is this process one of several (--distributed)? Known before the flags are checked, so that
/// errors in them are said once.
bool asks_for_ranks(const std::vector<std::string>& arguments);

/// What the arguments (without the program's name) ask for. \throws UsageError
Request parse_command_line(const std::vector<std::string>& arguments);

}  // namespace bert_ner
