/// \file
/// Finds the dispatcher's operators by the names that a user writes.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline std::string full_name(const c10::OperatorName& name) { return c10::toString(name); }

/// Returns the name with its namespace: "aten::linear" for "linear".
inline std::string qualified(std::string_view name) {
  const bool has_namespace = name.find("::") != std::string_view::npos;
  return has_namespace ? std::string(name) : "aten::" + std::string(name);
}

/// Returns the operator of a full name, "aten::mm" or "aten::softmax.int", if it is registered.
inline std::optional<c10::OperatorHandle> find_op(const std::string& name) {
  const auto dot = name.find('.', name.find("::"));
  const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchema({name.substr(0, dot), overload});
}

/// Whether the op returns its results as new tensors. Autocast leaves ops that write into their
/// arguments alone: a cast argument would be another tensor than the caller's.
inline bool is_functional(const c10::OperatorHandle& op) { return !op.schema().is_mutable(); }

/// Whether the schema says that a result shares memory with an argument.
inline bool returns_view(const c10::FunctionSchema& schema) {
  const auto& returns = schema.returns();
  return std::any_of(returns.begin(), returns.end(),
                     [](const auto& result) { return result.alias_info() != nullptr; });
}

/// Returns the operators that a name stands for: one when it has an overload, else all of its
/// overloads.
/// \throws c10::Error for a name that nobody registered, and for an op that writes into its
///   arguments
inline std::vector<c10::OperatorHandle> find_ops(std::string_view written) {
  const std::string name = qualified(written);
  std::vector<c10::OperatorHandle> ops;
  bool exists = false;
  if (name.find('.', name.find("::")) != std::string::npos) {
    const auto op = find_op(name);
    exists = op.has_value();
    if (exists && is_functional(*op)) ops.push_back(*op);
  } else {
    for (const auto& op_name : c10::Dispatcher::singleton().getAllOpNames()) {
      if (op_name.name != name) continue;
      exists = true;
      const auto op = c10::Dispatcher::singleton().findSchema(op_name);
      if (op.has_value() && is_functional(*op)) ops.push_back(*op);
    }
  }
  std::sort(ops.begin(), ops.end(), [](const auto& a, const auto& b) {
    return a.operator_name().overload_name < b.operator_name().overload_name;
  });
  TORCH_CHECK(exists, "op: no operator \"", name,
              "\" is registered; name it as mezzo::autocast_op_lists(device) prints it, and load "
              "its library first if it is another's");
  TORCH_CHECK(!ops.empty(), "op: ", name,
              " writes into its arguments; autocast acts on functional ops only: name the op "
              "without the underscore, and not its out overload");
  return ops;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
