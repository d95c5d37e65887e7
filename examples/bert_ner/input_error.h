#pragma once

#include <stdexcept>

namespace bert_ner {

/// Every error that comes from what the user gave: a file, a flag, a text.
/// what() is one line: "FILE:LINE: what is wrong; what to do" (the line number only where a line is
/// at fault).
struct InputError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace bert_ner
