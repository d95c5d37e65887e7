/// \file
/// Finds the dispatcher's operators by the names that a user writes.
#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
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

/// Returns the Levenshtein distance of two names.
inline std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

/// Returns the registered names closest to `wanted`, as "; did you mean a or b or c?", or nothing
/// when none is close. The suggestions have an overload if `wanted` has one.
inline std::string suggestions(const std::string& wanted) {
  const bool with_overload = wanted.find('.') != std::string::npos;
  const std::size_t farthest = wanted.size() / 3;
  std::set<std::pair<std::size_t, std::string>> ranked;
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
    std::string name = with_overload ? full_name(op) : op.name;
    // Names differ in at least as many letters as their lengths: without this a file that is no
    // policy, and has one line of a megabyte, takes minutes.
    if (std::max(wanted.size(), name.size()) - std::min(wanted.size(), name.size()) > farthest) {
      continue;
    }
    const std::size_t distance = edit_distance(wanted, name);
    if (distance <= farthest) ranked.emplace(distance, std::move(name));
  }
  std::string text;
  std::size_t count = 0;
  for (const auto& [distance, name] : ranked) {
    if (count == 3) {
      break;
    }
    text += (count++ == 0 ? "; did you mean " : " or ") + name;
  }
  return text.empty() ? text : text + "?";
}

/// Whether the op returns its results as new tensors. Autocast leaves ops that write into their
/// arguments alone: a cast argument would be another tensor than the caller's.
inline bool is_functional(const c10::OperatorHandle& op) { return !op.schema().is_mutable(); }

/// Whether the op's result shares memory with an argument, always or for some arguments. The schema
/// of a view says so. The schemas of the ops in the table do not, although these are composed of
/// views or hand an argument back.
inline bool may_alias_argument(const c10::OperatorHandle& op) {
  const auto& returns = op.schema().returns();
  const bool is_annotated = std::any_of(returns.begin(), returns.end(), [](const auto& result) {
    return result.alias_info() != nullptr;
  });
  static constexpr std::array<std::string_view, 39> kUnannotated = {
      "_c10d_functional::wait_tensor",
      "aten::_add_batch_dim",
      "aten::_cast_Byte",
      "aten::_cast_Char",
      "aten::_cast_Double",
      "aten::_cast_Float",
      "aten::_cast_Half",
      "aten::_cast_Int",
      "aten::_cast_Long",
      "aten::_cast_Short",
      "aten::_remove_batch_dim",
      "aten::_to_cpu",
      "aten::_unsafe_view",
      "aten::align_as",
      "aten::align_tensors",
      "aten::alpha_dropout",
      "aten::atleast_1d",
      "aten::atleast_2d",
      "aten::atleast_3d",
      "aten::broadcast_tensors",
      "aten::cartesian_prod",
      "aten::conj_physical",
      "aten::data",
      "aten::dequantize",
      "aten::dropout",
      "aten::feature_alpha_dropout",
      "aten::feature_dropout",
      "aten::flatten_dense_tensors",
      "aten::lift",
      "aten::meshgrid",
      "aten::set",
      "aten::sum_to_size",
      "aten::to_dense",
      "aten::type_as",
      "aten::unflatten_dense_tensors",
      "aten::unsafe_chunk",
      "aten::unsafe_split",
      "aten::unsafe_split_with_sizes",
      "inductor::_reinterpret_tensor"};
  return is_annotated || std::binary_search(kUnannotated.begin(), kUnannotated.end(),
                                            std::string_view(op.operator_name().name));
}

/// Returns the overloads of one name that a policy can edit.
inline std::vector<c10::OperatorHandle> functional_overloads(const std::string& name) {
  std::vector<c10::OperatorHandle> found;
  for (const auto& op_name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (op_name.name == name) {
      if (auto op = c10::Dispatcher::singleton().findSchema(op_name); op && is_functional(*op)) {
        found.push_back(*op);
      }
    }
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
    return a.operator_name().overload_name < b.operator_name().overload_name;
  });
  return found;
}

/// Returns the operators that a name stands for: one when it has an overload, else all of its
/// overloads.
/// \throws c10::Error for a name that nobody registered, naming the nearest, and for an op that
/// writes into its arguments
inline std::vector<c10::OperatorHandle> find_ops(std::string_view written) {
  const std::string name = qualified(written);
  if (name.find('.', name.find("::")) != std::string::npos) {
    auto op = find_op(name);
    TORCH_CHECK(op.has_value(), "op: no operator \"", name, "\" is registered", suggestions(name));
    TORCH_CHECK(is_functional(*op), "op: ", name,
                " writes into its arguments; autocast acts on functional ops only: name the op "
                "without the underscore, and not its out overload");
    return {*op};
  }
  auto ops = functional_overloads(name);
  if (ops.empty()) {
    const auto names = c10::Dispatcher::singleton().getAllOpNames();
    const bool exists =
        std::any_of(names.begin(), names.end(), [&](const auto& op) { return op.name == name; });
    TORCH_CHECK(!exists, "op: every overload of ", name,
                " writes into its arguments; autocast acts on functional ops only: name the op "
                "without the underscore, and not its out overload");
    TORCH_CHECK(false, "op: no operator \"", name, "\" is registered", suggestions(name));
  }
  return ops;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
