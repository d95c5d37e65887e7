#pragma once

#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/base/weight_storage.h>
#include <mezzo/checkpoint/detail/checkpoint_part.h>
#include <mezzo/optim/fused_options.h>
#include <mezzo/optim/optimizer_interface.h>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Type.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <typeinfo>
#include <unordered_map>
#include <utility>
#include <vector>

// The identity of an optimizer in a checkpoint's index, one property per line:
//
//   class: AdamW
//   weight storage of group 0: split_master     (mezzo's optimizers, groups with 16-bit weights)
//   parameter 0 of group 0: [3, 2] model.0.weight    (names, if the state has its modules)
//
// Archives of optimizers hold parameter states by number. An archive of another class, or with
// parameters in another order, could be read without an error, so loading compares these lines
// first.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

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
  const optim::OptimizerInterface* const mezzos = optimizer.mezzos();
  if (mezzos == nullptr || dynamic_cast<const torch::optim::Optimizer*>(mezzos) != nullptr) {
    return name;
  }
  return class_in_files(c10::demangle(typeid(*mezzos).name())) + " of " + name;
}

inline const char* storage_name(optim::WeightStorage storage) {
  switch (storage) {
    case optim::WeightStorage::plain:
      return "plain";
    case optim::WeightStorage::master:
      return "master";
    case optim::WeightStorage::split_master:
      return "split_master";
    case optim::WeightStorage::stochastic:
      return "stochastic";
  }
  return "unknown";
}

/// Returns the extra options of a group; null if the optimizer is not mezzo's, or the group has no
/// 16-bit weight.
inline const HoldsExtraOptions* storage_options(const torch::optim::Optimizer& optimizer,
                                                const torch::optim::OptimizerParamGroup& group) {
  const bool has_low_precision =
      std::any_of(group.params().begin(), group.params().end(),
                  [](const at::Tensor& one) { return one.defined() && is_low_precision(one); });
  return has_low_precision ? extra_options(optimizer, group) : nullptr;
}

/// Separates the names of a parameter that has more than one.
inline constexpr const char* kBetweenNames = ", ";

inline std::string optimizer_identity(const AnyOptimizer& any,
                                      const std::vector<NamedPart>& parts) {
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  for (const NamedPart& part : parts) {
    part.part->each_parameter([&](const std::string& name, const at::Tensor& parameter) {
      std::string full = part.name + "." + name;
      std::replace(full.begin(), full.end(), '\n', ' ');
      std::string& all = names[parameter.unsafeGetTensorImpl()];
      all += (all.empty() ? "" : kBetweenNames) + full;
    });
  }
  const torch::optim::Optimizer& optimizer = any.optimizer();
  std::ostringstream lines;
  lines << "class: " << class_in_files(any) << '\n';
  for (std::size_t group = 0; group < optimizer.param_groups().size(); ++group) {
    const auto& own = optimizer.param_groups()[group];
    if (const HoldsExtraOptions* const options = storage_options(optimizer, own)) {
      lines << "weight storage of group " << group << ": "
            << storage_name(options->extras().weight_storage) << '\n';
    }
    for (std::size_t i = 0; i < own.params().size(); ++i) {
      const at::Tensor& parameter = own.params()[i];
      lines << "parameter " << i << " of group " << group << ": ";
      if (parameter.defined()) lines << parameter.sizes();
      const auto name = names.find(parameter.unsafeGetTensorImpl());
      if (name != names.end()) lines << ' ' << name->second;
      lines << '\n';
    }
  }
  return lines.str();
}

/// Splits each line of an identity at the first ": " into key and value.
inline std::map<std::string, std::string> identity_lines(const std::string& identity) {
  std::map<std::string, std::string> lines;
  std::istringstream stream(identity);
  for (std::string line; std::getline(stream, line);) {
    const std::size_t colon = line.find(": ");
    if (colon != std::string::npos) lines[line.substr(0, colon)] = line.substr(colon + 2);
  }
  return lines;
}

/// Returns the names in a text such as "[3, 2] model.0.weight, encoder.0.weight".
inline std::set<std::string> names_in_line(const std::string& text) {
  std::set<std::string> names;
  const std::string_view between = kBetweenNames;
  for (std::size_t begin = text.find(']') + 2; begin < text.size();) {
    const std::size_t end = std::min(text.find(between, begin), text.size());
    names.insert(text.substr(begin, end - begin));
    begin = end + between.size();
  }
  return names;
}

/// Whether two texts such as "[3, 2] model.0.weight" may describe the same parameter: the shapes
/// are equal and, if both have names, at least one name is in both.
inline bool may_be_same_parameter(const std::string& left, const std::string& right) {
  const auto shape = [](const std::string& text) { return text.substr(0, text.find(']') + 1); };
  if (shape(left) != shape(right)) return false;
  const auto names = names_in_line(left), others = names_in_line(right);
  return names.empty() || others.empty() ||
         std::any_of(names.begin(), names.end(),
                     [&others](const std::string& name) { return others.count(name) > 0; });
}

/// Returns the first difference between an optimizer of the file and one of the state, and what to
/// do; empty if there is none, or if the file has no identity.
inline std::string optimizer_difference(const std::string& in_file, const std::string& here) {
  if (in_file.empty() || here.empty() || in_file == here) return {};
  const auto saved = identity_lines(in_file), own = identity_lines(here);
  const auto saved_class = saved.find("class"), own_class = own.find("class");
  if (saved_class != saved.end() && own_class != own.end() &&
      saved_class->second != own_class->second) {
    return "it is of the class " + saved_class->second + " in the file, and " + own_class->second +
           " here";
  }
  for (const auto& [key, value] : saved) {
    const auto other = own.find(key);
    if (key.starts_with("parameter ")) {
      if (other == own.end()) {
        return "the file has " + key + " (" + value + "), and this optimizer does not";
      }
      if (!may_be_same_parameter(value, other->second)) {
        return key + " is " + value + " in the file, and " + other->second +
               " here (parameters need the order and the groups that they were saved with)";
      }
    } else if (key.starts_with("weight storage ") && other != own.end() && value != "plain" &&
               value != other->second) {
      return "the " + key + " is " + value + " in the file, and " + other->second + " here";
    }
  }
  for (const auto& [key, value] : own) {
    if (key.starts_with("parameter ") && saved.count(key) == 0) {
      return "the file lacks " + key + " (" + value + ")";
    }
  }
  return {};
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
