/// \file
/// Sample arguments of every op that autocast lists on the CPU or CUDA, for any dtype and device.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

namespace op_overrides_test {

/// An op and its first arguments, float32 on the CPU; the rest are the schema's defaults.
struct OpSample {
  std::string op;
  std::vector<c10::IValue> arguments;
};

/// Returns one sample per op, the same at every call.
const std::vector<OpSample>& op_samples();

c10::OperatorHandle find_op(const std::string& name);

/// Returns the arguments with the schema's defaults appended.
std::vector<c10::IValue> complete_arguments(const OpSample& sample);

/// Returns the arguments with each floating-point tensor replaced by `map(tensor)`.
template <class Map>
std::vector<c10::IValue> map_tensors(const std::vector<c10::IValue>& arguments, Map map) {
  const auto mapped = [&map](const at::Tensor& tensor) {
    return tensor.defined() && tensor.is_floating_point() ? map(tensor) : tensor;
  };
  std::vector<c10::IValue> results;
  for (const auto& argument : arguments) {
    if (argument.isTensor()) {
      results.emplace_back(mapped(argument.toTensor()));
    } else if (argument.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : argument.toTensorVector()) {
        list.push_back(mapped(tensor));
      }
      results.emplace_back(std::move(list));
    } else {
      results.push_back(argument);
    }
  }
  return results;
}

/// The results of a call, or its exception.
struct Outcome {
  bool threw = false;
  std::string error;
  std::vector<c10::IValue> results;
};

Outcome call(const c10::OperatorHandle& op, std::vector<c10::IValue> arguments);

enum class Values { bitwise_equal, within_rounding };

/// Returns the first difference in kind, dtype, shape or values; empty if there is none.
std::string difference(const Outcome& expected, const Outcome& found, Values values);

}  // namespace op_overrides_test
