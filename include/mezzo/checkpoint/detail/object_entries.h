#pragma once

#include <mezzo/base/detail/describe.h>
#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/detail/rng_state.h>
#include <mezzo/base/tensors_by_name.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/archive_conversion.h>
#include <mezzo/checkpoint/detail/stateful.h>
#include <mezzo/optim/detail/fused_optimizer_base.h>
#include <mezzo/optim/detail/optimizer_archive.h>
#include <mezzo/optim/optimizer_ref.h>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/Type.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns the tensor to be written: a view is copied, so that only its own elements are saved.
inline at::Tensor detach_for_saving(const at::Tensor& tensor) {
  const at::Tensor detached = tensor.detach();
  const bool is_whole =
      detached.layout() != at::kStrided || detached.storage().nbytes() == detached.nbytes();
  return is_whole ? detached : detached.clone();
}

// --- Modules, and tensors whose memory stays -----------------------------------------------------

/// Returns the tensors of a module under the names that Python's `state_dict` gives them.
inline TensorsByName get_state_dict(const torch::nn::Module& module) {
  TensorsByName tensors = module.named_parameters().pairs();
  const TensorsByName buffers = module.named_buffers().pairs();
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  std::erase_if(tensors, [](const auto& one) { return !one.second.defined(); });
  return tensors;
}

inline std::string describe_dtype_and_shape(const at::Tensor& tensor) {
  return c10::str(dtype_name(tensor.scalar_type()), " ", tensor.sizes());
}

/// Checks that the file has the names, dtypes and shapes of `own`. Returns the file's values.
inline std::vector<at::Tensor> check_state_dict(const c10::IValue& value,
                                                const TensorsByName& own) {
  check_value(value.isGenericDict(), value, "a module's state_dict");
  const auto found = value.toGenericDict();
  std::vector<at::Tensor> values;
  for (const auto& [name, tensor] : own) {
    TORCH_CHECK(found.contains(name), "the file lacks \"", name, "\"");
    const c10::IValue saved = found.at(name);
    TORCH_CHECK(saved.isTensor(), "\"", name, "\" is ", describe_type(saved), " in the file");
    const at::Tensor read = saved.toTensor();
    TORCH_CHECK(read.scalar_type() == tensor.scalar_type() && read.sizes() == tensor.sizes(), "\"",
                name, "\" is ", describe_dtype_and_shape(read), " in the file, and ",
                describe_dtype_and_shape(tensor), " here");
    TORCH_CHECK(read.layout() == tensor.layout(), "\"", name, "\" is ", read.layout(),
                " in the file, and ", tensor.layout(), " here");
    values.push_back(read);
  }
  if (found.size() <= own.size()) return values;
  std::set<std::string> extra;
  for (const auto& entry : found) {
    extra.insert(entry.key().isString() ? entry.key().toStringRef() : "a number");
  }
  for (const auto& [name, tensor] : own) extra.erase(name);
  for (const std::string& name : extra) {
    TORCH_CHECK(false, "the file has \"", name, "\", which is not here");
  }
  return values;
}

/// The part of tensors that `tensors` returns. Loading copies into their memory.
inline Stateful make_stateful_named_tensors(const std::function<TensorsByName()>& tensors) {
  return {.save =
              [tensors](const ParameterFqns&) {
                PythonDict values = make_dict();
                for (const auto& [name, tensor] : tensors())
                  values.insert(name, detach_for_saving(tensor));
                return c10::IValue(values);
              },
          .load = [tensors](const c10::IValue& value, const ParameterFqns&) -> Stateful::Apply {
            auto own = tensors();
            auto values = check_state_dict(value, own);
            return [own = std::move(own), values = std::move(values)] {
              for (std::size_t i = 0; i < own.size(); ++i) own[i].second.copy_(values[i]);
            };
          }};
}

/// The part of the module that `find` returns when a checkpoint is saved or loaded.
MEZZO_INLINE Stateful
make_stateful_module(const std::function<std::shared_ptr<torch::nn::Module>()>& find) {
  const auto module = [find] {
    auto found = find();
    TORCH_CHECK(found != nullptr,
                "TrainingState::add: the module holder is empty; construct the module before it "
                "is added");
    return found;
  };
  module();
  Stateful stateful = make_stateful_named_tensors([module] { return get_state_dict(*module()); });
  stateful.parameters = [module] { return module()->named_parameters().pairs(); };
  stateful.state_dict = [module] { return get_state_dict(*module()); };
  return stateful;
}

MEZZO_INLINE Stateful make_stateful_tensors(std::vector<at::Tensor>& tensors) {
  return make_stateful_named_tensors([&tensors] {
    TensorsByName all;
    for (const at::Tensor& one : tensors) {
      const std::string name = std::to_string(all.size());
      TORCH_CHECK(one.defined(), "tensor ", name, " is undefined; give it a value first");
      all.emplace_back(name, one);
    }
    return all;
  });
}

// --- Optimizers --------------------------------------------------------------------------------

/// Returns a name such as "AdamW" or "MasterWeights of SGD".
inline std::string archive_class_name(const OptimizerRef& optimizer) {
  const torch::optim::Optimizer& stepped = optimizer.optimizer();
  std::string name = archive_class_name(stepped);
  const optim::MixedPrecisionOptimizer* const fused = optimizer.mixed_precision();
  if (fused == nullptr || dynamic_cast<const torch::optim::Optimizer*>(fused) != nullptr) {
    return name;
  }
  return archive_class_name(c10::demangle(typeid(*fused).name())) + " of " + name;
}

/// Returns how an optimizer of mezzo's keeps its 16-bit weights; empty for one without, and for
/// other optimizers.
inline std::string weight_storage_name(const torch::optim::Optimizer& optimizer) {
  const auto* const fused = dynamic_cast<const FusedOptimizerBase*>(&optimizer);
  const auto& groups = optimizer.param_groups();
  const bool has_low = std::any_of(groups.begin(), groups.end(), [](const auto& group) {
    return std::any_of(group.params().begin(), group.params().end(),
                       [](const at::Tensor& one) { return is_low_precision(one); });
  });
  constexpr std::array<const char*, 4> kNames{"plain", "fp32_master", "split_master",
                                              "stochastic_rounding"};
  return fused == nullptr || !has_low
             ? ""
             : kNames.at(static_cast<std::size_t>(fused->weight_storage_options().weight_storage));
}

/// Returns the shape of a parameter and, if the state has its module, the first of its names:
/// "[3, 2] model.0.weight".
inline std::string parameter_signature(const at::Tensor& parameter, const ParameterFqns& names) {
  std::string words;
  for (const std::int64_t size : parameter.sizes()) {
    words += (words.empty() ? "" : ", ") + std::to_string(size);
  }
  const auto known = names.find(parameter.unsafeGetTensorImpl());
  return "[" + words + "]" + (known == names.end() ? "" : " " + known->second);
}

/// Whether two parameters have the same shape and, where both have one, the same name.
inline bool are_compatible_signatures(std::string_view a, std::string_view b) {
  if (a.size() > b.size()) std::swap(a, b);
  return a == b || (b.starts_with(a) && a.ends_with(']'));
}

/// Checks the options of a group of Python's against the optimizer.
inline void check_python_options(const c10::IValue& group, const std::string& name) {
  const c10::IValue decoupled = get_item(group, "decoupled_weight_decay"),
                    maximizes = get_item(group, "maximize");
  const bool is_adamw = decoupled.isBool() && decoupled.toBool();
  TORCH_CHECK(decoupled.isNone() || is_adamw == (name == "AdamW"), "it is the state of ",
              is_adamw ? "AdamW" : "Adam", " in the file, and of ", name, " here");
  TORCH_CHECK(!maximizes.isBool() || !maximizes.toBool(), name,
              " in C++ does not maximize; negate the loss in Python");
}

/// The key of an archive that does not have the layout of torch::optim's; stored unchanged.
inline constexpr const char* kCustomArchiveKey = "archive";

/// Returns the archive that an optimizer's `load` takes, from a file's value.
inline torch::serialize::InputArchive optimizer_archive(const c10::IValue& saved,
                                                        const OptimizerRef& optimizer) {
  const c10::IValue own = get_item(saved, kCustomArchiveKey);
  std::size_t most_keys = own.isNone() ? 1000 : 10000;  // and one for each parameter
  for (const auto& group : optimizer.optimizer().param_groups()) most_keys += group.params().size();
  return dict_to_archive(to_archive_dict(own.isNone() ? saved : own), most_keys);
}

/// Returns a description of each parameter of an optimizer in the file, by group:
/// parameter_signature in mezzo's files; in Python's the shape of a moment, or an empty string.
inline std::vector<std::vector<std::string>> read_parameter_signatures(const c10::IValue& saved,
                                                                       const c10::IValue& inner) {
  std::vector<std::vector<std::string>> groups;
  const c10::IValue words = get_item(saved, "parameters");
  if (words.isList() && get_item(saved, "class").isString()) {
    for (const c10::IValue& group : words.toListRef()) {
      std::vector<std::string>& all = groups.emplace_back();
      for (const c10::IValue& one : group.toListRef()) all.push_back(one.toStringRef());
    }
    return groups;
  }
  for (const c10::IValue& group : get_item(inner, "param_groups").toListRef()) {
    std::vector<std::string>& all = groups.emplace_back();
    for (const c10::IValue& number : get_item(group, "params").toListRef()) {
      std::string& one = all.emplace_back();
      const c10::IValue state = get_item(get_item(inner, "state"), number);
      for (const char* key : {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}) {
        const c10::IValue moment = get_item(state, key);
        if (moment.isTensor()) one = parameter_signature(moment.toTensor(), {});
      }
    }
  }
  return groups;
}

/// Checks a file's state of an optimizer, of mezzo's or Python's, against the optimizer.
inline void check_optimizer(const c10::IValue& saved, const OptimizerRef& any,
                            const ParameterFqns& names) {
  const bool has_own_archive = get_item(saved, kCustomArchiveKey).isGenericDict();
  const c10::IValue inner = is_optimizer_state(saved) ? saved : get_item(saved, "optimizer");
  check_value(has_own_archive || is_optimizer_state(inner), saved, "an optimizer's state");
  const c10::IValue class_of_saved = get_item(saved, "class");  // Python's has none
  const std::string name = archive_class_name(any);
  TORCH_CHECK(class_of_saved.isNone() || class_of_saved.toStringRef() == name,
              "it is of the class ", class_of_saved.toStringRef(), " in the file, and ", name,
              " here. In C++: make the optimizer as it was saved, or leave it out of the state, "
              "load with {.ignore_unexpected = true}, and begin its moments anew");
  const auto groups = read_parameter_signatures(saved, inner);
  const auto& own = any.optimizer().param_groups();
  TORCH_CHECK(groups.size() == own.size(), "it has ", groups.size(), " groups in the file, and ",
              own.size(), " here");
  for (std::size_t group = 0; group < own.size(); ++group) {
    const std::vector<at::Tensor>& params = own[group].params();
    TORCH_CHECK(groups[group].size() == params.size(), "group ", group, " has ",
                groups[group].size(), " parameters in the file, and ", params.size(), " here");
    if (class_of_saved.isNone()) {
      check_python_options(get_item(inner, "param_groups").toListRef()[group], name);
    }
    for (std::size_t i = 0; i < params.size(); ++i) {
      const std::string &there = groups[group][i], here = parameter_signature(params[i], names);
      TORCH_CHECK(there.empty() || are_compatible_signatures(there, here), "parameter ", i,
                  " of group ", group, " is ", there, " in the file, and ", here,
                  " here (parameters need the order and the groups that they were saved with)");
    }
  }
  if (!class_of_saved.isNone()) {
    const std::string& storage = get_item(saved, "weight_storage").toStringRef();
    const std::string own_storage = weight_storage_name(any.optimizer());
    TORCH_CHECK(
        storage == own_storage || storage.empty() || own_storage.empty() || storage == "plain",
        "the weight storage is ", storage, " in the file, and ", own_storage, " here");
  }
  auto archive = optimizer_archive(saved, any);
  if (const auto* const own_check =
          dynamic_cast<const optim::ArchiveChecker*>(any.mixed_precision())) {
    own_check->check_load(archive);  // of a MasterWeights, which is no torch::optim::Optimizer
  } else {
    check_load(archive, any.optimizer());
  }
}

/// Returns a copy of a value: the states of optimizers on the devices of their parameters, and
/// other tensors on the CPU.
inline c10::IValue copy_to_devices(const c10::IValue& value,
                                   const std::vector<c10::Device>& of_parameters = {},
                                   c10::Device device = at::kCPU) {
  if (value.isTensor()) return value.toTensor().to(device, /*non_blocking=*/false, /*copy=*/true);
  if (value.isList()) {
    auto list = make_list();
    for (const c10::IValue& one : value.toListRef()) {
      list.push_back(copy_to_devices(one, of_parameters, device));
    }
    return list;
  }
  if (!value.isGenericDict()) return value;
  PythonDict dict = make_dict();
  for (const auto& entry : value.toGenericDict()) {
    const auto number = static_cast<std::size_t>(entry.key().isInt() ? entry.key().toInt() : -1);
    const bool is_state = number < of_parameters.size();  // {0: {"exp_avg": ...}}
    dict.insert(entry.key(), copy_to_devices(entry.value(), of_parameters,
                                             is_state ? of_parameters[number] : device));
  }
  return dict;
}

// --- Other objects -----------------------------------------------------------------------------

/// The part of an object that torch::save and torch::load accept. `check` throws what `take` would.
MEZZO_INLINE Stateful
make_stateful_archive(const std::function<void(torch::serialize::OutputArchive&)>& put,
                      const std::function<void(torch::serialize::InputArchive&)>& take,
                      const std::function<void(torch::serialize::InputArchive&)>& check) {
  return {.save =
              [put](const ParameterFqns&) {
                const c10::NoGradGuard no_grad;
                torch::serialize::OutputArchive archive;
                put(archive);
                return to_python_state_dict(archive_to_dict(get_module(archive)));
              },
          .load = [take, check](const c10::IValue& value, const ParameterFqns&) -> Stateful::Apply {
            check_value(value.isGenericDict(), value, "an object's dict");
            auto archive = dict_to_archive(to_archive_dict(value));
            check(archive);
            return [take, value] {
              auto copy = dict_to_archive(to_archive_dict(copy_to_devices(value)));
              take(copy);
            };
          },
          .is_archive = true};
}

/// Returns the part that saves and loads the optimizer that `find` then returns: Python's
/// `state_dict`, with keys that identify the optimizer.
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
    // A ShardedOptimizer writes on rank 0 alone.
    const bool is_sharded = dynamic_cast<optim::ShardedState*>(&optimizer.optimizer());
    TORCH_CHECK(!value.empty() || is_sharded, name,
                "::save wrote nothing, so that its state would be lost; give the class save and "
                "load functions as torch::optim's optimizers have them, or add its state by two "
                "callables (add(name, save, load))");
    if (!is_sharded && !is_optimizer_state(value) &&
        !is_optimizer_state(get_item(value, "optimizer"))) {
      PythonDict own = make_dict();
      own.insert(kCustomArchiveKey, value);
      value = own;
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
  stateful.load = [find](const c10::IValue& saved, const ParameterFqns& names) -> Stateful::Apply {
    check_optimizer(saved, find(), names);
    return [optimizer = find(), saved] {
      std::vector<c10::Device> devices;  // none where the optimizer places what it keeps
      const bool is_sharded = dynamic_cast<optim::ShardedState*>(&optimizer.optimizer());
      for (const auto& group : optimizer.optimizer().param_groups()) {
        for (const at::Tensor& one : group.params()) {
          if (!is_sharded) devices.push_back(one.device());
        }
      }
      auto archive = optimizer_archive(copy_to_devices(saved, devices), optimizer);
      if (optimizer.mixed_precision() != nullptr) {
        optimizer.load(archive);
      } else {
        load_atomically(archive, optimizer.optimizer());
      }
    };
  };
  return stateful;
}

MEZZO_INLINE Stateful make_stateful_tensor(at::Tensor& tensor) {
  return {
      .save =
          [&tensor](const ParameterFqns&) {
            TORCH_CHECK(tensor.defined(), "the tensor is undefined; give it a value before saving");
            return c10::IValue(detach_for_saving(tensor));
          },
      .load = [&tensor](const c10::IValue& value, const ParameterFqns&) -> Stateful::Apply {
        check_value(value.isTensor(), value, "a tensor");
        const at::Tensor read = value.toTensor();
        TORCH_CHECK(!tensor.defined() || (tensor.scalar_type() == read.scalar_type() &&
                                          tensor.layout() == read.layout()),
                    "the file has ", describe(read), ", and the tensor here is ", describe(tensor),
                    "; make it of the dtype and layout that it had, or give an undefined "
                    "torch::Tensor");
        return [&tensor, read] {
          const c10::Device device = tensor.defined() ? tensor.device() : at::kCPU;
          const at::Tensor copy = copy_to_devices(read, {}, device).toTensor();
          if (tensor.defined()) {
            tensor.set_data(copy);
          } else {
            tensor = copy;
          }
        };
      }};
}

/// The part of generators. `as_list`: the file has a list of their states, which may be of another
/// length; otherwise the state of the one.
inline Stateful make_stateful_generators(
    const std::function<std::vector<at::Generator>()>& generators, bool as_list) {
  return {.save =
              [generators, as_list](const ParameterFqns&) {
                auto states = make_list();
                for (const at::Generator& one : generators()) states.push_back(get_rng_state(one));
                return as_list ? c10::IValue(states) : c10::IValue(states.get(0));
              },
          .load = [generators, as_list](const c10::IValue& value,
                                        const ParameterFqns&) -> Stateful::Apply {
            check_value(value.isList() == as_list, value,
                        as_list ? "random states" : "a generator's state");
            std::vector<at::Tensor> states;
            for (const c10::IValue& state : as_list ? value.toListRef() : at::ArrayRef(value)) {
              check_value(state.isTensor() && state.toTensor().scalar_type() == at::kByte, state,
                          "a generator's state");
              states.push_back(state.toTensor().clone());
            }
            const std::vector<at::Generator> present = generators();
            for (std::size_t i = 0; i < std::min(states.size(), present.size()); ++i) {
              set_rng_state(present[i].clone(), states[i]);  // throws before anything is loaded
            }
            return [states = std::move(states), own = present] {
              if (states.size() != own.size()) {
                TORCH_WARN("The checkpoint has random states of ", states.size(),
                           " generators, of the CPU and of CUDA devices, and here are ", own.size(),
                           ": devices without one go on with their own, and the run will not "
                           "repeat bit for bit what it would have been.");
              }
              for (std::size_t i = 0; i < std::min(states.size(), own.size()); ++i) {
                set_rng_state(own[i], states[i]);
              }
            };
          }};
}

MEZZO_INLINE Stateful make_stateful_generator(at::Generator& generator) {
  const auto one = [&generator] {
    TORCH_CHECK(generator.defined(), "the generator is undefined; make it first");
    return std::vector<at::Generator>{generator};
  };
  return make_stateful_generators(one, /*as_list=*/false);
}

/// The states of the default generators of the CPU and of CUDA devices.
MEZZO_INLINE Stateful make_stateful_rng() {
  return make_stateful_generators([] { return default_generators(CudaDevices::all); },
                                  /*as_list=*/true);
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
