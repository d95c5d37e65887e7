#pragma once

#include <mezzo/base/detail/autocast_mode.h>
#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/checkpoint_directory.h>
#include <mezzo/checkpoint/detail/checkpoint_file.h>
#include <mezzo/checkpoint/detail/stateful.h>
#include <mezzo/optim/detail/ema_params.h>

#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

// A training state to and from a file, of one process or of one rank of several.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

// --- Saving ------------------------------------------------------------------------------------

inline void check_saveable(const char* caller, const std::vector<CheckpointEntry>& entries,
                           std::int64_t step) {
  TORCH_CHECK(!entries.empty(), caller,
              ": the state is empty; add what training goes on from, as in "
              "state.add(\"model\", model)");
  TORCH_CHECK(step >= 0, caller, ": step is ", step, "; it should be at least 0");
}

/// Throws if parameters hold averages in place of their weights: see averaged_parameters.h.
inline void check_not_averaged() {
  TORCH_CHECK(averaged_parameters().withLock([](const auto& all) { return all.empty(); }),
              "a parameter holds an average, for an EmaGuard is alive; let it end first (to export "
              "the averages, torch::save the model)");
}

/// Returns a sentence on the first buffer of a module that holds inf or NaN; empty if there is
/// none. Waits for the devices of the buffers.
inline std::string find_nonfinite_buffer(const std::vector<CheckpointEntry>& entries) {
  const ParameterFqns parameters = get_parameter_fqns(entries);
  for (const CheckpointEntry& one : entries) {
    if (!one.stateful.state_dict) continue;
    for (const auto& [name, tensor] : one.stateful.state_dict()) {
      const bool is_read = tensor.is_floating_point() && tensor.layout() == at::kStrided &&
                           !tensor.is_meta() && tensor.element_size() > 1 && tensor.numel() > 0 &&
                           parameters.count(tensor.unsafeGetTensorImpl()) == 0;
      if (!is_read || tensor.detach().isfinite().all().item<bool>()) continue;
      return "the buffer \"" + one.name + "." + name +
             "\" holds inf or NaN, which no step repairs: load an earlier checkpoint, or reset it";
    }
  }
  return {};
}

/// Returns the values of a state's objects by name, with their own tensors.
inline PythonDict collect_values(const std::vector<CheckpointEntry>& entries) {
  check_not_averaged();
  const ParameterFqns names = get_parameter_fqns(entries);
  PythonDict values = make_dict();
  for (const CheckpointEntry& one : entries) {
    try {
      values.insert(one.name, one.stateful.save(names));
    } catch (...) {
      TORCH_CHECK(false, "\"", one.name, "\" cannot be saved: ", current_exception_message());
    }
  }
  return values;
}

/// Returns what a file holds: the values, and mezzo's own entry.
inline c10::IValue make_root_dict(const PythonDict& values, std::int64_t step,
                                  const c10::IValue& ranks = {}) {
  PythonDict own = make_dict();
  own.insert("format", std::int64_t{2});
  own.insert("step", step);
  if (!ranks.isNone()) own.insert("ranks", ranks);
  PythonDict root_dict = values.copy();
  root_dict.insert(kMezzoKey, own);
  return root_dict;
}

/// Writes a file, and returns its size. `directory_error` is the system's from flushing the
/// directory's own name, or 0.
inline std::uint64_t write_checkpoint_file(const std::filesystem::path& target,
                                           const c10::IValue& root_dict, int directory_error,
                                           const std::function<void(const std::string&)>& warn) {
  AtomicFile file(target);
  write_zip(file, root_dict);
  const int file_error = file.commit();
  const int error = file_error != 0 ? file_error : directory_error;
  if (error != 0) {
    warn(target.string() +
         " is in its place, but whether it would survive a crash of the machine is not known: it "
         "cannot be closed, or its directory not be flushed to the disk: " +
         errno_message(error));
  }
  return file.total();
}

// --- Loading: everything is compared and checked before the first object changes ----------------

/// One of the ranks that read together. `ranks` is 0 for a process without ranks.
struct RankInfo {
  std::int64_t rank = 0;
  std::int64_t world_size = 0;
};

/// What remains to be done for a file that fits.
struct LoadPlan {
  std::filesystem::path path{};
  std::int64_t step = 0;
  std::vector<std::pair<std::string, Stateful::Apply>> pending{};
  /// Differences because another number of ranks wrote the file, one sentence each.
  std::vector<std::string> notes{};
};

inline void check_names(const std::string& file, const CheckpointContents& read,
                        const std::vector<CheckpointEntry>& entries, bool ignore_unexpected) {
  std::string missing, extra;
  for (const CheckpointEntry& one : entries) {
    if (read.values.contains(one.name)) continue;
    missing += (missing.empty() ? " \"" : ", \"") + one.name + "\"";
  }
  for (const auto& entry : read.values) {
    const std::string& name = entry.key().toStringRef();
    const bool is_wanted =
        std::any_of(entries.begin(), entries.end(),
                    [&name](const CheckpointEntry& one) { return one.name == name; });
    if (!is_wanted && !ignore_unexpected) extra += (extra.empty() ? " \"" : ", \"") + name + "\"";
  }
  TORCH_CHECK(missing.empty() && extra.empty(), file, " is another training state's:",
              missing.empty() ? std::string() : " it lacks" + missing + ";",
              extra.empty() ? std::string()
                            : " it has" + extra +
                                  ", which the state does not name: add them, or load with "
                                  "{.ignore_unexpected = true};",
              " nothing was loaded");
}

/// Moves the tensors of a bare state_dict, as Python's `torch.save(model.state_dict(), path)`
/// writes it, under the name of the module, if the module is the only object.
inline void wrap_state_dict(CheckpointContents& read, const std::vector<CheckpointEntry>& entries) {
  if (read.is_training_state || entries.size() != 1 || !entries[0].stateful.state_dict) return;
  for (const auto& entry : read.values) {
    if (!entry.value().isTensor()) return;
  }
  PythonDict named = make_dict();
  named.insert(entries[0].name, read.values);
  read.values = named;
}

/// Returns a state_dict with its floating tensors cast to the dtypes of `own`, as Python's
/// load_state_dict does. Adds a note with the number of tensors that were cast.
inline c10::IValue cast_state_dict(const c10::IValue& value, const std::string& name,
                                   const TensorsByName& own, std::vector<std::string>& notes) {
  if (!value.isGenericDict()) return value;
  PythonDict cast = value.toGenericDict().copy();
  std::string first;
  std::size_t count = 0;
  for (const auto& [key, tensor] : own) {
    const c10::IValue saved = get_item(value, key);
    if (!saved.isTensor() || !tensor.is_floating_point()) continue;
    const at::Tensor read = saved.toTensor();
    const bool is_cast = read.is_floating_point() && read.scalar_type() != tensor.scalar_type() &&
                         read.layout() == at::kStrided && read.sizes() == tensor.sizes();
    if (!is_cast) continue;
    cast.insert_or_assign(key, read.to(tensor.scalar_type()));
    if (count++ > 0) continue;
    first = c10::str(", \"", key, "\" from ", dtype_name(read.scalar_type()), " to ",
                     dtype_name(tensor.scalar_type()));
  }
  if (count > 0) {
    notes.push_back(
        c10::str('"', name, "\" is cast to the dtypes of the model: ", count, " tensors", first));
  }
  return cast;
}

/// Checks one object. Returns the function that changes it; null to leave it as it is.
inline Stateful::Apply plan_entry(const CheckpointEntry& one, const CheckpointContents& read,
                                  const ParameterFqns& names, RankInfo rank_info,
                                  std::vector<std::string>& notes) {
  const c10::IValue of_ranks = get_item(read.ranks, one.name);
  const auto ranks = static_cast<std::int64_t>(of_ranks.isNone() ? 1 : of_ranks.toListRef().size());
  const std::string name = '"' + one.name + '"', had = std::to_string(ranks) + " ranks had";
  if (one.is_per_rank && rank_info.world_size > 0 && rank_info.world_size != ranks) {
    notes.push_back(name + " is left as it is: the file has what " + had + ", and here are " +
                    std::to_string(rank_info.world_size));
    return nullptr;
  }
  if (one.is_per_rank && rank_info.world_size > 1) {
    return one.stateful.load(of_ranks.toListRef()[static_cast<std::size_t>(rank_info.rank)], names);
  }
  if (ranks > 1) notes.push_back(name + " is rank 0's: the file has what " + had);
  const c10::IValue value = read.values.at(one.name);
  const bool may_cast = !read.is_training_state && one.stateful.state_dict;
  return one.stateful.load(
      may_cast ? cast_state_dict(value, one.name, one.stateful.state_dict(), notes) : value, names);
}

/// \throws InvalidCheckpointError, or c10::Error for a file that is whole but does not fit
inline LoadPlan make_load_plan(const std::filesystem::path& path,
                               const std::vector<CheckpointEntry>& entries, bool ignore_unexpected,
                               RankInfo rank_info = {}) {
  check_not_averaged();
  const std::string file = path.string();
  CheckpointContents read = read_checkpoint(path);
  wrap_state_dict(read, entries);
  LoadPlan load_plan{.path = path, .step = read.step};
  check_names(file, read, entries, ignore_unexpected);
  const ParameterFqns names = get_parameter_fqns(entries);
  for (const bool is_archive : {false, true}) {
    for (const CheckpointEntry& one : entries) {
      if (one.stateful.is_archive != is_archive) continue;
      try {
        auto apply = plan_entry(one, read, names, rank_info, load_plan.notes);
        if (apply) load_plan.pending.emplace_back(one.name, std::move(apply));
      } catch (...) {
        TORCH_CHECK(false, file, ": \"", one.name, "\" does not fit: ", current_exception_message(),
                    "; nothing was loaded");
      }
    }
  }
  return load_plan;
}

/// Gives the objects their values, in their order.
inline void apply(LoadPlan& load_plan) {
  const c10::NoGradGuard no_grad;
  const auto end = c10::make_scope_exit([] { clear_autocast_cache(); });
  for (auto& [name, apply_one] : load_plan.pending) {
    try {
      apply_one();
      apply_one = nullptr;  // with what it holds of the file
    } catch (...) {
      TORCH_CHECK(false, load_plan.path.string(), ": \"", name,
                  "\" refuses its value: ", current_exception_message(),
                  "; the objects before it are loaded, and those behind it are not: load another "
                  "checkpoint, or begin anew, before you go on");
    }
  }
}

inline void check_loadable(const char* caller, const std::vector<CheckpointEntry>& entries) {
  TORCH_CHECK(!entries.empty(), caller,
              ": the state is empty; add what was saved, as in state.add(\"model\", model)");
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
