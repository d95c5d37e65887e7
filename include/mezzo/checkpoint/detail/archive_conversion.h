#pragma once

#include <mezzo/base/detail/private_member.h>
#include <mezzo/base/tensors_by_name.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/stateful.h>
#include <mezzo/checkpoint/detail/zip_directory.h>

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <vector>

// Converts torch archives to dicts that Python reads, and back. The contents of an archive are in a
// private member; the public save_to writes TorchScript with a copy of every tensor, which
// torch.load(weights_only=True) does not read.
//
// The archive of an optimizer becomes Python's state_dict:
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

/// An empty list, which would lose its element type, is stored as {"empty_list_of": "int"}.
inline constexpr const char* kEmptyListKey = "empty_list_of";

/// Converts typed lists to untyped ones, which Python reads.
inline c10::IValue erase_list_types(const c10::IValue& value) {
  TORCH_CHECK(!value.isGenericDict(),
              "it writes a dict to its archive; write a nested archive instead");
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

/// Inverse of `erase_list_types`: the first element determines the type. An empty list becomes a
/// list of tensors.
inline c10::IValue restore_list_types(const c10::IValue& value) {
  for (const c10::TypePtr& type : std::initializer_list<c10::TypePtr>{
           c10::IntType::get(), c10::FloatType::get(), c10::BoolType::get(), c10::StringType::get(),
           c10::AnyType::get()}) {
    const c10::IValue name = get_item(value, kEmptyListKey);
    if (name.isString() && name.toStringRef() == type->str()) return c10::impl::GenericList(type);
  }
  if (!value.isList()) return value;
  std::vector<c10::IValue> elements;
  for (const c10::IValue& element : value.toListRef()) {
    elements.push_back(restore_list_types(element));
  }
  c10::impl::GenericList list(elements.empty() ? c10::TypePtr(c10::TensorType::get())
                                               : elements.front().type());
  for (const c10::IValue& element : elements) list.push_back(element);
  return list;
}

/// Returns the contents of an archive as a dict; nested archives become nested dicts.
inline c10::IValue archive_to_dict(const torch::jit::Module& archive) {
  PythonDict dict = make_dict();
  for (const auto& [name, value] : archive.named_attributes(/*recurse=*/false)) {
    dict.insert(name,
                value.isModule() ? archive_to_dict(value.toModule()) : erase_list_types(value));
  }
  return dict;
}

/// Inverse of `archive_to_dict`. Adding an entry to an archive takes time linear in its size.
/// \param budget  limit of the sum of squared dict sizes; decreased by what was used
/// \throws c10::Error if the limit is exceeded
inline void fill_archive(torch::serialize::OutputArchive& archive, const c10::IValue& dict,
                         std::size_t& budget) {
  const std::size_t size = dict.toGenericDict().size();
  check_format(size < (std::size_t{1} << 20) && size * size <= budget,
               "one of its objects has too many entries");
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

/// Returns an archive that shares the tensors of `dict`.
inline torch::serialize::InputArchive dict_to_archive(const c10::IValue& dict,
                                                      std::size_t max_keys = 10000) {
  torch::serialize::OutputArchive filled;
  std::size_t budget = max_keys * max_keys;
  fill_archive(filled, dict, budget);
  torch::serialize::InputArchive archive;
  get_module(archive) = get_module(filled);
  return archive;
}

inline bool is_optimizer_archive(const c10::IValue& dict) {
  return get_item(get_item(dict, "param_groups"), "param_groups/size").isTensor();
}
/// Returns whether a dict is an optimizer's state_dict in Python's layout.
inline bool is_optimizer_state(const c10::IValue& dict) {
  return get_item(dict, "param_groups").isList() && get_item(dict, "state").isGenericDict();
}

inline c10::IValue indexed_key(const char* key, std::int64_t index) {
  return std::string(key) + "/" + std::to_string(index);
}

/// Converts an archive's dict to Python's layout: optimizers, nested ones too, become state_dicts.
/// Parameters are identified by index, because the addresses in libtorch's archives differ between
/// saves of the same state.
inline c10::IValue to_python_state_dict(const c10::IValue& dict) {
  if (!dict.isGenericDict()) return dict;
  PythonDict state_dict = make_dict();
  for (const auto& entry : dict.toGenericDict()) {
    state_dict.insert(entry.key(), to_python_state_dict(entry.value()));
  }
  if (!is_optimizer_archive(dict)) return state_dict;
  std::map<std::string, std::int64_t> param_indices;
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
      params.push_back(param_indices.emplace(id, param_indices.size()).first->second);
    }
    group.insert("params", params);
    groups.push_back(group);
  }
  std::map<std::int64_t, c10::IValue> states;
  for (const auto& entry : get_item(dict, "state").toGenericDict()) {
    const auto index = param_indices.find(entry.key().toStringRef());
    if (index == param_indices.end()) continue;  // the parameter is no longer in a group
    PythonDict state = make_dict();
    for (const auto& item : entry.value().toGenericDict()) {
      const bool is_step = item.key().toStringRef() == "step" && item.value().isInt();
      state.insert(item.key(), is_step ? at::scalar_tensor(item.value().toInt(), at::kFloat)
                                       : c10::IValue(item.value()));
    }
    states.emplace(index->second, state);
  }
  PythonDict state = make_dict();
  for (const auto& [index, param_state] : states) state.insert(index, param_state);
  state_dict.insert_or_assign("state", state);
  state_dict.insert_or_assign("param_groups", groups);
  return state_dict;
}

/// Converts integers and tensors of an option that Python saved to double: Python saves `lr=1`,
/// `momentum=0` and `betas=(0, 1)` as integers, and a learning rate may be a tensor.
inline c10::IValue convert_to_double(const c10::IValue& value) {
  if (value.isInt()) return static_cast<double>(value.toInt());
  if (value.isTensor()) return value.toTensor().item<double>();
  if (!value.isTuple()) return value;
  std::vector<c10::IValue> elements;
  for (const c10::IValue& element : value.toTupleRef().elements()) {
    elements.push_back(convert_to_double(element));
  }
  return c10::ivalue::Tuple::create(std::move(elements));
}

/// Inverse of `to_python_state_dict`.
inline c10::IValue to_archive_dict(const c10::IValue& state_dict) {
  if (!state_dict.isGenericDict()) return state_dict;
  PythonDict dict = make_dict();
  for (const auto& entry : state_dict.toGenericDict()) {
    dict.insert(entry.key(), to_archive_dict(entry.value()));
  }
  if (!is_optimizer_state(state_dict)) return dict;
  const bool is_from_mezzo = !get_item(state_dict, "pytorch_version").isNone();
  if (!is_from_mezzo) dict.insert("pytorch_version", "1.5.0");
  const auto& saved_groups = get_item(state_dict, "param_groups").toListRef();
  const auto to_tensor = [](std::size_t size) {
    return at::scalar_tensor(static_cast<std::int64_t>(size), at::kLong);
  };
  std::map<std::int64_t, std::int64_t> param_indices;  // by the id in the checkpoint
  PythonDict groups = make_dict();
  groups.insert("param_groups/size", to_tensor(saved_groups.size()));
  for (const c10::IValue& saved : saved_groups) {
    const auto& params = get_item(saved, "params").toListRef();
    PythonDict group = make_dict(), options = make_dict();
    group.insert("params/size", to_tensor(params.size()));
    for (const c10::IValue& id : params) {
      const auto index = static_cast<std::int64_t>(param_indices.size());
      const bool is_new = param_indices.emplace(id.toInt(), index).second;
      check_format(is_new, "some parameters appear in more than one parameter group");
      group.insert(indexed_key("params", static_cast<std::int64_t>(group.size()) - 1),
                   std::to_string(index));
    }
    for (const auto& option : saved.toGenericDict()) {
      const c10::IValue& value = option.value();
      const bool is_option = !value.isNone() && !value.isGenericDict() && !value.isList();
      if (option.key().toStringRef() == "params" || !is_option) continue;
      options.insert(option.key(), is_from_mezzo ? c10::IValue(value) : convert_to_double(value));
    }
    group.insert("options", options);
    groups.insert(indexed_key("param_groups", static_cast<std::int64_t>(groups.size()) - 1), group);
  }
  dict.insert_or_assign("param_groups", groups);
  PythonDict states = make_dict();
  for (const auto& entry : get_item(state_dict, "state").toGenericDict()) {
    const auto index = param_indices.find(entry.key().toInt());
    if (index == param_indices.end()) continue;  // a state without a parameter
    PythonDict state = make_dict();
    for (const auto& item : entry.value().toGenericDict()) {
      const bool is_step = item.key().toStringRef() == "step" && item.value().isTensor();
      state.insert(item.key(), is_step ? item.value().toTensor().item<std::int64_t>()
                                       : c10::IValue(item.value()));
    }
    states.insert(std::to_string(index->second), state);
  }
  dict.insert_or_assign("state", states);
  return dict;
}

/// Copies of tensors, by the memory_key of the originals.
using TensorCopies = std::map<std::string, at::Tensor>;

/// Copies a value: an optimizer's state of parameter i to `param_devices[i]`, other tensors to
/// `device`. If `copies` is not null, equal tensors of the same memory (tied weights) share a copy.
inline c10::IValue copy_to_devices(const c10::IValue& value,
                                   const std::vector<c10::Device>& param_devices = {},
                                   c10::Device device = at::kCPU, TensorCopies* copies = nullptr) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    const bool is_shared = copies != nullptr && tensor.layout() == at::kStrided &&
                           !tensor.is_conj() && !tensor.is_neg();
    at::Tensor unshared, &copy = is_shared ? (*copies)[memory_key(tensor)] : unshared;
    if (!copy.defined()) copy = tensor.to(device, /*non_blocking=*/false, /*copy=*/true);
    return copy;
  }
  if (value.isList() || value.isTuple()) {
    auto list = make_list();
    for (const c10::IValue& element :
         value.isList() ? value.toListRef() : value.toTupleRef().elements().asArrayRef()) {
      list.push_back(copy_to_devices(element, param_devices, device, copies));
    }
    return value.isList() ? c10::IValue(list) : c10::ivalue::Tuple::create(list.vec());
  }
  if (!value.isGenericDict()) return value;
  PythonDict dict = make_dict();
  for (const auto& entry : value.toGenericDict()) {
    const auto index = static_cast<std::size_t>(entry.key().isInt() ? entry.key().toInt() : -1);
    const bool is_state = index < param_devices.size();  // {0: {"exp_avg": ...}}
    dict.insert(entry.key(), copy_to_devices(entry.value(), param_devices,
                                             is_state ? param_devices[index] : device, copies));
  }
  return dict;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
