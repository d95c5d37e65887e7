#pragma once

#include <mezzo/base/detail/private_member.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/stateful.h>
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

struct OutputArchiveModule {
  friend constexpr auto private_member(OutputArchiveModule);
};
template struct PrivateMember<OutputArchiveModule, &torch::serialize::OutputArchive::module_>;

struct InputArchiveModule {
  friend constexpr auto private_member(InputArchiveModule);
};
template struct PrivateMember<InputArchiveModule, &torch::serialize::InputArchive::module_>;

inline torch::jit::Module& get_module(torch::serialize::OutputArchive& archive) {
  return archive.*private_member(OutputArchiveModule());
}
inline torch::jit::Module& get_module(torch::serialize::InputArchive& archive) {
  return archive.*private_member(InputArchiveModule());
}

/// Stands for a list without elements, which would lose their type: {"empty_list_of": "int"}.
inline constexpr const char* kEmptyListKey = "empty_list_of";

/// Returns `value` without the element types of its lists, which Python does not read.
inline c10::IValue erase_list_types(const c10::IValue& value) {
  TORCH_CHECK(!value.isGenericDict(),
              "it writes a dict to its archive; let it write a nested archive");
  if (!value.isList()) return value;
  if (value.toListRef().empty() && !value.isTensorList()) {
    PythonDict empty = make_dict();
    empty.insert(kEmptyListKey, value.toList().elementType()->str());
    return empty;
  }
  auto list = make_list();
  for (const c10::IValue& element : value.toListRef()) list.push_back(erase_list_types(element));
  return list;
}

/// The inverse of `erase_list_types`: the first element has the type, and an empty list is of
/// tensors.
inline c10::IValue restore_list_types(const c10::IValue& value) {
  for (const c10::TypePtr& type : std::initializer_list<c10::TypePtr>{
           c10::IntType::get(), c10::FloatType::get(), c10::BoolType::get(), c10::StringType::get(),
           c10::AnyType::get()}) {
    const c10::IValue name = get_item(value, kEmptyListKey);
    if (name.isString() && name.toStringRef() == type->str()) return c10::impl::GenericList(type);
  }
  if (!value.isList()) return value;
  std::vector<c10::IValue> elements;
  for (const c10::IValue& one : value.toListRef()) elements.push_back(restore_list_types(one));
  c10::impl::GenericList list(elements.empty() ? c10::TypePtr(c10::TensorType::get())
                                               : elements.front().type());
  for (const c10::IValue& one : elements) list.push_back(one);
  return list;
}

/// Returns an archive's contents as a dict, with a dict for each nested archive.
inline c10::IValue archive_to_dict(const torch::jit::Module& archive) {
  PythonDict dict = make_dict();
  for (const auto& [name, value] : archive.named_attributes(/*recurse=*/false)) {
    dict.insert(name,
                value.isModule() ? archive_to_dict(value.toModule()) : erase_list_types(value));
  }
  return dict;
}

/// Writes what `archive_to_dict` returned. Adding an entry to an archive takes time linear in its
/// size. \param budget  the time for this dict and nested ones: the sum of the squares of their
/// sizes
/// \throws c10::Error for more
inline void fill_archive(torch::serialize::OutputArchive& archive, const c10::IValue& dict,
                         std::size_t& budget) {
  const std::size_t size = dict.toGenericDict().size();
  check_format(size < (std::size_t{1} << 20) && size * size <= budget,
               "an object of it has too many entries");
  budget -= size * size;
  for (const auto& entry : dict.toGenericDict()) {
    TORCH_CHECK(entry.key().isString(), "it has a key that is ", describe_type(entry.key()));
    const std::string& key = entry.key().toStringRef();
    const c10::IValue& value = entry.value();
    if (value.isTensor()) {
      archive.write(key, value.toTensor(), /*is_buffer=*/true);
    } else if (value.isGenericDict() && get_item(value, kEmptyListKey).isNone()) {
      torch::serialize::OutputArchive nested(archive.compilation_unit());
      fill_archive(nested, value, budget);
      archive.write(key, nested);
    } else if (!value.isNone()) {
      archive.write(key, restore_list_types(value));
    }
  }
}

/// Returns the archive of `dict`, which shares its tensors.
inline torch::serialize::InputArchive dict_to_archive(const c10::IValue& dict,
                                                      std::size_t most_keys = 10000) {
  torch::serialize::OutputArchive filled;
  std::size_t budget = most_keys * most_keys;
  fill_archive(filled, dict, budget);
  torch::serialize::InputArchive archive;
  get_module(archive) = get_module(filled);
  return archive;
}

/// Whether a dict is an optimizer's archive.
inline bool is_optimizer_archive(const c10::IValue& dict) {
  return get_item(get_item(dict, "param_groups"), "param_groups/size").isTensor();
}
/// Whether a dict is an optimizer's state as Python has it.
inline bool is_optimizer_state(const c10::IValue& dict) {
  return get_item(dict, "param_groups").isList() && get_item(dict, "state").isGenericDict();
}

inline c10::IValue indexed_key(const char* what, std::int64_t number) {
  return std::string(what) + "/" + std::to_string(number);
}

/// Returns `dict`, an archive's, with optimizers in Python's form, nested ones too. Parameters are
/// numbered, where libtorch has their addresses: the same state is always the same file.
inline c10::IValue to_python_state_dict(const c10::IValue& dict) {
  if (!dict.isGenericDict()) return dict;
  PythonDict form = make_dict();
  for (const auto& entry : dict.toGenericDict()) {
    form.insert(entry.key(), to_python_state_dict(entry.value()));
  }
  if (!is_optimizer_archive(dict)) return form;
  std::map<std::string, std::int64_t> numbers;
  auto groups = make_list();
  const c10::IValue saved_groups = get_item(dict, "param_groups");
  const auto size = [](const c10::IValue& value) { return value.toTensor().item<std::int64_t>(); };
  for (std::int64_t i = 0; i < size(get_item(saved_groups, "param_groups/size")); ++i) {
    const c10::IValue saved = get_item(saved_groups, indexed_key("param_groups", i));
    PythonDict group = make_dict();
    for (const auto& option : get_item(saved, "options").toGenericDict()) {
      group.insert(option.key(), option.value());
    }
    auto params = make_list();
    for (std::int64_t j = 0; j < size(get_item(saved, "params/size")); ++j) {
      const std::string id = get_item(saved, indexed_key("params", j)).toStringRef();
      params.push_back(numbers.emplace(id, numbers.size()).first->second);
    }
    group.insert("params", params);
    groups.push_back(group);
  }
  std::map<std::int64_t, c10::IValue> states;
  for (const auto& entry : get_item(dict, "state").toGenericDict()) {
    const auto number = numbers.find(entry.key().toStringRef());
    if (number == numbers.end()) continue;  // of a parameter that has left
    PythonDict state = make_dict();
    for (const auto& one : entry.value().toGenericDict()) {
      const bool is_step = one.key().toStringRef() == "step" && one.value().isInt();
      state.insert(one.key(), is_step ? at::scalar_tensor(one.value().toInt(), at::kFloat)
                                      : c10::IValue(one.value()));
    }
    states.emplace(number->second, state);
  }
  PythonDict state = make_dict();
  for (const auto& [number, one] : states) state.insert(number, one);
  form.insert_or_assign("state", state);
  form.insert_or_assign("param_groups", groups);
  return form;
}

/// Returns an option that Python saved, with integers and tensors converted to double: Python saves
/// `lr=1`, `momentum=0` and `betas=(0, 1)` as integers, and accepts a tensor as learning rate.
inline c10::IValue convert_to_double(const c10::IValue& value) {
  if (value.isInt()) return static_cast<double>(value.toInt());
  if (value.isTensor()) return value.toTensor().item<double>();
  if (!value.isTuple()) return value;
  std::vector<c10::IValue> elements;
  for (const c10::IValue& one : value.toTupleRef().elements()) {
    elements.push_back(convert_to_double(one));
  }
  return c10::ivalue::Tuple::create(std::move(elements));
}

/// The inverse of `to_python_state_dict`.
inline c10::IValue to_archive_dict(const c10::IValue& form) {
  if (!form.isGenericDict()) return form;
  PythonDict dict = make_dict();
  for (const auto& entry : form.toGenericDict()) {
    dict.insert(entry.key(), to_archive_dict(entry.value()));
  }
  if (!is_optimizer_state(form)) return dict;
  const bool is_of_mezzo = !get_item(form, "pytorch_version").isNone();
  if (!is_of_mezzo) dict.insert("pytorch_version", "1.5.0");
  const auto& saved_groups = get_item(form, "param_groups").toListRef();
  const auto size = [](std::size_t count) {
    return at::scalar_tensor(static_cast<std::int64_t>(count), at::kLong);
  };
  std::map<std::int64_t, std::int64_t> numbers;  // from a parameter's id in the file to its index
  PythonDict groups = make_dict();
  groups.insert("param_groups/size", size(saved_groups.size()));
  for (const c10::IValue& saved : saved_groups) {
    const auto& params = get_item(saved, "params").toListRef();
    PythonDict group = make_dict(), options = make_dict();
    group.insert("params/size", size(params.size()));
    for (const c10::IValue& number : params) {
      const auto order = static_cast<std::int64_t>(numbers.size());
      const bool is_new = numbers.emplace(number.toInt(), order).second;
      check_format(is_new, "it has a parameter twice");
      group.insert(indexed_key("params", static_cast<std::int64_t>(group.size()) - 1),
                   std::to_string(order));
    }
    for (const auto& option : saved.toGenericDict()) {
      const c10::IValue& value = option.value();
      const bool is_option = !value.isNone() && !value.isGenericDict() && !value.isList();
      if (option.key().toStringRef() == "params" || !is_option) continue;
      options.insert(option.key(), is_of_mezzo ? c10::IValue(value) : convert_to_double(value));
    }
    group.insert("options", options);
    groups.insert(indexed_key("param_groups", static_cast<std::int64_t>(groups.size()) - 1), group);
  }
  dict.insert_or_assign("param_groups", groups);
  PythonDict states = make_dict();
  for (const auto& entry : get_item(form, "state").toGenericDict()) {
    const auto number = numbers.find(entry.key().toInt());
    if (number == numbers.end()) continue;  // a state without a parameter
    PythonDict state = make_dict();
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
