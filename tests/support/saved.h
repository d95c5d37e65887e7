#pragma once

#include <torch/serialize.h>

#include <sstream>
#include <string>

namespace test_support {

/// Returns the file that torch::save writes of `value`.
template <class Value>
std::string saved(const Value& value) {
  std::ostringstream file;
  torch::save(value, file);
  return file.str();
}

/// Reads such a file.
template <class Value>
void load(Value& value, const std::string& file) {
  std::istringstream stream(file);
  torch::load(value, stream);
}

}  // namespace test_support
