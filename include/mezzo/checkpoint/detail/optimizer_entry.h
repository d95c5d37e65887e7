#pragma once

#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/archive_conversion.h>
#include <mezzo/checkpoint/detail/stateful.h>
#include <mezzo/optim/detail/fused_optimizer_base.h>
#include <mezzo/optim/detail/optimizer_archive.h>
#include <mezzo/optim/optimizer_ref.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns a name such as "AdamW" or "MasterWeights of SGD".
inline std::string archive_class_name(const OptimizerRef& optimizer) {
  const torch::optim::Optimizer& stepped = optimizer.optimizer();
  std::string name = archive_class_name(stepped);
  const optim::MixedPrecisionOptimizer* const mixed_precision = optimizer.mixed_precision();
  if (mixed_precision == nullptr ||
      dynamic_cast<const torch::optim::Optimizer*>(mixed_precision) != nullptr) {
    return name;
  }
  return archive_class_name(c10::demangle(typeid(*mixed_precision).name())) + " of " + name;
}

/// Returns the weight storage of a mezzo optimizer; empty for one without 16-bit weights and for
/// other optimizers.
inline std::string weight_storage_name(const torch::optim::Optimizer& optimizer) {
  const auto* const fused = dynamic_cast<const FusedOptimizerBase*>(&optimizer);
  const auto& groups = optimizer.param_groups();
  const bool has_16bit_weights = std::any_of(groups.begin(), groups.end(), [](const auto& group) {
    return std::any_of(group.params().begin(), group.params().end(),
                       [](const at::Tensor& param) { return is_low_precision(param); });
  });
  constexpr std::array<const char*, 4> kNames{"plain", "fp32_master", "split_master",
                                              "stochastic_rounding"};
  return fused == nullptr || !has_16bit_weights
             ? ""
             : kNames.at(static_cast<std::size_t>(fused->weight_storage_options().weight_storage));
}

/// Returns the shape of a parameter, and its name if the state has its module: "[3, 2]
/// model.0.weight".
inline std::string parameter_signature(const at::Tensor& parameter, const ParameterFqns& names) {
  std::string sizes;
  for (const std::int64_t size : parameter.sizes()) {
    sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
  }
  const auto name = names.find(parameter.unsafeGetTensorImpl());
  return "[" + sizes + "]" + (name == names.end() ? "" : " " + name->second);
}

/// Returns whether two signatures have equal shapes and, if both have names, equal names.
inline bool are_compatible_signatures(std::string_view a, std::string_view b) {
  if (a.size() > b.size()) std::swap(a, b);
  return a == b || (b.starts_with(a) && a.ends_with(']'));
}

/// Checks a param group that Python saved.
inline void check_python_options(const c10::IValue& group, const std::string& name) {
  const c10::IValue decoupled = get_item(group, "decoupled_weight_decay"),
                    maximizes = get_item(group, "maximize");
  const bool is_adamw = decoupled.isBool() && decoupled.toBool();
  TORCH_CHECK(decoupled.isNone() || is_adamw == (name == "AdamW"),
              "class mismatch: ", is_adamw ? "AdamW" : "Adam", " in the checkpoint, ", name,
              " in the current state");
  TORCH_CHECK(!maximizes.isBool() || !maximizes.toBool(), name,
              " in C++ does not support maximize; negate the loss in Python");
}

/// Key of an archive of a custom layout, which is stored unchanged.
inline constexpr const char* kCustomArchiveKey = "archive";

/// Converts a saved value to the archive that the optimizer's `load` reads.
inline torch::serialize::InputArchive make_optimizer_archive(const c10::IValue& saved,
                                                             const OptimizerRef& optimizer) {
  const c10::IValue custom = get_item(saved, kCustomArchiveKey);
  std::size_t max_keys = custom.isNone() ? 1000 : 10000;  // plus one for each parameter
  for (const auto& group : optimizer.optimizer().param_groups()) max_keys += group.params().size();
  return dict_to_archive(to_archive_dict(custom.isNone() ? saved : custom), max_keys);
}

/// Returns the saved parameter signatures by group. For files that Python wrote they are the shapes
/// of moments, or empty strings.
inline std::vector<std::vector<std::string>> read_parameter_signatures(const c10::IValue& saved,
                                                                       const c10::IValue& inner) {
  std::vector<std::vector<std::string>> groups;
  const c10::IValue parameters = get_item(saved, "parameters");
  if (parameters.isList() && get_item(saved, "class").isString()) {
    for (const c10::IValue& group : parameters.toListRef()) {
      std::vector<std::string>& signatures = groups.emplace_back();
      for (const c10::IValue& param : group.toListRef()) signatures.push_back(param.toStringRef());
    }
    return groups;
  }
  for (const c10::IValue& group : get_item(inner, "param_groups").toListRef()) {
    std::vector<std::string>& signatures = groups.emplace_back();
    for (const c10::IValue& param_id : get_item(group, "params").toListRef()) {
      std::string& signature = signatures.emplace_back();
      const c10::IValue state = get_item(get_item(inner, "state"), param_id);
      for (const char* key : {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}) {
        const c10::IValue moment = get_item(state, key);
        if (moment.isTensor()) signature = parameter_signature(moment.toTensor(), {});
      }
    }
  }
  return groups;
}

/// Checks an optimizer state that mezzo or Python saved.
inline void check_optimizer(const c10::IValue& saved, const OptimizerRef& optimizer,
                            const ParameterFqns& names) {
  const bool is_custom = get_item(saved, kCustomArchiveKey).isGenericDict();
  const c10::IValue inner = is_optimizer_state(saved) ? saved : get_item(saved, "optimizer");
  check_type(is_custom || is_optimizer_state(inner), saved, "an optimizer's state");
  const c10::IValue saved_class = get_item(saved, "class");  // None for Python's files
  const std::string name = archive_class_name(optimizer);
  TORCH_CHECK(saved_class.isNone() || saved_class.toStringRef() == name,
              "class mismatch: ", saved_class.toStringRef(), " in the checkpoint, ", name,
              " in the current state. In C++: construct an optimizer of the saved class, or leave "
              "it out of the state, load with {.ignore_unexpected = true}, and reinitialize its "
              "moments");
  const auto saved_groups = read_parameter_signatures(saved, inner);
  const auto& groups = optimizer.optimizer().param_groups();
  TORCH_CHECK(saved_groups.size() == groups.size(),
              "loaded state dict has a different number of parameter groups: ", saved_groups.size(),
              " in the checkpoint, ", groups.size(), " in the current optimizer");
  for (std::size_t group = 0; group < groups.size(); ++group) {
    const std::vector<at::Tensor>& params = groups[group].params();
    TORCH_CHECK(saved_groups[group].size() == params.size(),
                "loaded state dict contains a parameter group that doesn't match the size of "
                "optimizer's group: group ",
                group, " has ", saved_groups[group].size(), " parameters in the checkpoint, ",
                params.size(), " in the current optimizer");
    if (saved_class.isNone()) {
      check_python_options(get_item(inner, "param_groups").toListRef()[group], name);
    }
    for (std::size_t i = 0; i < params.size(); ++i) {
      const std::string &saved_param = saved_groups[group][i],
                        param = parameter_signature(params[i], names);
      TORCH_CHECK(saved_param.empty() || are_compatible_signatures(saved_param, param),
                  "size mismatch for parameter ", i, " of group ", group, ": ", saved_param,
                  " in the checkpoint, ", param,
                  " in the current optimizer (parameters must be in the order and groups in which "
                  "they were saved)");
    }
  }
  if (!saved_class.isNone()) {
    const std::string& saved_storage = get_item(saved, "weight_storage").toStringRef();
    const std::string storage = weight_storage_name(optimizer.optimizer());
    TORCH_CHECK(saved_storage == storage || saved_storage.empty() || storage.empty() ||
                    saved_storage == "plain",
                "weight storage mismatch: ", saved_storage, " in the checkpoint, ", storage,
                " in the current optimizer");
  }
  auto archive = make_optimizer_archive(saved, optimizer);
  if (const auto* const checker =
          dynamic_cast<const optim::ArchiveChecker*>(optimizer.mixed_precision())) {
    checker->check_load(archive);  // MasterWeights is not a torch::optim::Optimizer
  } else {
    check_load(archive, optimizer.optimizer());
  }
}

/// Saves and loads the optimizer that `find` returns at that time, as Python's state_dict with
/// three more keys:
///
///     {"state": ..., "param_groups": ..., "class": "AdamW", "weight_storage": "split_master",
///      "parameters": [["[3, 2] model.0.weight", "[3] model.0.bias"]]}
MEZZO_INLINE Stateful make_stateful_optimizer(const std::function<OptimizerRef()>& find) {
  (void)find();  // throws for a null pointer
  Stateful stateful;
  stateful.save = [find](const ParameterFqns& names) {
    const c10::NoGradGuard no_grad;
    const OptimizerRef optimizer = find();
    torch::serialize::OutputArchive archive;
    optimizer.save(archive);
    PythonDict value = to_python_state_dict(archive_to_dict(get_module(archive))).toGenericDict();
    const std::string name = archive_class_name(optimizer);
    // A ShardedOptimizer writes nothing on ranks other than 0.
    const bool is_sharded = dynamic_cast<optim::ShardedOptimizerTag*>(&optimizer.optimizer());
    TORCH_CHECK(!value.empty() || is_sharded, name,
                "::save wrote nothing, so that its state would be lost; implement save and load as "
                "torch::optim's optimizers do, or add the state by two callables (add(name, save, "
                "load))");
    if (!is_sharded && !is_optimizer_state(value) &&
        !is_optimizer_state(get_item(value, "optimizer"))) {
      PythonDict custom = make_dict();
      custom.insert(kCustomArchiveKey, value);
      value = custom;
    }
    auto groups = make_list();
    for (const auto& group : optimizer.optimizer().param_groups()) {
      auto parameters = make_list();
      for (const at::Tensor& parameter : group.params()) {
        parameters.push_back(parameter_signature(parameter, names));
      }
      groups.push_back(parameters);
    }
    value.insert_or_assign("class", name);
    value.insert_or_assign("weight_storage", weight_storage_name(optimizer.optimizer()));
    value.insert_or_assign("parameters", groups);
    return c10::IValue(value);
  };
  stateful.load = [find](const c10::IValue& saved,
                         const ParameterFqns& names) -> Stateful::ApplyFn {
    check_optimizer(saved, find(), names);
    return [optimizer = find(), saved] {
      std::vector<c10::Device> devices;  // empty if the optimizer moves its state itself
      const bool is_sharded = dynamic_cast<optim::ShardedOptimizerTag*>(&optimizer.optimizer());
      for (const auto& group : optimizer.optimizer().param_groups()) {
        for (const at::Tensor& param : group.params()) {
          if (!is_sharded) devices.push_back(param.device());
        }
      }
      auto archive = make_optimizer_archive(copy_to_devices(saved, devices), optimizer);
      if (optimizer.mixed_precision() != nullptr) {
        optimizer.load(archive);
      } else {
        load_atomically(archive, optimizer.optimizer());
      }
    };
  };
  return stateful;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
