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

// The archives of optimizers, mezzo's and libtorch's: which one fits which optimizer. Everything is
// checked before anything is taken, so that an archive is loaded as a whole or not at all.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

/// A base of optimizers that can check an archive without loading it.
struct ArchiveChecker {
  virtual ~ArchiveChecker() = default;
  /// Throws what `load` would throw, and changes nothing.
  virtual void check_load(torch::serialize::InputArchive& archive) const = 0;
};

}  // namespace optim

namespace detail {

/// The key of an optimizer's class in its archive. libtorch's archives name none.
inline constexpr const char* kClassKey = "optimizer_class";

/// What tells the archives of a class of optimizers from others.
struct ArchiveFormat {
  std::string_view optimizer;
  bool has_torch_class;                       ///< libtorch has an optimizer of this name
  std::array<std::string_view, 3> options;    ///< keys of options that others may lack
  std::array<std::string_view, 2> moments;    ///< keys of every state that has counted a step
  std::array<std::string_view, 2> more = {};  ///< further keys of a state
  bool is_quantized = false;                  ///< its class checks dtypes and shapes
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

/// Returns the format of a class; null for one that is neither mezzo's nor libtorch's.
inline const ArchiveFormat* archive_format(std::string_view optimizer) {
  const auto found = std::find_if(
      kArchiveFormats.begin(), kArchiveFormats.end(),
      [optimizer](const ArchiveFormat& format) { return format.optimizer == optimizer; });
  return found == kArchiveFormats.end() ? nullptr : &*found;
}

/// Returns the class name without namespaces: "AdamW" for `torch::optim::AdamW`,
/// `mezzo::optim::AdamW` and a ShardedOptimizer of it, which read each other's archives.
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

/// The groups and states of an archive, while it is read or written.
class SerializedOptimizer final : public torch::optim::Optimizer {
 public:
  SerializedOptimizer() : Optimizer(std::vector<torch::optim::OptimizerParamGroup>{}, nullptr) {}
  at::Tensor step(LossClosure /*closure*/) override { return {}; }
};

/// Calls `load`. Returns what it threw; empty if it did not throw. Of a value of another type
/// libtorch says that it is a bug in PyTorch, which it is not.
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

/// Returns the number that libtorch keeps as a tensor under `key`; -1 if there is none.
inline int64_t read_size(torch::serialize::InputArchive& archive, const std::string& key) {
  c10::IValue value;
  const bool is_count = archive.try_read(key, value) && value.isTensor() &&
                        value.toTensor().defined() && value.toTensor().numel() == 1 &&
                        value.toTensor().scalar_type() == at::kLong;
  return is_count ? value.toTensor().item<int64_t>() : -1;
}

/// Checks the state of one parameter. \throws c10::Error as check_optimizer_archive
/// \param may_be_sparse  whether moments may be, as those of torch's SGD with sparse gradients are
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
      TORCH_CHECK(value.isInt(), optimizer, ": the state of ", optimizer.describe(parameter),
                  " has a step that is no integer; it is damaged: load an earlier file");
      check_steps(steps = value.toInt());
      continue;
    }
    const bool is_master = key == "master";
    TORCH_CHECK(is_master || has(format.moments, key) || has(format.more, key), optimizer,
                ": the archive is that of another class of optimizer: it has the state ",
                join_sorted(state.keys()), " of ", optimizer.describe(parameter),
                "; load the file of an optimizer that was made as this one");
    TORCH_CHECK(value.isTensor(), optimizer, ": \"", key, "\" of ", optimizer.describe(parameter),
                " is no tensor in the archive; it is damaged: load an earlier file");
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
        optimizer, ": \"", key, "\" of ", optimizer.describe(parameter), " is ", describe(tensor),
        " in the archive; it should be dense and of a floating dtype: load the file of an "
        "optimizer that was made as this one");
  }
  for (const std::string_view moment : format.moments) {
    const bool is_needed = !moment.empty() && (steps > 0 || !has_master);
    TORCH_CHECK(!is_needed || found.count(std::string(moment)) > 0, optimizer,
                ": the archive lacks \"", moment, "\" of ", optimizer.describe(parameter),
                ", and has the state ", join_sorted(state.keys()),
                "; it is that of another class of optimizer, or damaged: load the file of an "
                "optimizer that was made as this one");
  }
}

/// Checks that an archive is that of an optimizer of the class `optimizer.name`, over groups of as
/// many parameters, with states of their shapes.
/// \throws c10::Error, naming what the archive has and what it should have
inline void check_optimizer_archive(torch::serialize::InputArchive& archive,
                                    const OptimizerDescription& optimizer,
                                    bool may_be_sparse = false) {
  c10::IValue version, name;
  TORCH_CHECK(archive.try_read("pytorch_version", version) && version.isString() &&
                  version.toStringRef() == "1.5.0",
              optimizer,
              ": the archive holds no optimizer's state, or that of a libtorch before 1.5; load "
              "what torch::save(optimizer, path) wrote");
  const ArchiveFormat* const format = archive_format(optimizer.name);
  if (archive.try_read(kClassKey, name)) {
    TORCH_CHECK(name.isString() && name.toStringRef() == optimizer.name, optimizer,
                ": the archive is that of ", name.isString() ? name.toStringRef() : "another class",
                "; load the file of an optimizer of this class");
  } else {
    TORCH_CHECK(format == nullptr || format->has_torch_class, optimizer,
                ": the archive names no class, as those of libtorch's optimizers, and libtorch has "
                "no ",
                optimizer, "; load what torch::save(optimizer, path) wrote");
  }
  const auto check = [&optimizer](bool holds, const auto&... message) {
    if (holds) return;
    TORCH_CHECK(false, optimizer, ": ", message...,
                "; load the file of an optimizer that was made as this one");
  };
  torch::serialize::InputArchive groups, group, options, states, state;
  check(archive.try_read("param_groups", groups) && archive.try_read("state", states),
        "the archive lacks its groups or states");
  const int64_t count = read_size(groups, "param_groups/size");
  check(count == static_cast<int64_t>(optimizer.groups.size()),
        "the archive has a different number of parameter groups, ", count,
        ", than this optimizer, ", optimizer.groups.size());
  std::set<std::string> ids;
  // libtorch converts the id to an address, under which it looks up the state: "07" would be 7.
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
          size, " parameters there, and ", params.size(), " here");
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
            i, " has no number of its own in the archive");
      if (format != nullptr && states.try_read(text, state)) {
        check_state_archive(state, *format, params[k], optimizer, may_be_sparse);
      }
    }
  }
  for (const std::string& key : states.keys()) {
    check(is_canonical(key), "the archive has a state under \"", key, "\"");
  }
}

/// Returns the groups and states of an archive, for the parameters and options of `optimizer`.
/// \throws c10::Error as check_optimizer_archive, and for values that State or Options do not take
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
              "is damaged; load the file of an optimizer that was made as this one (",
              error, ")");
  return serialized;
}

/// Gives `optimizer` the states and options that were read. Its options stay where they are, since
/// users hold references to them.
template <class Options>
void assign_serialized(SerializedOptimizer serialized, torch::optim::Optimizer& optimizer) {
  optimizer.state() = std::move(serialized.state());
  for (std::size_t group = 0; group < serialized.param_groups().size(); ++group) {
    static_cast<Options&>(optimizer.param_groups()[group].options()) =
        static_cast<Options&>(serialized.param_groups()[group].options());
  }
}

/// Throws what loading an archive would throw, as far as that shows without loading, and changes
/// nothing. Optimizers of torch::optim load it into copies of their groups.
inline void check_load(torch::serialize::InputArchive& archive,
                       torch::optim::Optimizer& optimizer) {
  if (const auto* const checker = dynamic_cast<const optim::ArchiveChecker*>(&optimizer)) {
    return checker->check_load(archive);
  }
  const bool is_torch_class = c10::demangle(typeid(optimizer).name()).starts_with("torch::optim::");
  if (!is_torch_class && dynamic_cast<const optim::ShardedState*>(&optimizer) == nullptr) return;
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
              ": the archive is that of an optimizer of another class, or it is damaged; load the "
              "file of an optimizer that was made as this one (",
              error, ")");
}

/// Loads all of an optimizer's archive, or leaves it as it was. States that the archive lacks are
/// dropped: there were none when it was saved.
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
