#pragma once

#include <mezzo/base/detail/private_member.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/checkpoint_part.h>

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/frontend/script_type_parser.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

// Converts libtorch's archives to dicts that Python reads, and back. The contents of an archive are
// in a private member. The public way to get them, save_to, writes TorchScript with a copy of every
// tensor, which torch.load(weights_only=True) cannot read.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

struct WrittenModule {
  friend constexpr auto private_member(WrittenModule);
};
template struct PrivateMember<WrittenModule, &torch::serialize::OutputArchive::module_>;

struct ReadModule {
  friend constexpr auto private_member(ReadModule);
};
template struct PrivateMember<ReadModule, &torch::serialize::InputArchive::module_>;

inline torch::jit::Module& module_in(torch::serialize::OutputArchive& archive) {
  return archive.*private_member(WrittenModule());
}
inline torch::jit::Module& module_in(torch::serialize::InputArchive& archive) {
  return archive.*private_member(ReadModule());
}

/// Returns `value` without the element types of its lists and dicts, which Python does not read.
inline c10::IValue without_types(const c10::IValue& value) {
  if (value.isList()) {
    c10::impl::GenericList list(c10::AnyType::get());
    for (const c10::IValue& element : value.toListRef()) list.push_back(without_types(element));
    return list;
  }
  if (value.isGenericDict()) {
    c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
    for (const auto& entry : value.toGenericDict()) {
      dict.insert(entry.key(), without_types(entry.value()));
    }
    return dict;
  }
  if (value.isTuple()) {
    std::vector<c10::IValue> elements;
    for (const c10::IValue& one : value.toTupleRef().elements()) {
      elements.push_back(without_types(one));
    }
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  return value;
}

/// The inverse of `without_types`.
inline c10::IValue with_type(const c10::IValue& value, const c10::TypePtr& type) {
  if (const auto optional = type->cast<c10::OptionalType>()) {
    return value.isNone() ? value : with_type(value, optional->getElementType());
  }
  if (const auto list_type = type->cast<c10::ListType>()) {
    c10::impl::GenericList list(list_type->getElementType());
    for (const c10::IValue& element : value.toListRef()) {
      list.push_back(with_type(element, list_type->getElementType()));
    }
    return list;
  }
  if (const auto dict_type = type->cast<c10::DictType>()) {
    c10::impl::GenericDict dict(dict_type->getKeyType(), dict_type->getValueType());
    for (const auto& entry : value.toGenericDict()) {
      dict.insert(entry.key(), with_type(entry.value(), dict_type->getValueType()));
    }
    return dict;
  }
  if (const auto tuple_type = type->cast<c10::TupleType>()) {
    std::vector<c10::IValue> elements;
    const auto& untyped = value.toTupleRef().elements();
    TORCH_CHECK(untyped.size() == tuple_type->elements().size(), "a tuple has ", untyped.size(),
                " elements in the file, and ", tuple_type->elements().size(),
                " here; the file is that of another object");
    for (std::size_t i = 0; i < untyped.size(); ++i) {
      elements.push_back(with_type(untyped[i], tuple_type->elements()[i]));
    }
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  return value;
}

inline bool has_elements(const c10::IValue& value) {
  return value.isList() || value.isGenericDict() || value.isTuple();
}

/// Maps the names of parameter states to the parameters' numbers, in the order of the groups. In
/// libtorch's archive of an optimizer the name is the parameter's address, so the same state would
/// never give the same file.
using ParameterNumbers = std::unordered_map<std::string, std::size_t>;

/// Returns the numbers for an optimizer's archive; empty for any other archive.
inline ParameterNumbers numbers_of_parameters(const torch::jit::Module& archive) {
  ParameterNumbers numbers;
  const auto is_archive = [&](const char* name) {
    return archive.hasattr(name) && archive.attr(name).isModule();
  };
  if (!is_archive("state") || !is_archive("param_groups")) return numbers;
  for (const auto& group : archive.attr("param_groups").toModule().named_attributes(false)) {
    if (!group.value.isModule()) continue;
    for (const auto& parameter : group.value.toModule().named_attributes(/*recurse=*/false)) {
      if (!parameter.value.isString() || !parameter.name.starts_with("params/")) continue;
      numbers.emplace(parameter.value.toStringRef(), numbers.size());
    }
  }
  return numbers;
}

/// Returns the contents of an archive by name, in the order of writing; parameter states by number.
inline std::vector<std::pair<std::string, c10::IValue>> attributes_of(
    const torch::jit::Module& archive, const ParameterNumbers& numbers) {
  std::vector<std::pair<std::string, c10::IValue>> attributes;
  std::map<std::size_t, c10::IValue> states;
  for (const auto& [name, value] : archive.named_attributes(/*recurse=*/false)) {
    if (const auto number = numbers.find(name); number != numbers.end()) {
      states.emplace(number->second, value);
    } else {
      const auto named = value.isString() ? numbers.find(value.toStringRef()) : numbers.end();
      attributes.emplace_back(
          name, named == numbers.end() ? value : c10::IValue(std::to_string(named->second)));
    }
  }
  for (const auto& [number, state] : states) attributes.emplace_back(std::to_string(number), state);
  return attributes;
}

/// Returns a dict, with a dict for each nested archive. Appends to `types`, in the dict's order,
/// the type of each list, dict and tuple, and an empty text for each nested archive.
inline c10::IValue dict_of(const torch::jit::Module& archive, std::vector<std::string>& types,
                           const ParameterNumbers& of_outer = {}) {
  const ParameterNumbers own = numbers_of_parameters(archive);
  const ParameterNumbers& numbers = own.empty() ? of_outer : own;
  c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
  for (const auto& [name, value] : attributes_of(archive, numbers)) {
    if (value.isModule()) {
      types.emplace_back();
      dict.insert(name, dict_of(value.toModule(), types, numbers));
    } else {
      if (has_elements(value)) types.push_back(value.type()->annotation_str());
      dict.insert(name, without_types(value));
    }
  }
  return dict;
}

inline SavedValue value_of(torch::serialize::OutputArchive& archive) {
  SavedValue saved;
  saved.value = dict_of(module_in(archive), saved.types);
  return saved;
}

inline void fill_archive(torch::serialize::OutputArchive& archive, const c10::IValue& dict,
                         const std::vector<std::string>& types, std::size_t& next_type) {
  for (const auto& entry : dict.toGenericDict()) {
    const std::string& key = entry.key().toStringRef();
    const c10::IValue& value = entry.value();
    if (value.isTensor()) {
      archive.write(key, value.toTensor(), /*is_buffer=*/true);
    } else if (!has_elements(value)) {
      archive.write(key, value);
    } else if (const std::string& type = types.at(next_type++); !type.empty()) {
      archive.write(key, with_type(value, torch::jit::ScriptTypeParser().parseType(type)));
    } else {
      torch::serialize::OutputArchive nested(archive.compilation_unit());
      fill_archive(nested, value, types, next_type);
      archive.write(key, nested);
    }
  }
}

/// The inverse of `value_of`. Shares the tensors.
inline torch::serialize::InputArchive archive_of(const SavedValue& saved) {
  torch::serialize::OutputArchive filled;
  std::size_t next_type = 0;
  fill_archive(filled, saved.value, saved.types, next_type);
  torch::serialize::InputArchive archive;
  module_in(archive) = module_in(filled);
  return archive;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
