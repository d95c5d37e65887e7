/// \file
/// How the program ends when something went wrong.
#pragma once

#include <exception>
#include <string>

namespace bert_ner {

/// What is said on standard error, if anything, and the status to end with.
struct Failure {
  int status = 0;
  std::string message;  ///< one line; empty where somebody else has said it
};

/// Of an exception that is being handled or was caught: 2 for flags that cannot be, 1 for all else.
Failure failure_of(const std::exception_ptr& exception);

/// Have all ranks failed together (RanksFailed), so that none waits for another?
bool is_of_all_ranks(const std::exception_ptr& exception);

}  // namespace bert_ner
