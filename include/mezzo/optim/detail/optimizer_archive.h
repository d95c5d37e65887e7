#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/fused_param_state.h>
#include <mezzo/optim/detail/optimizer_description.h>
#include <mezzo/optim/optimizer_ref.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/Type.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <set>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

// Archives of mezzo and torch optimizers. Everything is checked before anything is assigned, for
// the strong exception guarantee.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

/// Base of optimizers that can check an archive without loading it.
struct ArchiveChecker {
  virtual ~ArchiveChecker() = default;
  /// Throws what `load` would throw, and changes nothing.
  virtual void check_load(torch::serialize::InputArchive& archive) const = 0;
};

}  // namespace optim

namespace detail {

/// Key of an optimizer's class name in its archive; torch's archives have none.
inline constexpr const char* kClassKey = "optimizer_class";

/// Keys by which an archive of an optimizer class is recognized.
struct ArchiveFormat {
  std::string_view optimizer;
  bool has_torch_class;                                ///< torch has an optimizer of this name
  std::array<std::string_view, 3> options;             ///< distinctive option keys
  std::array<std::string_view, 2> moments;             ///< keys of every state with a step
  std::array<std::string_view, 2> optional_keys = {};  ///< optional keys of a state
  bool is_quantized = false;  ///< dtypes and shapes are checked by the class
};

inline constexpr std::array kArchiveFormats{
    ArchiveFormat{
        "Adam", true, {"betas", "eps", "amsgrad"}, {"exp_avg", "exp_avg_sq"}, {"max_exp_avg_sq"}},
    ArchiveFormat{
        "AdamW", true, {"betas", "eps", "amsgrad"}, {"exp_avg", "exp_avg_sq"}, {"max_exp_avg_sq"}},
    ArchiveFormat{"SGD", true, {"momentum", "dampening", "nesterov"}, {}, {"momentum_buffer"}},
    ArchiveFormat{"RMSprop",
                  true,
                  {"alpha", "eps", "centered"},
                  {"square_avg"},
                  {"momentum_buffer", "grad_avg"}},
    ArchiveFormat{"Adagrad", true, {"lr_decay", "initial_accumulator_value", "eps"}, {"sum"}},
    ArchiveFormat{"Lion", false, {"betas"}, {"exp_avg"}},
    ArchiveFormat{"LAMB", false, {"betas", "eps", "use_nvlamb"}, {"exp_avg", "exp_avg_sq"}},
    ArchiveFormat{"Muon", false, {"momentum", "ns_steps", "adjust_lr_fn"}, {"momentum_buffer"}},
    ArchiveFormat{"AdamW8bit",
                  false,
                  {"betas", "eps"},
                  {"exp_avg", "exp_avg_sq"},
                  {"exp_avg_absmax", "exp_avg_sq_absmax"},
                  /*is_quantized=*/true},
};

/// Returns the format of a mezzo or torch class; null for any other.
inline const ArchiveFormat* archive_format(std::string_view optimizer) {
  const auto found = std::find_if(
      kArchiveFormats.begin(), kArchiveFormats.end(),
      [optimizer](const ArchiveFormat& format) { return format.optimizer == optimizer; });
  return found == kArchiveFormats.end() ? nullptr : &*found;
}

/// Returns the class name without namespaces: "AdamW" for `torch::optim::AdamW`,
/// `mezzo::optim::AdamW` and a ShardedOptimizer of it, which share a format.
inline std::string archive_class_name(const std::string& demangled) {
  const auto unqualified = [](const std::string& name) {
    const std::size_t colon = name.rfind("::", name.find('<'));
    return colon == std::string::npos ? name : name.substr(colon + 2);
  };
  constexpr std::string_view kSharded = "ShardedOptimizer<";
  std::string name = unqualified(demangled);
  if (!name.starts_with(kSharded) || !name.ends_with('>')) return name;
  return unqualified(name.substr(kSharded.size(), name.size() - kSharded.size() - 1));
}
inline std::string archive_class_name(const torch::optim::Optimizer& optimizer) {
  return archive_class_name(c10::demangle(typeid(optimizer).name()));
}

/// The groups and states of an archive that is being read or written.
class SerializedOptimizer final : public torch::optim::Optimizer {
 public:
  SerializedOptimizer() : Optimizer(std::vector<torch::optim::OptimizerParamGroup>{}, nullptr) {}
  at::Tensor step(LossClosure /*closure*/) override { return {}; }
};

/// Calls `load` and returns the message of the exception that it threw; empty without one. Drops
/// torch's request to report a bug, which it adds for a value of another type.
template <class Load>
std::string load_error(const Load& load) {
  constexpr std::string_view kBug = "please report a bug to PyTorch. ";
  try {
    load();
    return {};
  } catch (const c10::Error& exception) {
    const std::string text = exception.what_without_backtrace();
    const std::size_t bug = text.find(kBug);
    return bug == std::string::npos ? text : text.substr(bug + kBug.size());
  } catch (const std::exception& exception) {
    return exception.what();
  }
}

inline std::string join_sorted(std::vector<std::string> keys) {
  std::sort(keys.begin(), keys.end());
  return c10::Join(", ", keys);
}

/// Returns the size that torch stores as a tensor under `key`; -1 if there is none.
inline int64_t read_size(torch::serialize::InputArchive& archive, const std::string& key) {
  c10::IValue value;
  const bool is_size = archive.try_read(key, value) && value.isTensor() &&
                       value.toTensor().defined() && value.toTensor().numel() == 1 &&
                       value.toTensor().scalar_type() == at::kLong;
  return is_size ? value.toTensor().item<int64_t>() : -1;
}

/// Checks the state of one parameter. \throws c10::Error as check_optimizer_archive
/// \param may_be_sparse  whether moments may be sparse, as in torch's SGD with sparse gradients
inline void check_state_archive(torch::serialize::InputArchive& state, const ArchiveFormat& format,
                                const at::Tensor& parameter, const OptimizerDescription& optimizer,
                                bool may_be_sparse) {
  const auto has = [](const auto& keys, const std::string& key) {
    return std::find(keys.begin(), keys.end(), key) != keys.end();
  };
  int64_t steps = 0;
  bool has_master = false;
  std::set<std::string> found;
  for (const std::string& key : state.keys()) {
    c10::IValue value;
    state.read(key, value);
    if (value.isNone()) continue;
    if (key == "step") {
      TORCH_CHECK(value.isInt(), optimizer, ": the state of ", optimizer.describe_param(parameter),
                  " has a step that is not an integer; it is corrupt: load an earlier one");
      steps = value.toInt();
      check_steps(steps);
      continue;
    }
    const bool is_master = key == "master";
    TORCH_CHECK(is_master || has(format.moments, key) || has(format.optional_keys, key), optimizer,
                ": the archive is that of another class of optimizer: it has the state ",
                join_sorted(state.keys()), " of ", optimizer.describe_param(parameter),
                "; load the archive of an optimizer with the same class and options");
    TORCH_CHECK(value.isTensor(), optimizer, ": \"", key, "\" of ",
                optimizer.describe_param(parameter),
                " is not a tensor in the archive; it is corrupt: load an earlier one");
    const at::Tensor tensor = value.toTensor();
    if (!tensor.defined()) continue;
    found.insert(key);
    has_master = has_master || is_master;
    if (format.is_quantized) continue;
    check_state_shape(tensor, is_master ? "a master" : "a moment", parameter, optimizer);
    const bool is_number =
        at::isFloatingType(tensor.scalar_type()) || (parameter.is_complex() && tensor.is_complex());
    TORCH_CHECK(
        (tensor.layout() == at::kStrided || (may_be_sparse && tensor.is_sparse())) && is_number,
        optimizer, ": \"", key, "\" of ", optimizer.describe_param(parameter), " is ",
        describe(tensor),
        " in the archive; it should be dense and of a floating dtype: load the archive of an "
        "optimizer with the same class and options");
  }
  for (const std::string_view moment : format.moments) {
    const bool is_needed = !moment.empty() && (steps > 0 || !has_master);
    TORCH_CHECK(!is_needed || found.count(std::string(moment)) > 0, optimizer,
                ": the archive lacks \"", moment, "\" of ", optimizer.describe_param(parameter),
                ", and has the state ", join_sorted(state.keys()),
                "; it is that of another class of optimizer, or corrupt: load the archive of an "
                "optimizer with the same class and options");
  }
}

/// Checks that an archive is that of an optimizer of the class `optimizer.name`, with groups of the
/// same sizes and states of the parameters' shapes.
/// \throws c10::Error, with the archive's value and the expected one
inline void check_optimizer_archive(torch::serialize::InputArchive& archive,
                                    const OptimizerDescription& optimizer,
                                    bool may_be_sparse = false) {
  c10::IValue version, name;
  TORCH_CHECK(archive.try_read("pytorch_version", version) && version.isString() &&
                  version.toStringRef() == "1.5.0",
              optimizer,
              ": the archive has no optimizer state, or that of a libtorch before 1.5; load "
              "what torch::save(optimizer, path) wrote");
  const ArchiveFormat* const format = archive_format(optimizer.name);
  if (archive.try_read(kClassKey, name)) {
    TORCH_CHECK(name.isString() && name.toStringRef() == optimizer.name, optimizer,
                ": the archive is that of ", name.isString() ? name.toStringRef() : "another class",
                "; load the archive of an optimizer of this class");
  } else {
    TORCH_CHECK(format == nullptr || format->has_torch_class, optimizer,
                ": the archive has no class name, as those of torch::optim, which has no ",
                optimizer, "; load what torch::save(optimizer, path) wrote");
  }
  const auto check = [&optimizer](bool holds, const auto&... message) {
    if (holds) return;
    TORCH_CHECK(false, optimizer, ": ", message...,
                "; load the archive of an optimizer with the same class and options");
  };
  torch::serialize::InputArchive groups, group, options, states, state;
  check(archive.try_read("param_groups", groups) && archive.try_read("state", states),
        "the archive lacks its groups or states");
  const int64_t num_groups = read_size(groups, "param_groups/size");
  check(num_groups == static_cast<int64_t>(optimizer.groups.size()),
        "the archive has a different number of parameter groups, ", num_groups,
        ", than this optimizer, ", optimizer.groups.size());
  std::set<std::string> ids;
  // torch converts the id to an address, under which it looks up the state: "07" would be 7.
  const auto is_canonical = [](const std::string& id) {
    return !id.empty() && id.size() < 20 &&
           id.find_first_not_of("0123456789") == std::string::npos &&
           (id[0] != '0' || id.size() == 1);
  };
  for (std::size_t i = 0; i < optimizer.groups.size(); ++i) {
    const std::vector<at::Tensor>& params = optimizer.groups[i].params();
    check(groups.try_read("param_groups/" + std::to_string(i), group) &&
              group.try_read("options", options),
          "the archive lacks group ", i);
    const int64_t size = read_size(group, "params/size");
    check(size == static_cast<int64_t>(params.size()),
          "the archive contains a parameter group that has a different size: group ", i, " has ",
          size, " parameters in the archive, and ", params.size(), " in this optimizer");
    const std::vector<std::string> keys = options.keys();
    if (format != nullptr) {
      for (const std::string_view key : format->options) {
        check(key.empty() || std::find(keys.begin(), keys.end(), key) != keys.end(),
              "the archive is that of another class of optimizer: group ", i, " has the options ",
              join_sorted(keys), ", and lacks ", key);
      }
    }
    for (std::size_t k = 0; k < params.size(); ++k) {
      c10::IValue id;
      const bool has_id = group.try_read("params/" + std::to_string(k), id) && id.isString();
      const std::string text = has_id ? id.toStringRef() : "";
      check(has_id && is_canonical(text) && ids.insert(text).second, "parameter ", k, " of group ",
            i, " has no unique id in the archive");
      if (format != nullptr && states.try_read(text, state)) {
        check_state_archive(state, *format, params[k], optimizer, may_be_sparse);
      }
    }
  }
  for (const std::string& key : states.keys()) {
    check(is_canonical(key), "the archive has a state under \"", key, "\"");
  }
}

/// Returns the groups and states of an archive for the parameters of `optimizer`.
/// \throws c10::Error as check_optimizer_archive, and for values of other types than State's and
///   Options'
template <class State, class Options>
SerializedOptimizer read_optimizer_archive(torch::serialize::InputArchive& archive,
                                           const OptimizerDescription& optimizer) {
  check_optimizer_archive(archive, optimizer);
  SerializedOptimizer serialized;
  for (const auto& group : optimizer.groups) serialized.param_groups().push_back(group);
  const std::string error =
      load_error([&] { torch::optim::serialize<State, Options>(archive, serialized); });
  TORCH_CHECK(error.empty(), optimizer,
              ": the archive is that of an optimizer of another class or with other groups, or it "
              "is corrupt; load the archive of an optimizer with the same class and options (",
              error, ")");
  return serialized;
}

/// Assigns states and options to `optimizer`. Assigns options in place, since users hold references
/// to them.
template <class Options>
void assign_serialized(SerializedOptimizer serialized, torch::optim::Optimizer& optimizer) {
  optimizer.state() = std::move(serialized.state());
  for (std::size_t group = 0; group < serialized.param_groups().size(); ++group) {
    static_cast<Options&>(optimizer.param_groups()[group].options()) =
        static_cast<Options&>(serialized.param_groups()[group].options());
  }
}

/// Throws what loading an archive would throw, as far as it can be checked without loading, and
/// changes nothing. torch::optim optimizers load it into copies of their groups.
inline void check_load(torch::serialize::InputArchive& archive,
                       torch::optim::Optimizer& optimizer) {
  if (const auto* const checker = dynamic_cast<const optim::ArchiveChecker*>(&optimizer)) {
    return checker->check_load(archive);
  }
  const bool is_torch_class = c10::demangle(typeid(optimizer).name()).starts_with("torch::optim::");
  if (!is_torch_class && dynamic_cast<const optim::ShardedOptimizerTag*>(&optimizer) == nullptr)
    return;
  const std::string name = archive_class_name(optimizer);
  check_optimizer_archive(archive, {name.c_str(), optimizer.param_groups()}, is_torch_class);
  if (!is_torch_class) return;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const auto& group : optimizer.param_groups()) groups.push_back(group);
  std::remove_reference_t<decltype(optimizer.state())> states;
  const auto swap_with_optimizer = [&] {
    optimizer.param_groups().swap(groups);
    optimizer.state().swap(states);
  };
  swap_with_optimizer();
  const std::string error = load_error([&] { optimizer.load(archive); });
  swap_with_optimizer();
  TORCH_CHECK(error.empty(), name,
              ": the archive is that of an optimizer of another class, or it is corrupt; load the "
              "archive of an optimizer with the same class and options (",
              error, ")");
}

/// Loads an optimizer's archive with the strong exception guarantee. Drops states that the archive
/// lacks.
inline void load_atomically(torch::serialize::InputArchive& archive,
                            torch::optim::Optimizer& optimizer) {
  check_load(archive, optimizer);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const auto& group : optimizer.param_groups()) groups.push_back(group);
  std::remove_reference_t<decltype(optimizer.state())> states;
  states.swap(optimizer.state());
  try {
    optimizer.load(archive);
  } catch (...) {
    optimizer.state().swap(states);
    optimizer.param_groups().swap(groups);
    throw;
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
