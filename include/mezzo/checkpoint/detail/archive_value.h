#pragma once

#include <mezzo/base/detail/private_member.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/part_of.h>
#include <mezzo/checkpoint/detail/zip_directory.h>

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <vector>

// Converts libtorch's archives to dicts that Python reads, and back. The contents of an archive are
// in a private member. The public way to get them, save_to, writes TorchScript with a copy of every
// tensor, which torch.load(weights_only=True) cannot read.
//
// The archive of an optimizer becomes what Python's `state_dict` is:
//
//   "state"         {"94071": {"step": 5, ...}}    ->  {0: {"step": tensor(5.), ...}}
//   "param_groups"  {"param_groups/size": 1, "param_groups/0": {"params/size": 1,
//                    "params/0": "94071", "options": {"lr": 0.1}}}
//                                                  ->  [{"lr": 0.1, "params": [0]}]
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

/// Stands for a list without elements, which would lose their type: {"empty_list_of": "int"}.
inline constexpr const char* kEmptyList = "empty_list_of";

/// Returns `value` without the element types of its lists, which Python does not read.
inline c10::IValue without_types(const c10::IValue& value) {
  TORCH_CHECK(!value.isGenericDict(),
              "it writes a dict to its archive; let it write a nested archive");
  if (!value.isList()) return value;
  if (value.toListRef().empty() && !value.isTensorList()) {
    PythonDict empty = python_dict();
    empty.insert(kEmptyList, value.toList().elementType()->str());
    return empty;
  }
  auto list = python_list();
  for (const c10::IValue& element : value.toListRef()) list.push_back(without_types(element));
  return list;
}

/// The inverse of `without_types`: the first element has the type, and an empty list is of tensors.
inline c10::IValue with_types(const c10::IValue& value) {
  for (const c10::TypePtr& type : std::initializer_list<c10::TypePtr>{
           c10::IntType::get(), c10::FloatType::get(), c10::BoolType::get(), c10::StringType::get(),
           c10::AnyType::get()}) {
    const c10::IValue name = item(value, kEmptyList);
    if (name.isString() && name.toStringRef() == type->str()) return c10::impl::GenericList(type);
  }
  if (!value.isList()) return value;
  std::vector<c10::IValue> elements;
  for (const c10::IValue& one : value.toListRef()) elements.push_back(with_types(one));
  c10::impl::GenericList list(elements.empty() ? c10::TypePtr(c10::TensorType::get())
                                               : elements.front().type());
  for (const c10::IValue& one : elements) list.push_back(one);
  return list;
}

/// Returns an archive's contents as a dict, with a dict for each nested archive.
inline c10::IValue dict_of(const torch::jit::Module& archive) {
  PythonDict dict = python_dict();
  for (const auto& [name, value] : archive.named_attributes(/*recurse=*/false)) {
    dict.insert(name, value.isModule() ? dict_of(value.toModule()) : without_types(value));
  }
  return dict;
}

/// Writes what `dict_of` returned. Adding an entry to an archive takes time linear in its size.
/// \param budget  the time for this dict and nested ones: the sum of the squares of their sizes
/// \throws c10::Error for more
inline void fill_archive(torch::serialize::OutputArchive& archive, const c10::IValue& dict,
                         std::size_t& budget) {
  const std::size_t size = dict.toGenericDict().size();
  check_format(size < (std::size_t{1} << 20) && size * size <= budget,
               "an object of it has too many entries");
  budget -= size * size;
  for (const auto& entry : dict.toGenericDict()) {
    TORCH_CHECK(entry.key().isString(), "it has a key that is ", value_words(entry.key()));
    const std::string& key = entry.key().toStringRef();
    const c10::IValue& value = entry.value();
    if (value.isTensor()) {
      archive.write(key, value.toTensor(), /*is_buffer=*/true);
    } else if (value.isGenericDict() && item(value, kEmptyList).isNone()) {
      torch::serialize::OutputArchive nested(archive.compilation_unit());
      fill_archive(nested, value, budget);
      archive.write(key, nested);
    } else if (!value.isNone()) {
      archive.write(key, with_types(value));
    }
  }
}

/// Returns the archive of `dict`, which shares its tensors.
inline torch::serialize::InputArchive archive_of(const c10::IValue& dict,
                                                 std::size_t most_keys = 10000) {
  torch::serialize::OutputArchive filled;
  std::size_t budget = most_keys * most_keys;
  fill_archive(filled, dict, budget);
  torch::serialize::InputArchive archive;
  module_in(archive) = module_in(filled);
  return archive;
}

/// Whether a dict is an optimizer's archive.
inline bool is_optimizer_archive(const c10::IValue& dict) {
  return item(item(dict, "param_groups"), "param_groups/size").isTensor();
}
/// Whether a dict is an optimizer's state as Python has it.
inline bool is_optimizer_state(const c10::IValue& dict) {
  return item(dict, "param_groups").isList() && item(dict, "state").isGenericDict();
}

inline c10::IValue numbered(const char* what, std::int64_t number) {
  return std::string(what) + "/" + std::to_string(number);
}

/// Returns `dict`, an archive's, with optimizers in Python's form, nested ones too. Parameters are
/// numbered, where libtorch has their addresses: the same state is always the same file.
inline c10::IValue python_form(const c10::IValue& dict) {
  if (!dict.isGenericDict()) return dict;
  PythonDict form = python_dict();
  for (const auto& entry : dict.toGenericDict()) {
    form.insert(entry.key(), python_form(entry.value()));
  }
  if (!is_optimizer_archive(dict)) return form;
  std::map<std::string, std::int64_t> numbers;
  auto groups = python_list();
  const c10::IValue saved_groups = item(dict, "param_groups");
  const auto size = [](const c10::IValue& value) { return value.toTensor().item<std::int64_t>(); };
  for (std::int64_t i = 0; i < size(item(saved_groups, "param_groups/size")); ++i) {
    const c10::IValue saved = item(saved_groups, numbered("param_groups", i));
    PythonDict group = python_dict();
    for (const auto& option : item(saved, "options").toGenericDict()) {
      group.insert(option.key(), option.value());
    }
    auto params = python_list();
    for (std::int64_t j = 0; j < size(item(saved, "params/size")); ++j) {
      const std::string id = item(saved, numbered("params", j)).toStringRef();
      params.push_back(numbers.emplace(id, numbers.size()).first->second);
    }
    group.insert("params", params);
    groups.push_back(group);
  }
  std::map<std::int64_t, c10::IValue> states;
  for (const auto& entry : item(dict, "state").toGenericDict()) {
    const auto number = numbers.find(entry.key().toStringRef());
    if (number == numbers.end()) continue;  // of a parameter that has left
    PythonDict state = python_dict();
    for (const auto& one : entry.value().toGenericDict()) {
      const bool is_step = one.key().toStringRef() == "step" && one.value().isInt();
      state.insert(one.key(), is_step ? at::scalar_tensor(one.value().toInt(), at::kFloat)
                                      : c10::IValue(one.value()));
    }
    states.emplace(number->second, state);
  }
  PythonDict state = python_dict();
  for (const auto& [number, one] : states) state.insert(number, one);
  form.insert_or_assign("state", state);
  form.insert_or_assign("param_groups", groups);
  return form;
}

/// Returns an option that Python saved, with integers and tensors converted to double: Python saves
/// `lr=1`, `momentum=0` and `betas=(0, 1)` as integers, and accepts a tensor as learning rate.
inline c10::IValue real_number(const c10::IValue& value) {
  if (value.isInt()) return static_cast<double>(value.toInt());
  if (value.isTensor()) return value.toTensor().item<double>();
  if (!value.isTuple()) return value;
  std::vector<c10::IValue> elements;
  for (const c10::IValue& one : value.toTupleRef().elements()) {
    elements.push_back(real_number(one));
  }
  return c10::ivalue::Tuple::create(std::move(elements));
}

/// The inverse of `python_form`.
inline c10::IValue archive_form(const c10::IValue& form) {
  if (!form.isGenericDict()) return form;
  PythonDict dict = python_dict();
  for (const auto& entry : form.toGenericDict()) {
    dict.insert(entry.key(), archive_form(entry.value()));
  }
  if (!is_optimizer_state(form)) return dict;
  const bool is_of_mezzo = !item(form, "pytorch_version").isNone();
  if (!is_of_mezzo) dict.insert("pytorch_version", "1.5.0");
  const auto& saved_groups = item(form, "param_groups").toListRef();
  const auto size = [](std::size_t count) {
    return at::scalar_tensor(static_cast<std::int64_t>(count), at::kLong);
  };
  std::map<std::int64_t, std::int64_t> numbers;  // from a parameter's id in the file to its index
  PythonDict groups = python_dict();
  groups.insert("param_groups/size", size(saved_groups.size()));
  for (const c10::IValue& saved : saved_groups) {
    const auto& params = item(saved, "params").toListRef();
    PythonDict group = python_dict(), options = python_dict();
    group.insert("params/size", size(params.size()));
    for (const c10::IValue& number : params) {
      const auto order = static_cast<std::int64_t>(numbers.size());
      const bool is_new = numbers.emplace(number.toInt(), order).second;
      check_format(is_new, "it has a parameter twice");
      group.insert(numbered("params", static_cast<std::int64_t>(group.size()) - 1),
                   std::to_string(order));
    }
    for (const auto& option : saved.toGenericDict()) {
      const c10::IValue& value = option.value();
      const bool is_option = !value.isNone() && !value.isGenericDict() && !value.isList();
      if (option.key().toStringRef() == "params" || !is_option) continue;
      options.insert(option.key(), is_of_mezzo ? c10::IValue(value) : real_number(value));
    }
    group.insert("options", options);
    groups.insert(numbered("param_groups", static_cast<std::int64_t>(groups.size()) - 1), group);
  }
  dict.insert_or_assign("param_groups", groups);
  PythonDict states = python_dict();
  for (const auto& entry : item(form, "state").toGenericDict()) {
    const auto number = numbers.find(entry.key().toInt());
    if (number == numbers.end()) continue;  // a state without a parameter
    PythonDict state = python_dict();
    for (const auto& one : entry.value().toGenericDict()) {
      const bool is_step = one.key().toStringRef() == "step" && one.value().isTensor();
      state.insert(one.key(), is_step ? one.value().toTensor().item<std::int64_t>()
                                      : c10::IValue(one.value()));
    }
    states.insert(std::to_string(number->second), state);
  }
  dict.insert_or_assign("state", states);
  return dict;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
