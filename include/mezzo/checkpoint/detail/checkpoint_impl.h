#pragma once

#include <mezzo/base/version.h>
#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/checkpoint/detail/checkpoint_file.h>
#include <mezzo/checkpoint/detail/checkpoint_folder.h>
#include <mezzo/checkpoint/detail/object_parts.h>
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

MEZZO_INLINE TrainingState& TrainingState::with_random_state() {
  return add_part("random_state", detail::random_states_part(), /*is_per_rank=*/true);
}

MEZZO_INLINE TrainingState& TrainingState::add_part(std::string name, detail::CheckpointPart part,
                                                    bool is_per_rank) {
  TORCH_CHECK(!name.empty(), "TrainingState::add: name is empty; give each object one of its own");
  TORCH_CHECK(name != detail::kMezzoKey, "TrainingState::add: the name \"", name,
              "\" is that of the file's own entry; take another");
  for (const detail::NamedPart& other : parts_) {
    TORCH_CHECK(other.name != name, "TrainingState::add: the name \"", name,
                "\" is given twice; give each object one of its own");
  }
  parts_.push_back({std::move(name), std::move(part), is_per_rank});
  return *this;
}

// --- A folder ------------------------------------------------------------------------------------

MEZZO_INLINE CheckpointManager::CheckpointManager(const std::filesystem::path& folder,
                                                  CheckpointManagerOptions options)
    : folder_(std::filesystem::absolute(folder.empty() ? "." : folder)),
      options_(std::move(options)) {
  TORCH_CHECK(options_.keep >= 1, "CheckpointManager: keep is ", options_.keep,
              "; it should be at least 1, and 2 to have one to fall back to");
  if (const std::int64_t holder = detail::FolderLock::holder(folder_); holder != 0) {
    warn(folder_.string() + " is being saved to by process " + std::to_string(holder) +
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
  const auto& parts = state.parts();
  detail::check_can_be_saved("CheckpointManager::save", parts, step);
  if (!told_nonfinite_) {
    const std::string bad = detail::nonfinite_buffer(parts);
    told_nonfinite_ = !bad.empty();
    if (told_nonfinite_) warn("a checkpoint is saved, and " + bad);
  }
  return write(detail::document_of(detail::values_of(parts), step), step);
}

/// Writes a checkpoint, and removes old ones, not counting those known to be damaged.
MEZZO_INLINE SavedCheckpoint CheckpointManager::write(const c10::IValue& document,
                                                      std::int64_t step) {
  const int folder_error = detail::make_folder(folder_);
  const int lock_error = lock_.hold(folder_);
  TORCH_CHECK(
      lock_error != EWOULDBLOCK, folder_.string(),
      " is being saved to by another process, or by another CheckpointManager of this one; give "
      "each a folder of its own, or let one of them save");
  if (lock_error != 0 && !std::exchange(told_no_locks_, true)) {
    warn(folder_.string() + " lies on a file system without locks (" +
         detail::errno_message(lock_error) +
         "): see to it that one process saves there, and remove what a kill leaves, "
         ".checkpoint-*.tmp, yourself");
  }
  detail::remove_stale_temporaries(folder_, [](const std::string& name) {
    return detail::CheckpointName::of(name).has_value();
  });
  const auto names = detail::checkpoints_in(folder_);
  const std::uint64_t last = names.empty() ? 0 : names.front().sequence;
  TORCH_CHECK(last < std::numeric_limits<std::uint64_t>::max(), names.front().text(),
              " has the last number that there is, so that none can be newer; move it elsewhere");
  const std::filesystem::path target = folder_ / detail::CheckpointName{last + 1, step}.text();
  const std::uint64_t bytes =
      detail::write_file(target, document, folder_error, [this](const std::string& text) {
        if (!std::exchange(told_not_durable_, true)) warn(text);
      });
  std::int64_t kept = 0;
  for (const std::filesystem::path& file : files()) {
    if (kept < options_.keep) {
      if (damaged_.count(file) == 0) ++kept;
    } else if (const int error = detail::remove_file(file); error != 0 && error != ENOENT) {
      warn(file.string() + " cannot be removed: " + detail::errno_message(error));
    }
  }
  return {target, bytes};
}

MEZZO_INLINE std::optional<LoadedCheckpoint> CheckpointManager::load_newest(
    const TrainingState& state, const LoadOptions& options) {
  const auto& parts = state.parts();
  detail::check_can_be_loaded("CheckpointManager::load_newest", parts);
  std::string damages;
  for (const std::filesystem::path& file : files()) {
    detail::CheckedLoad checked;
    try {
      checked = detail::check_file(file, parts, options.subset);
    } catch (const std::exception& failure) {
      std::error_code error;
      const auto type = std::filesystem::symlink_status(file, error).type();  // a link may dangle
      if (type == std::filesystem::file_type::not_found) {
        return load_newest(state, options);  // its writer has a newer one
      }
      if (dynamic_cast<const detail::UnusableCheckpoint*>(&failure) == nullptr) throw;
      pass_over(file, failure.what());
      damages += "\n  " + file.string() + " " + failure.what();
      continue;
    }
    detail::apply(checked);
    for (const std::string& note : checked.notes) warn(file.string() + ": " + note);
    return LoadedCheckpoint{checked.file, checked.step};
  }
  TORCH_CHECK(damages.empty(), folder_.string(), " has no checkpoint that is whole:", damages,
              "\nMove them elsewhere to begin anew");
  return std::nullopt;
}

MEZZO_INLINE void CheckpointManager::pass_over(const std::filesystem::path& file,
                                               const std::string& words) {
  damaged_.insert(file);
  warn(file.string() + " " + words + "; the checkpoint before it is tried");
}

MEZZO_INLINE LoadedCheckpoint CheckpointManager::load(const TrainingState& state, std::int64_t step,
                                                      const LoadOptions& options) {
  std::string steps;
  const auto names = detail::checkpoints_in(folder_);
  const auto found = std::find_if(names.begin(), names.end(), [&](const auto& name) {
    steps += (steps.empty() ? "" : ", ") + std::to_string(name.step);
    return name.step == step;
  });
  TORCH_CHECK(found != names.end(), folder_.string(), " has no checkpoint of step ", step,
              steps.empty() ? ", and no other" : "; load one of the steps " + steps);
  return load_checkpoint(folder_ / found->text(), state, options);
}

MEZZO_INLINE std::vector<std::filesystem::path> CheckpointManager::files() const {
  std::vector<std::filesystem::path> files;
  for (const auto& name : detail::checkpoints_in(folder_)) files.push_back(folder_ / name.text());
  return files;
}

// --- One file ------------------------------------------------------------------------------------

namespace detail {

/// Writes `document` to `file`, which it replaces atomically.
inline SavedCheckpoint write_one_file(const std::filesystem::path& file,
                                      const c10::IValue& document) {
  const std::filesystem::path target = replaceable_file(file);
  const int folder_error = make_folder(target.parent_path());
  remove_stale_temporaries(target.parent_path(), [&target](const std::string& name) {
    return name == target.filename();
  });
  return {file, write_file(target, document, folder_error,
                           [](const std::string& text) { TORCH_WARN(text); })};
}

MEZZO_INLINE SavedCheckpoint write_state_dict(const std::filesystem::path& file,
                                              const TrainingState& state) {
  return write_one_file(file, values_of(state.parts()).at("model"));
}

}  // namespace detail

MEZZO_INLINE SavedCheckpoint save_checkpoint(const std::filesystem::path& file,
                                             const TrainingState& state, std::int64_t step) {
  const auto& parts = state.parts();
  detail::check_can_be_saved("save_checkpoint", parts, step);
  if (const std::string bad = detail::nonfinite_buffer(parts); !bad.empty()) {
    TORCH_WARN_ONCE("a checkpoint is saved, and ", bad);
  }
  return detail::write_one_file(file, detail::document_of(detail::values_of(parts), step));
}

MEZZO_INLINE LoadedCheckpoint load_checkpoint(const std::filesystem::path& file,
                                              const TrainingState& state,
                                              const LoadOptions& options) {
  const auto& parts = state.parts();
  detail::check_can_be_loaded("load_checkpoint", parts);
  detail::CheckedLoad checked;
  try {
    checked = detail::check_file(file, parts, options.subset);
  } catch (const detail::UnusableCheckpoint& failure) {
    TORCH_CHECK(false, file.string(), " ", failure.what(), "; ", failure.advice());
  }
  detail::apply(checked);
  for (const std::string& note : checked.notes) {
    TORCH_WARN(file.string(), ": ", note);
  }
  return {checked.file, checked.step};
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
