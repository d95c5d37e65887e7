/// \file
/// A call of every op that autocast lists on the CPU or on CUDA, and the means to make it in other
/// dtypes and on other devices.
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

/// One sample an op, the same at every call.
const std::vector<OpSample>& op_samples();

c10::OperatorHandle find_op(const std::string& name);

/// The arguments with the schema's defaults appended.
std::vector<c10::IValue> complete_arguments(const OpSample& sample);

/// The arguments with each floating tensor replaced by what `map` makes of it.
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

/// What a call gave: its results, or an exception.
struct Outcome {
  bool threw = false;
  std::string error;
  std::vector<c10::IValue> results;
};

Outcome call(const c10::OperatorHandle& op, std::vector<c10::IValue> arguments);

enum class Values { bitwise_equal, within_rounding };

/// Empty if the two agree in kind, dtype, shape and values; else what differs first.
std::string difference(const Outcome& expected, const Outcome& found, Values values);

}  // namespace op_overrides_test
