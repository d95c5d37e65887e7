#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>

#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns the message of the exception that is being handled.
inline std::string message_of_current_exception() {
  try {
    throw;
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of a type of its own";
  }
}

/// Returns what Python calls the type of `value`, for errors.
inline std::string value_words(const c10::IValue& value) {
  if (value.isTensor()) return "a tensor";
  if (value.isBool()) return "a bool";
  if (value.isInt()) return "an integer";
  if (value.isDouble()) return "a real number";
  if (value.isString()) return "a string";
  if (value.isGenericDict()) return "a dict";
  if (value.isList()) return "a list";
  return "a " + value.tagKind();
}

/// The names of the parameters of a state's modules: "model.0.weight". A parameter may have
/// several.
using ParameterNames = std::unordered_map<const c10::TensorImpl*, std::vector<std::string>>;

/// What loading knows beside an object's value.
struct LoadContext {
  ParameterNames names{};
  std::optional<c10::Device> device{};  ///< LoadOptions::device
};

/// One object of a training state. A value is a number, a string, a tensor, or lists and dicts of
/// them: what Python reads.
struct CheckpointPart {
  using Apply = std::function<void()>;

  const char* kind;  ///< what the object is, for errors
  /// Returns the object's value, with the object's own tensors, not copies of them. May call
  /// collectives (ShardedOptimizer).
  std::function<c10::IValue(const ParameterNames& names)> save;
  /// Checks a value, and returns a function that gives it to the object. Does not change the object
  /// itself. The tensors of a value are views of the file.
  std::function<Apply(const c10::IValue& value, const LoadContext& context)> load;
  /// Returns the parameters of a module with their names; null for other objects.
  std::function<std::vector<std::pair<std::string, at::Tensor>>()> parameters = nullptr;
  /// Returns the function that begins the object anew from rank 0's value and a text that is
  /// another one on each rank, where the file is of another number of ranks; null: the object
  /// stays.
  std::function<Apply(const c10::IValue& value, const std::string& salt)> begin_anew = nullptr;
};

struct NamedPart {
  std::string name;
  CheckpointPart part;
  bool is_per_rank = false;  ///< each rank has its own
};

inline ParameterNames parameter_names(const std::vector<NamedPart>& parts) {
  ParameterNames names;
  for (const NamedPart& one : parts) {
    if (!one.part.parameters) continue;
    for (const auto& [name, parameter] : one.part.parameters()) {
      names[parameter.unsafeGetTensorImpl()].push_back(one.name + "." + name);
    }
  }
  return names;
}

using PythonDict = c10::impl::GenericDict;

inline PythonDict python_dict() { return PythonDict(c10::AnyType::get(), c10::AnyType::get()); }
inline c10::impl::GenericList python_list() { return c10::impl::GenericList(c10::AnyType::get()); }

/// Returns the value under `key`, None where `dict` is no dict or has no such key.
inline c10::IValue item(const c10::IValue& dict, const c10::IValue& key) {
  if (!dict.isGenericDict()) return {};
  const auto items = dict.toGenericDict();
  const auto found = items.find(key);
  return found == items.end() ? c10::IValue() : found->value();
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
