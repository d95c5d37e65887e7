#pragma once

#include <torch/serialize.h>

#include <sstream>
#include <string>

namespace test_support {

/// Returns the file that torch::save writes of `value`.
template <class Value>
std::string save_to_string(const Value& value) {
  std::ostringstream file;
  torch::save(value, file);
  return file.str();
}

/// Reads such a file.
template <class Value>
void load_from_string(Value& value, const std::string& file) {
  std::istringstream stream(file);
  torch::load(value, stream);
}

}  // namespace test_support
