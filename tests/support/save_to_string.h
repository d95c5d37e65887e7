#pragma once

#include <torch/serialize.h>

#include <sstream>
#include <string>

namespace test_support {

/// Returns the bytes that torch::save writes for `value`.
template <class Value>
std::string save_to_string(const Value& value) {
  std::ostringstream stream;
  torch::save(value, stream);
  return stream.str();
}

/// Loads `value` from the bytes of `save_to_string`.
template <class Value>
void load_from_string(Value& value, const std::string& bytes) {
  std::istringstream stream(bytes);
  torch::load(value, stream);
}

}  // namespace test_support
