#pragma once

#include <mezzo/base/version.h>
#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/checkpoint/detail/checkpoint_directory.h>
#include <mezzo/checkpoint/detail/checkpoint_file.h>
#include <mezzo/checkpoint/detail/object_entries.h>
#include <mezzo/checkpoint/detail/state_file.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

MEZZO_INLINE TrainingState& TrainingState::add_rng_state() {
  return add_entry("rng_state", detail::make_stateful_rng(), /*is_per_rank=*/true);
}

MEZZO_INLINE TrainingState& TrainingState::add_entry(std::string name, detail::Stateful stateful,
                                                     bool is_per_rank) {
  TORCH_CHECK(!name.empty(), "TrainingState::add: name is empty; give each object one of its own");
  TORCH_CHECK(name != detail::kMezzoKey, "TrainingState::add: the name \"", name,
              "\" is that of the file's own entry; take another");
  for (const detail::CheckpointEntry& other : entries_) {
    TORCH_CHECK(other.name != name, "TrainingState::add: the name \"", name,
                "\" is given twice; give each object one of its own");
  }
  entries_.push_back({std::move(name), std::move(stateful), is_per_rank});
  return *this;
}

// --- A directory
// ------------------------------------------------------------------------------------

MEZZO_INLINE CheckpointManager::CheckpointManager(const std::filesystem::path& directory,
                                                  CheckpointManagerOptions options)
    : directory_(std::filesystem::absolute(directory.empty() ? "." : directory)),
      options_(std::move(options)) {
  TORCH_CHECK(options_.max_to_keep >= 1, "CheckpointManager: max_to_keep is ", options_.max_to_keep,
              "; it should be at least 1, and 2 to have one to fall back to");
  if (const std::int64_t owner_pid = detail::DirectoryLock::owner_pid(directory_); owner_pid != 0) {
    warn(directory_.string() + " is being saved to by process " + std::to_string(owner_pid) +
         ": a save from here will be refused until that one ends; loading is not");
  }
}

MEZZO_INLINE void CheckpointManager::warn(const std::string& text) const {
  if (options_.on_warning) {
    options_.on_warning(text);
  } else {
    TORCH_WARN(text);
  }
}

MEZZO_INLINE SavedCheckpoint CheckpointManager::save(const TrainingState& state,
                                                     std::int64_t step) {
  const auto& entries = state.entries();
  detail::check_saveable("CheckpointManager::save", entries, step);
  if (!warned_nonfinite_) {
    const std::string bad = detail::find_nonfinite_buffer(entries);
    warned_nonfinite_ = !bad.empty();
    if (warned_nonfinite_) warn("a checkpoint is saved, and " + bad);
  }
  return write(detail::make_root_dict(detail::collect_values(entries), step), step);
}

/// Writes a checkpoint, and removes old ones, not counting those known to be corrupt.
MEZZO_INLINE SavedCheckpoint CheckpointManager::write(const c10::IValue& root_dict,
                                                      std::int64_t step) {
  const int directory_error = detail::create_and_fsync_directories(directory_);
  const int lock_error = lock_.acquire(directory_);
  TORCH_CHECK(
      lock_error != EWOULDBLOCK, directory_.string(),
      " is being saved to by another process, or by another CheckpointManager of this one; give "
      "each a directory of its own, or let one of them save");
  if (lock_error != 0 && !std::exchange(warned_no_locks_, true)) {
    warn(directory_.string() + " lies on a file system without locks (" +
         detail::errno_message(lock_error) +
         "): see to it that one process saves there, and remove what a kill leaves, "
         ".checkpoint-*.tmp, yourself");
  }
  detail::remove_stale_temporaries(directory_, [](const std::string& name) {
    return detail::CheckpointName::parse(name).has_value();
  });
  const auto names = detail::list_checkpoints(directory_);
  const std::uint64_t last = names.empty() ? 0 : names.front().sequence;
  TORCH_CHECK(last < std::numeric_limits<std::uint64_t>::max(), names.front().filename(),
              " has the last number that there is, so that none can be newer; move it elsewhere");
  const std::filesystem::path target =
      directory_ / detail::CheckpointName{last + 1, step}.filename();
  const std::uint64_t bytes = detail::write_checkpoint_file(
      target, root_dict, directory_error, [this](const std::string& text) {
        if (!std::exchange(warned_not_durable_, true)) warn(text);
      });
  std::int64_t kept = 0;
  for (const std::filesystem::path& file : checkpoints()) {
    if (kept < options_.max_to_keep) {
      if (corrupt_.count(file) == 0) ++kept;
    } else if (const int error = detail::remove_file(file); error != 0 && error != ENOENT) {
      warn(file.string() + " cannot be removed: " + detail::errno_message(error));
    }
  }
  return {target, bytes};
}

MEZZO_INLINE std::optional<LoadedCheckpoint> CheckpointManager::load_latest(
    const TrainingState& state, const LoadOptions& options) {
  const auto& entries = state.entries();
  detail::check_loadable("CheckpointManager::load_latest", entries);
  std::string failures;
  for (const std::filesystem::path& file : checkpoints()) {
    detail::LoadPlan load_plan;
    try {
      load_plan = detail::make_load_plan(file, entries, options.ignore_unexpected);
    } catch (const std::exception& failure) {
      std::error_code error;
      const auto type = std::filesystem::symlink_status(file, error).type();  // a link may dangle
      if (type == std::filesystem::file_type::not_found) {
        return load_latest(state, options);  // its writer has a newer one
      }
      if (dynamic_cast<const detail::InvalidCheckpointError*>(&failure) == nullptr) throw;
      skip_corrupt(file, failure.what());
      failures += "\n  " + file.string() + " " + failure.what();
      continue;
    }
    detail::apply(load_plan);
    for (const std::string& note : load_plan.notes) warn(file.string() + ": " + note);
    return LoadedCheckpoint{load_plan.path, load_plan.step};
  }
  TORCH_CHECK(failures.empty(), directory_.string(), " has no checkpoint that is whole:", failures,
              "\nMove them elsewhere to begin anew");
  return std::nullopt;
}

MEZZO_INLINE void CheckpointManager::skip_corrupt(const std::filesystem::path& file,
                                                  const std::string& words) {
  corrupt_.insert(file);
  warn(file.string() + " " + words + "; the checkpoint before it is tried");
}

MEZZO_INLINE LoadedCheckpoint CheckpointManager::load(const TrainingState& state, std::int64_t step,
                                                      const LoadOptions& options) {
  std::string steps;
  const auto names = detail::list_checkpoints(directory_);
  const auto found = std::find_if(names.begin(), names.end(), [&](const auto& name) {
    steps += (steps.empty() ? "" : ", ") + std::to_string(name.step);
    return name.step == step;
  });
  TORCH_CHECK(found != names.end(), directory_.string(), " has no checkpoint of step ", step,
              steps.empty() ? ", and no other" : "; load one of the steps " + steps);
  return load_checkpoint(directory_ / found->filename(), state, options);
}

MEZZO_INLINE std::vector<std::filesystem::path> CheckpointManager::checkpoints() const {
  std::vector<std::filesystem::path> files;
  for (const auto& name : detail::list_checkpoints(directory_))
    files.push_back(directory_ / name.filename());
  return files;
}

// --- One file ------------------------------------------------------------------------------------

namespace detail {

/// Writes `root_dict` to `file`, which it replaces atomically.
inline SavedCheckpoint replace_checkpoint_file(const std::filesystem::path& file,
                                               const c10::IValue& root_dict) {
  const std::filesystem::path target = resolve_replaceable_path(file);
  const int directory_error = create_and_fsync_directories(target.parent_path());
  remove_stale_temporaries(target.parent_path(), [&target](const std::string& name) {
    return name == target.filename();
  });
  return {file, write_checkpoint_file(target, root_dict, directory_error,
                                      [](const std::string& text) { TORCH_WARN(text); })};
}

MEZZO_INLINE SavedCheckpoint write_state_dict(const std::filesystem::path& file,
                                              const TrainingState& state) {
  return replace_checkpoint_file(file, collect_values(state.entries()).at("model"));
}

}  // namespace detail

MEZZO_INLINE SavedCheckpoint save_checkpoint(const std::filesystem::path& file,
                                             const TrainingState& state, std::int64_t step) {
  const auto& entries = state.entries();
  detail::check_saveable("save_checkpoint", entries, step);
  if (const std::string bad = detail::find_nonfinite_buffer(entries); !bad.empty()) {
    TORCH_WARN_ONCE("a checkpoint is saved, and ", bad);
  }
  return detail::replace_checkpoint_file(
      file, detail::make_root_dict(detail::collect_values(entries), step));
}

MEZZO_INLINE LoadedCheckpoint load_checkpoint(const std::filesystem::path& file,
                                              const TrainingState& state,
                                              const LoadOptions& options) {
  const auto& entries = state.entries();
  detail::check_loadable("load_checkpoint", entries);
  detail::LoadPlan load_plan;
  try {
    load_plan = detail::make_load_plan(file, entries, options.ignore_unexpected);
  } catch (const detail::InvalidCheckpointError& failure) {
    TORCH_CHECK(false, file.string(), " ", failure.what(), "; ", failure.advice());
  }
  detail::apply(load_plan);
  for (const std::string& note : load_plan.notes) {
    TORCH_WARN(file.string(), ": ", note);
  }
  return {load_plan.path, load_plan.step};
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
