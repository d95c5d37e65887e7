#pragma once

#include <mezzo/base/detail/autocast_mode.h>
#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/checkpoint_file.h>
#include <mezzo/checkpoint/detail/root_dict.h>
#include <mezzo/checkpoint/detail/stateful.h>

#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The calling rank; world_size is 0 in a single process.
struct RankInfo {
  std::int64_t rank = 0;
  std::int64_t world_size = 0;
};

/// The changes that loading a checkpoint makes, after all checks.
struct LoadPlan {
  std::filesystem::path path{};
  std::int64_t step = 0;
  std::vector<std::pair<std::string, Stateful::ApplyFn>> pending{};
  /// Warnings: casts, and differences in world size.
  std::vector<std::string> notes{};
};

inline void check_loadable(const char* caller, const std::vector<CheckpointEntry>& entries) {
  TORCH_CHECK(!entries.empty(), caller,
              ": the state is empty; add what was saved, as in state.add(\"model\", model)");
}

inline void check_names(const std::string& path, const CheckpointContents& contents,
                        const std::vector<CheckpointEntry>& entries, bool ignore_unexpected) {
  std::string missing, unexpected;
  for (const CheckpointEntry& entry : entries) {
    if (contents.values.contains(entry.name)) continue;
    missing += (missing.empty() ? " \"" : ", \"") + entry.name + "\"";
  }
  for (const auto& value : contents.values) {
    const std::string& name = value.key().toStringRef();
    const bool is_expected =
        std::any_of(entries.begin(), entries.end(),
                    [&name](const CheckpointEntry& entry) { return entry.name == name; });
    if (is_expected || ignore_unexpected) continue;
    unexpected += (unexpected.empty() ? " \"" : ", \"") + name + "\"";
  }
  TORCH_CHECK(missing.empty() && unexpected.empty(), path, " does not match the training state:",
              missing.empty() ? std::string() : " missing name(s):" + missing + ";",
              unexpected.empty() ? std::string()
                                 : " unexpected name(s):" + unexpected +
                                       ": add them, or load with {.ignore_unexpected = true};",
              " nothing was loaded");
}

/// Puts a bare state_dict (Python's `torch.save(model.state_dict(), path)`) under the name of the
/// module, if the module is the only entry.
inline void wrap_state_dict(CheckpointContents& contents,
                            const std::vector<CheckpointEntry>& entries) {
  if (contents.has_mezzo_metadata || entries.size() != 1 || !entries[0].stateful.state_dict) return;
  for (const auto& value : contents.values) {
    if (!value.value().isTensor()) return;
  }
  PythonDict wrapped = make_dict();
  wrapped.insert(entries[0].name, contents.values);
  contents.values = wrapped;
}

/// Returns `state_dict` with floating-point tensors cast to the dtypes of `current`, as Python's
/// load_state_dict. Adds a note if tensors were cast.
inline c10::IValue cast_state_dict(const c10::IValue& state_dict, const std::string& name,
                                   const TensorsByName& current, std::vector<std::string>& notes) {
  if (!state_dict.isGenericDict()) return state_dict;
  PythonDict cast = state_dict.toGenericDict().copy();
  std::string first;
  std::size_t num_cast = 0;
  for (const auto& [key, tensor] : current) {
    const c10::IValue value = get_item(state_dict, key);
    if (!value.isTensor() || !tensor.is_floating_point()) continue;
    const at::Tensor saved = value.toTensor();
    const bool is_cast = saved.is_floating_point() && saved.scalar_type() != tensor.scalar_type() &&
                         saved.layout() == at::kStrided && saved.sizes() == tensor.sizes();
    if (!is_cast) continue;
    cast.insert_or_assign(key, saved.to(tensor.scalar_type()));
    if (num_cast++ > 0) continue;
    first = c10::str(", \"", key, "\" from ", dtype_name(saved.scalar_type()), " to ",
                     dtype_name(tensor.scalar_type()));
  }
  if (num_cast > 0) {
    notes.push_back(c10::str('"', name, "\" is cast to the dtypes of the model: ", num_cast,
                             " tensors", first));
  }
  return cast;
}

/// Checks one entry. Returns the function that changes its object; null to leave it unchanged.
inline Stateful::ApplyFn plan_entry(const CheckpointEntry& entry,
                                    const CheckpointContents& contents, const ParameterFqns& names,
                                    RankInfo rank_info, std::vector<std::string>& notes) {
  const c10::IValue per_rank = get_item(contents.per_rank_values, entry.name);
  const auto saved_world_size =
      static_cast<std::int64_t>(per_rank.isNone() ? 1 : per_rank.toListRef().size());
  const std::string name = '"' + entry.name + '"';
  const std::string saved_by = "saved by " + std::to_string(saved_world_size) + " ranks";
  if (entry.is_per_rank && rank_info.world_size > 0 && rank_info.world_size != saved_world_size) {
    notes.push_back(name + " is left unchanged: it was " + saved_by + ", and the world size is " +
                    std::to_string(rank_info.world_size));
    return nullptr;
  }
  if (entry.is_per_rank && rank_info.world_size > 1) {
    return entry.stateful.load(per_rank.toListRef()[static_cast<std::size_t>(rank_info.rank)],
                               names);
  }
  if (saved_world_size > 1) notes.push_back(name + " is loaded from rank 0: it was " + saved_by);
  const c10::IValue value = contents.values.at(entry.name);
  const bool may_cast = !contents.has_mezzo_metadata && entry.stateful.state_dict;
  return entry.stateful.load(
      may_cast ? cast_state_dict(value, entry.name, entry.stateful.state_dict(), notes) : value,
      names);
}

/// \throws InvalidCheckpointError; c10::Error for an intact checkpoint that does not match
inline LoadPlan make_load_plan(const std::filesystem::path& path,
                               const std::vector<CheckpointEntry>& entries, bool ignore_unexpected,
                               RankInfo rank_info = {}) {
  check_no_ema_guard();
  CheckpointContents contents = read_checkpoint(path);
  wrap_state_dict(contents, entries);
  LoadPlan plan{.path = path, .step = contents.step};
  check_names(path.string(), contents, entries, ignore_unexpected);
  const ParameterFqns names = get_parameter_fqns(entries);
  for (const bool is_archive : {false, true}) {
    for (const CheckpointEntry& entry : entries) {
      if (entry.stateful.is_archive != is_archive) continue;
      try {
        auto apply = plan_entry(entry, contents, names, rank_info, plan.notes);
        if (apply) plan.pending.emplace_back(entry.name, std::move(apply));
      } catch (...) {
        TORCH_CHECK(false, path.string(), ": cannot load \"", entry.name,
                    "\": ", current_exception_message(), "; nothing was loaded");
      }
    }
  }
  return plan;
}

/// Changes the objects, in the order of the plan.
inline void apply(LoadPlan& plan) {
  const c10::NoGradGuard no_grad;
  const auto clear_cache = c10::make_scope_exit([] { clear_autocast_cache(); });
  for (auto& [name, apply_entry] : plan.pending) {
    try {
      apply_entry();
      apply_entry = nullptr;  // releases its tensors
    } catch (...) {
      TORCH_CHECK(false, plan.path.string(), ": loading \"", name,
                  "\" threw: ", current_exception_message(),
                  "; the objects before it are loaded, those after it are not: load another "
                  "checkpoint, or reinitialize all objects, before training continues");
    }
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
