#pragma once

#include <mezzo/base/detail/default_generators.h>
#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/base/weight_storage.h>
#include <mezzo/checkpoint/detail/archive_value.h>
#include <mezzo/checkpoint/detail/checkpoint_file.h>
#include <mezzo/checkpoint/detail/checkpoint_part.h>
#include <mezzo/checkpoint/detail/part_of.h>
#include <mezzo/optim/detail/averaged_parameters.h>
#include <mezzo/optim/detail/step_engine.h>
#include <mezzo/optim/optimizer.h>

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
#include <mutex>
#include <random>
#include <string>
#include <string_view>
#include <typeinfo>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Throws for a parameter that holds an average in place of its weight: see averaged_parameters.h.
inline void check_not_averaged(const std::string& what, const at::Tensor& tensor) {
  TORCH_CHECK(!averaged_parameters().hold(tensor), what,
              " holds an average, for an EmaScope is alive; let it end first (to export the "
              "averages, torch::save the model)");
}

/// Returns the tensor to be written: a view is copied, so that only its own elements are saved.
inline at::Tensor savable(const at::Tensor& tensor) {
  const at::Tensor detached = tensor.detach();
  const bool is_whole =
      detached.layout() != at::kStrided || detached.storage().nbytes() == detached.nbytes();
  return is_whole ? detached : detached.clone();
}

// --- Modules -----------------------------------------------------------------------------------

using NamedTensor = std::pair<std::string, at::Tensor>;

/// Returns the tensors of a module under the names that Python's `state_dict` gives them.
inline std::vector<NamedTensor> state_dict_of(const torch::nn::Module& module) {
  std::vector<NamedTensor> tensors;
  const auto take = [&tensors](const auto& list) {
    for (const auto& one : list) {
      if (one.value().defined()) tensors.emplace_back(one.key(), one.value());
    }
  };
  take(module.named_parameters());
  take(module.named_buffers());
  return tensors;
}

/// Collects the tensors of a state_dict, or of nested dicts (format 1), under their whole names.
inline void collect_tensors(const c10::IValue& value, const std::string& name,
                            std::unordered_map<std::string, c10::IValue>& found) {
  const bool has_attributes = value.isTuple() && !value.toTupleRef().elements().empty();
  const c10::IValue inner = has_attributes ? value.toTupleRef().elements()[0] : value;
  if (!inner.isGenericDict()) {
    found.emplace(name, inner);
    return;
  }
  for (const auto& entry : inner.toGenericDict()) {
    const std::string& key = entry.key().toStringRef();
    collect_tensors(entry.value(), name.empty() ? key : name + "." + key, found);
  }
}

inline std::string shape_words(const at::Tensor& tensor) {
  return c10::str(dtype_name(tensor.scalar_type()), " ", tensor.sizes());
}

/// Checks that the file has the module's names, dtypes and shapes. Returns the values of `own`.
inline std::vector<at::Tensor> check_state_dict(const c10::IValue& value,
                                                const std::vector<NamedTensor>& own) {
  std::unordered_map<std::string, c10::IValue> found;
  collect_tensors(value, "", found);
  std::vector<at::Tensor> values;
  std::unordered_map<const c10::TensorImpl*, std::size_t> first;  // under another name
  for (std::size_t i = 0; i < own.size(); ++i) {
    const auto& [name, tensor] = own[i];
    check_not_averaged('"' + name + '"', tensor);
    const auto saved = found.find(name);
    TORCH_CHECK(saved != found.end(), "the file lacks \"", name, "\"");
    TORCH_CHECK(saved->second.isTensor(), "\"", name, "\" is ", value_words(saved->second),
                " in the file");
    const at::Tensor read = saved->second.toTensor();
    TORCH_CHECK(read.scalar_type() == tensor.scalar_type() && read.sizes() == tensor.sizes(), "\"",
                name, "\" is ", shape_words(read), " in the file, and ", shape_words(tensor),
                " here");
    values.push_back(read);
    const std::size_t same = first.emplace(tensor.unsafeGetTensorImpl(), i).first->second;
    TORCH_CHECK(same == i || checksum(values[same]) == checksum(read),
                "the file has one value for \"", own[same].first, "\" and another for \"", name,
                "\", which are one tensor in this model; load it into a model that does not "
                "tie them, and copy the value that you want");
    found.erase(saved);
  }
  if (!found.empty()) {
    const auto least = std::min_element(
        found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    TORCH_CHECK(false, "the file has \"", least->first, "\", and the module does not");
  }
  return values;
}

/// The part of a module, or of the module that a holder has when a checkpoint is saved or loaded.
/// `module` returns it, or throws.
MEZZO_INLINE CheckpointPart
module_part(std::function<std::shared_ptr<torch::nn::Module>()> module) {
  module();
  const auto dict = [](const auto& tensors) {
    PythonDict values = python_dict();
    for (const auto& [name, tensor] : tensors) {
      check_not_averaged('"' + name + '"', tensor);
      values.insert(name, savable(tensor));
    }
    return c10::IValue(values);
  };
  const auto parameters = [module] {
    std::vector<NamedTensor> all;
    for (const auto& one : module()->named_parameters()) all.emplace_back(one.key(), one.value());
    return all;
  };
  return {.kind = "module",
          .save = [module, dict](const ParameterNames&) { return dict(state_dict_of(*module())); },
          .load = [module](const c10::IValue& value, const LoadContext&) -> CheckpointPart::Apply {
            auto own = state_dict_of(*module());
            auto values = check_state_dict(value, own);
            return [own = std::move(own), values = std::move(values)] {
              for (std::size_t i = 0; i < own.size(); ++i) own[i].second.copy_(values[i]);
            };
          },
          .parameters = parameters};
}

MEZZO_INLINE std::shared_ptr<torch::nn::Module> held_module(torch::nn::Module* module) {
  TORCH_CHECK(module != nullptr,
              "TrainingState::add: the module holder is empty; construct the module before it "
              "is added");
  return {std::shared_ptr<void>(), module};
}

// --- Optimizers --------------------------------------------------------------------------------

/// Returns the class name without namespaces: "AdamW" for `torch::optim::AdamW`,
/// `mezzo::optim::AdamW` and a ShardedOptimizer of it, which read each other's archives.
inline std::string class_in_files(const std::string& demangled) {
  const auto unqualified = [](const std::string& name) {
    const std::size_t colon = name.rfind("::", name.find('<'));
    return colon == std::string::npos ? name : name.substr(colon + 2);
  };
  constexpr std::string_view kSharded = "ShardedOptimizer<";
  const std::string name = unqualified(demangled);
  if (!name.starts_with(kSharded) || !name.ends_with('>')) return name;
  return unqualified(name.substr(kSharded.size(), name.size() - kSharded.size() - 1));
}

/// Returns a name such as "AdamW" or "MasterWeights of SGD".
inline std::string class_in_files(const AnyOptimizer& optimizer) {
  const torch::optim::Optimizer& stepped = optimizer.optimizer();
  const std::string name = class_in_files(c10::demangle(typeid(stepped).name()));
  const optim::FusedOptimizer* const mezzos = optimizer.mezzos();
  if (mezzos == nullptr || dynamic_cast<const torch::optim::Optimizer*>(mezzos) != nullptr) {
    return name;
  }
  return class_in_files(c10::demangle(typeid(*mezzos).name())) + " of " + name;
}

/// Returns how the 16-bit weights of each group are kept; empty for a group without, and for
/// optimizers that are not mezzo's.
inline std::vector<std::string> storages_in_files(const torch::optim::Optimizer& optimizer) {
  std::vector<std::string> storages;
  for (const auto& group : optimizer.param_groups()) {
    const bool is_low =
        std::any_of(group.params().begin(), group.params().end(),
                    [](const at::Tensor& one) { return one.defined() && is_low_precision(one); });
    const auto* const mezzos = dynamic_cast<const StepEngine*>(&optimizer);
    constexpr std::array<const char*, 4> kNames{"plain", "master", "split_master", "stochastic"};
    storages.emplace_back(
        mezzos == nullptr || !is_low
            ? ""
            : kNames.at(static_cast<std::size_t>(mezzos->weight_options().weight_storage)));
  }
  return storages;
}

/// Returns what a file says of an optimizer, beside its state; names where the state has its
/// modules:
///
///     {"class": "AdamW", "weight_storage": ["split_master"],
///      "parameters": [[{"shape": [3, 2], "names": ["model.0.weight"]}]]}
inline PythonDict optimizer_identity(const AnyOptimizer& any, const ParameterNames& names) {
  auto storages = python_list(), groups = python_list();
  for (const auto& storage : storages_in_files(any.optimizer())) storages.push_back(storage);
  for (const auto& group : any.optimizer().param_groups()) {
    auto parameters = python_list();
    for (const at::Tensor& parameter : group.params()) {
      auto shape = python_list(), own_names = python_list();
      if (parameter.defined()) {
        for (const std::int64_t size : parameter.sizes()) shape.push_back(size);
      }
      const auto known = names.find(parameter.unsafeGetTensorImpl());
      if (known != names.end()) {
        for (const std::string& name : known->second) own_names.push_back(name);
      }
      PythonDict one = python_dict();
      one.insert("shape", shape);
      one.insert("names", own_names);
      parameters.push_back(one);
    }
    groups.push_back(parameters);
  }
  PythonDict identity = python_dict();
  identity.insert("class", class_in_files(any));
  identity.insert("weight_storage", storages);
  identity.insert("parameters", groups);
  return identity;
}

inline std::string parameter_words(const c10::IValue& parameter) {
  std::vector<std::int64_t> sizes;
  for (const c10::IValue& size : item(parameter, "shape").toListRef()) {
    sizes.push_back(size.toInt());
  }
  std::string words = c10::str(at::IntArrayRef(sizes));
  for (const c10::IValue& name : item(parameter, "names").toListRef()) {
    words += " " + name.toStringRef();
  }
  return words;
}

/// Whether two parameters have the same shape and, where both have names, one name in common.
inline bool may_be_same(const c10::IValue& a, const c10::IValue& b) {
  const auto &left = item(a, "names").toListRef(), &right = item(b, "names").toListRef();
  return item(a, "shape") == item(b, "shape") &&
         (left.empty() || right.empty() ||
          std::find_first_of(left.begin(), left.end(), right.begin(), right.end()) != left.end());
}

/// Checks what a file says of an optimizer against the optimizer.
inline void check_identity(const c10::IValue& saved, const c10::IValue& own) {
  const std::string &name = item(saved, "class").toStringRef(),
                    &own_name = item(own, "class").toStringRef();
  TORCH_CHECK(name == own_name, "it is of the class ", name, " in the file, and ", own_name,
              " here. In C++: make the optimizer as it was saved, or leave it out of the state, "
              "load with {.subset = true}, and begin its moments anew");
  const auto groups_of = [](const c10::IValue& of, const char* key) {
    return item(of, key).toListRef().vec();
  };
  const auto groups = groups_of(saved, "parameters"), own_groups = groups_of(own, "parameters");
  for (std::size_t group = 0; group < std::max(groups.size(), own_groups.size()); ++group) {
    const auto parameters_of = [group](const auto& all) {
      return group < all.size() ? all[group].toListRef().vec() : std::vector<c10::IValue>();
    };
    const auto here = parameters_of(own_groups), there = parameters_of(groups);
    for (std::size_t i = 0; i < std::max(here.size(), there.size()); ++i) {
      TORCH_CHECK(i < here.size(), "the file has parameter ", i, " of group ", group, " (",
                  parameter_words(there[i]), "), and this optimizer does not");
      TORCH_CHECK(i < there.size(), "the file lacks parameter ", i, " of group ", group, " (",
                  parameter_words(here[i]), ")");
      TORCH_CHECK(may_be_same(there[i], here[i]), "parameter ", i, " of group ", group, " is ",
                  parameter_words(there[i]), " in the file, and ", parameter_words(here[i]),
                  " here (parameters need the order and the groups that they were saved with)");
    }
  }
  const auto storages = groups_of(saved, "weight_storage"),
             own_storages = groups_of(own, "weight_storage");
  for (std::size_t group = 0; group < std::min(storages.size(), own_storages.size()); ++group) {
    const std::string &there = storages[group].toStringRef(),
                      &here = own_storages[group].toStringRef();
    TORCH_CHECK(there == here || there.empty() || here.empty() || there == "plain",
                "the weight storage of group ", group, " is ", there, " in the file, and ", here,
                " here");
  }
}

/// Checks the state of an optimizer of Python's, which has neither shapes nor a class.
inline void check_python_state(const c10::IValue& saved, const AnyOptimizer& any) {
  const auto& groups = item(saved, "param_groups").toListRef();
  const auto& own = any.optimizer().param_groups();
  TORCH_CHECK(groups.size() == own.size(), "it has ", groups.size(), " groups in Python, and ",
              own.size(), " here");
  const std::string name = class_in_files(any);
  for (std::size_t group = 0; group < own.size(); ++group) {
    const c10::IValue decoupled = item(groups[group], "decoupled_weight_decay");
    const bool is_adamw = decoupled.isBool() && decoupled.toBool();
    TORCH_CHECK(decoupled.isNone() || is_adamw == (name == "AdamW"), "it is the state of ",
                is_adamw ? "AdamW" : "Adam", " in the file, and of ", name, " here");
    const c10::IValue maximizes = item(groups[group], "maximize");
    TORCH_CHECK(!maximizes.isBool() || !maximizes.toBool(), name,
                " in C++ does not maximize; negate the loss in Python");
    const auto& params = item(groups[group], "params").toListRef();
    TORCH_CHECK(params.size() == own[group].params().size(), "group ", group, " has ",
                params.size(), " parameters in Python, and ", own[group].params().size(), " here");
    for (std::size_t i = 0; i < params.size(); ++i) {
      const c10::IValue state = item(item(saved, "state"), params[i]);
      for (const char* key : {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}) {
        const c10::IValue moment = item(state, key);
        TORCH_CHECK(
            !moment.isTensor() || moment.toTensor().sizes() == own[group].params()[i].sizes(),
            "parameter ", i, " of group ", group, " is ", moment.toTensor().sizes(),
            " in Python, and ", own[group].params()[i].sizes(), " here");
      }
    }
  }
}

/// Returns a copy of a value with its tensors on `device`, and the states of optimizers on the
/// devices of their parameters.
inline c10::IValue copied(const c10::IValue& value, c10::Device device,
                          const std::vector<c10::Device>& of_parameters = {}) {
  if (value.isTensor()) return value.toTensor().to(device, /*non_blocking=*/false, /*copy=*/true);
  if (value.isList()) {
    auto list = python_list();
    for (const c10::IValue& one : value.toListRef()) {
      list.push_back(copied(one, device, of_parameters));
    }
    return list;
  }
  if (!value.isGenericDict()) return value;
  PythonDict dict = python_dict();
  for (const auto& entry : value.toGenericDict()) {
    const auto number = static_cast<std::size_t>(entry.key().isInt() ? entry.key().toInt() : -1);
    const bool is_state = number < of_parameters.size();  // {0: {"exp_avg": ...}}
    dict.insert(entry.key(),
                copied(entry.value(), is_state ? of_parameters[number] : device, of_parameters));
  }
  return dict;
}

/// The part of any optimizer, in the form of Python's `state_dict`.
MEZZO_INLINE CheckpointPart optimizer_part(AnyOptimizer optimizer) {
  const auto check_parameters = [optimizer] {
    for (const auto& group : optimizer.optimizer().param_groups()) {
      for (const at::Tensor& one : group.params()) check_not_averaged("a parameter", one);
    }
  };
  const auto save = [optimizer, check_parameters](const ParameterNames& names) {
    check_parameters();
    const c10::NoGradGuard no_grad;
    torch::serialize::OutputArchive archive;
    optimizer.save(archive);
    PythonDict form = python_form(dict_of(module_in(archive))).toGenericDict();
    for (const auto& entry : optimizer_identity(optimizer, names)) {
      form.insert(entry.key(), entry.value());
    }
    return c10::IValue(form);
  };
  return {
      .kind = "optimizer",
      .save = save,
      .load = [optimizer, check_parameters](const c10::IValue& value,
                                            const LoadContext& context) -> CheckpointPart::Apply {
        check_parameters();
        const c10::IValue saved = python_form(value);  // of a file of format 1
        const bool is_optimizer =
            is_optimizer_state(saved) || is_optimizer_state(item(saved, "optimizer"));
        check_value(is_optimizer, value, "an optimizer's state");
        if (!item(saved, "class").isNone()) {
          check_identity(saved, optimizer_identity(optimizer, context.names));
        } else if (is_optimizer_state(saved)) {
          check_python_state(saved, optimizer);
        }
        return [optimizer, saved] {
          std::vector<c10::Device> devices;  // none where the optimizer places what it keeps
          const bool is_sharded = dynamic_cast<optim::ShardedState*>(&optimizer.optimizer());
          for (const auto& group : optimizer.optimizer().param_groups()) {
            for (const at::Tensor& one : group.params()) {
              if (!is_sharded) devices.push_back(one.device());
            }
          }
          optimizer.optimizer().state().clear();  // otherwise load keeps what the file lacks
          auto archive = archive_of(archive_form(copied(saved, at::kCPU, devices)), nullptr);
          optimizer.load(archive);
        };
      }};
}

// --- Other objects -----------------------------------------------------------------------------

/// The part of an object that torch::save and torch::load accept.
MEZZO_INLINE CheckpointPart
archive_part(std::function<void(torch::serialize::OutputArchive&)> put,
             std::function<void(torch::serialize::InputArchive&)> take) {
  return {.kind = "object",
          .save =
              [put](const ParameterNames&) {
                const c10::NoGradGuard no_grad;
                torch::serialize::OutputArchive archive;
                put(archive);
                return python_form(dict_of(module_in(archive)));
              },
          .load = [put, take](const c10::IValue& value,
                              const LoadContext& context) -> CheckpointPart::Apply {
            check_value(value.isGenericDict(), value, "an object's dict");
            auto own = std::make_shared<torch::serialize::OutputArchive>();
            put(*own);  // for the types of its lists
            const c10::Device device = context.device.value_or(at::kCPU);
            return [take, value, own, device] {
              const c10::IValue copy = copied(python_form(value), device);
              auto archive = archive_of(archive_form(copy), &module_in(*own));
              take(archive);
            };
          }};
}

MEZZO_INLINE CheckpointPart tensor_part(at::Tensor& tensor) {
  return {.kind = "tensor",
          .save =
              [&tensor](const ParameterNames&) {
                TORCH_CHECK(tensor.defined(),
                            "the tensor is undefined; give it a value before saving");
                check_not_averaged("the tensor", tensor);
                return c10::IValue(savable(tensor));
              },
          .load = [&tensor](const c10::IValue& value,
                            const LoadContext& context) -> CheckpointPart::Apply {
            check_value(value.isTensor(), value, "a tensor");
            const at::Tensor read = value.toTensor();
            if (tensor.defined()) {
              check_not_averaged("the tensor", tensor);
              TORCH_CHECK(
                  tensor.scalar_type() == read.scalar_type() && tensor.layout() == read.layout(),
                  "the file has ", tensor_words(read), ", and the tensor here is ",
                  tensor_words(tensor),
                  "; make it of the dtype and layout that it had, or give an undefined "
                  "torch::Tensor");
            }
            return [&tensor, read, device = context.device.value_or(at::kCPU)] {
              if (tensor.defined()) {
                tensor.set_data(copied(read, tensor.device()).toTensor());
              } else {
                tensor = copied(read, device).toTensor();
              }
            };
          }};
}

/// The part of tensors whose memory is shared. Loading copies into that memory.
MEZZO_INLINE CheckpointPart tensors_part(std::vector<at::Tensor>& tensors) {
  return {
      .kind = "tensors",
      .save =
          [&tensors](const ParameterNames&) {
            auto list = python_list();
            for (std::size_t i = 0; i < tensors.size(); ++i) {
              TORCH_CHECK(tensors[i].defined(), "tensor ", i,
                          " is undefined; give it a value before saving");
              list.push_back(savable(tensors[i]));
            }
            return c10::IValue(list);
          },
      .load = [&tensors](const c10::IValue& value, const LoadContext&) -> CheckpointPart::Apply {
        check_value(value.isList(), value, "a vector of tensors");
        const auto& list = value.toListRef();
        TORCH_CHECK(list.size() == tensors.size(), "the file has ", list.size(),
                    " tensors, and the vector here ", tensors.size(),
                    "; make it as long as it was");
        for (std::size_t i = 0; i < list.size(); ++i) {
          check_value(list[i].isTensor() && tensors[i].defined(), list[i], "a tensor");
          const at::Tensor read = list[i].toTensor();
          TORCH_CHECK(
              read.scalar_type() == tensors[i].scalar_type() && read.sizes() == tensors[i].sizes(),
              "tensor ", i, " is ", shape_words(read), " in the file, and ",
              shape_words(tensors[i]), " here");
        }
        return [&tensors, value] {
          for (std::size_t i = 0; i < tensors.size(); ++i) {
            tensors[i].copy_(value.toListRef()[i].toTensor());
          }
        };
      }};
}

/// Returns a generator's state in a file as a tensor of its own.
inline at::Tensor generator_state_read(const c10::IValue& value) {
  check_value(value.isTensor() && value.toTensor().scalar_type() == at::kByte, value,
              "a generator's state");
  return value.toTensor().clone();
}

MEZZO_INLINE CheckpointPart generator_part(at::Generator& generator) {
  return {
      .kind = "generator",
      .save =
          [&generator](const ParameterNames&) {
            TORCH_CHECK(generator.defined(), "the generator is undefined; make it first");
            return c10::IValue(state_of(generator));
          },
      .load = [&generator](const c10::IValue& value, const LoadContext&) -> CheckpointPart::Apply {
        TORCH_CHECK(generator.defined(), "the generator is undefined; make it first");
        return [&generator, state = generator_state_read(value)] { set_state(generator, state); };
      }};
}

/// The states of the default generators of the CPU and of CUDA devices.
MEZZO_INLINE CheckpointPart random_states_part() {
  return {
      .kind = "random states",
      .save =
          [](const ParameterNames&) {
            auto states = python_list();
            for (const at::Generator& one : default_generators(CudaDevices::all)) {
              states.push_back(state_of(one));
            }
            return c10::IValue(states);
          },
      .load = [](const c10::IValue& value, const LoadContext&) -> CheckpointPart::Apply {
        check_value(value.isList() && !value.toListRef().empty(), value, "random states");
        std::vector<at::Tensor> states;
        for (const c10::IValue& one : value.toListRef()) {
          states.push_back(generator_state_read(one));
        }
        return [states = std::move(states)] {
          std::vector<at::Generator> generators = default_generators(CudaDevices::all);
          if (states.size() != generators.size()) {
            TORCH_WARN("The checkpoint has random states of ", states.size() - 1,
                       " CUDA devices, and here are ", generators.size() - 1,
                       ": devices without one go on with their own, and the run will not "
                       "repeat bit for bit what it would have been.");
          }
          for (std::size_t i = 0; i < std::min(states.size(), generators.size()); ++i) {
            set_state(generators[i], states[i]);
          }
        };
      },
      // Another number of ranks cannot continue the saved sequences. The seed follows from rank
      // 0's CPU state and the salt, so it is the same at each load.
      .begin_anew = [](const c10::IValue& value, const std::string& salt) -> CheckpointPart::Apply {
        const at::Tensor state = generator_state_read(value.toListRef().at(0)).contiguous();
        const auto* const bytes = state.const_data_ptr<std::uint8_t>();
        std::vector<std::uint32_t> words(bytes, bytes + state.numel());
        for (const char c : salt) words.push_back(static_cast<unsigned char>(c));
        std::seed_seq sequence(words.begin(), words.end());
        const std::uint64_t seed = std::mt19937_64(sequence)();
        return [seed] {
          for (at::Generator& generator : default_generators(CudaDevices::all)) {
            const std::scoped_lock lock(generator.mutex());
            generator.set_current_seed(seed);
          }
        };
      }};
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
