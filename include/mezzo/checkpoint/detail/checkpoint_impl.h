#pragma once

#include <mezzo/base/version.h>
#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/checkpoint/detail/atomic_file.h>
#include <mezzo/checkpoint/detail/checkpoint_file.h>
#include <mezzo/checkpoint/detail/checkpoint_folder.h>
#include <mezzo/checkpoint/detail/checkpoint_reader.h>
#include <mezzo/checkpoint/detail/load_checkpoint.h>
#include <mezzo/checkpoint/detail/object_parts.h>
#include <mezzo/checkpoint/detail/value_parts.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
MEZZO_INLINE TrainingState& TrainingState::with_random_state() {
  return add_part("random_state", detail::random_states_part(),
                  /*is_per_rank=*/true);
}

MEZZO_INLINE TrainingState& TrainingState::add_part(
    std::string name, std::shared_ptr<const detail::CheckpointPart> part, bool is_per_rank) {
  TORCH_CHECK(!name.empty(), "TrainingState::add: name is empty; give each object one of its own");
  for (const detail::NamedPart& other : parts_) {
    TORCH_CHECK(other.name != name, "TrainingState::add: the name \"", name,
                "\" is given twice; give each object one of its own");
  }
  parts_.push_back({std::move(name), std::move(part), is_per_rank});
  return *this;
}

MEZZO_INLINE CheckpointManager::CheckpointManager(std::filesystem::path folder,
                                                  CheckpointManagerOptions options)
    : CheckpointManager(std::move(folder), std::move(options), detail::FileCalls()) {}

MEZZO_INLINE CheckpointManager::CheckpointManager(std::filesystem::path folder,
                                                  CheckpointManagerOptions options,
                                                  detail::FileCalls calls)
    : folder_(detail::absolute_folder(folder)),
      options_(std::move(options)),
      calls_(std::move(calls)) {
  TORCH_CHECK(options_.keep >= 1, "CheckpointManager: keep is ", options_.keep,
              "; it should be at least 1, and 2 to have one to fall back to");
  if (const pid_t holder = detail::FolderLock::holder(folder_); holder != 0) {
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

MEZZO_INLINE void CheckpointManager::hold_lock() {
  using Outcome = detail::FolderLock::Outcome;
  if (!offers_locks_) return;
  const Outcome outcome = lock_.hold(calls_, folder_);
  TORCH_CHECK(
      outcome != Outcome::taken_by_another, folder_.string(),
      " is being saved to by another process, or by another CheckpointManager of this one; give "
      "each a folder of its own, or let one of them save");
  offers_locks_ = outcome == Outcome::held;
  if (!offers_locks_) {
    warn(folder_.string() +
         " lies on a file system without locks: see to it that one process "
         "saves there, and remove what a kill leaves, .checkpoint-*.tmp, yourself");
  }
}

namespace detail {

inline void check_can_be_saved(const char* caller, const TrainingState& state) {
  TORCH_CHECK(!CheckpointAccess::parts(state).empty(), caller,
              ": the state is empty; add what training goes on from, as in "
              "state.add(\"model\", model)");
}

inline void add_parts(const TrainingState& state, CheckpointZip& zip) {
  const auto& parts = CheckpointAccess::parts(state);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const auto& [name, part, is_per_rank] = parts[i];
    try {
      zip.add({.name = name,
               .kind = part->kind(),
               .layout = part->layout(),
               .identity = part->identity(parts)},
              pickled(part->save(), key_prefix(i, /*rank=*/0)));
    } catch (...) {
      TORCH_CHECK(false, "\"", name, "\" cannot be saved: ", message_of_current_exception());
    }
  }
}

}  // namespace detail

MEZZO_INLINE SavedCheckpoint CheckpointManager::save(const TrainingState& state,
                                                     std::int64_t step) {
  detail::check_can_be_saved("CheckpointManager::save", state);
  return write(step, [&state](detail::CheckpointZip& zip) { detail::add_parts(state, zip); });
}

/// Writes a checkpoint; `add` adds its objects.
MEZZO_INLINE SavedCheckpoint CheckpointManager::write(
    std::int64_t step, const std::function<void(detail::CheckpointZip&)>& add) {
  TORCH_CHECK(step >= 0, "CheckpointManager::save: step is ", step, "; it should be at least 0");
  for (auto& parent : detail::make_folder(folder_)) unflushed_.push_back(std::move(parent));
  const int folder_error = detail::flush_folders(calls_, unflushed_);
  hold_lock();
  if (lock_.is_held()) detail::remove_stale_temporaries(calls_, folder_);
  const std::uint64_t sequence = detail::next_sequence(detail::checkpoints_in(folder_));
  SavedCheckpoint saved{detail::checkpoint_path(folder_, sequence, step), 0, false};
  detail::AtomicFile file(calls_, detail::temporary_of(saved.file), saved.file);
  {
    detail::CheckpointZip zip(file, step);
    add(zip);
    zip.finish();
  }
  const int commit_error = file.commit();
  saved.bytes = file.total();
  finish(saved, commit_error != 0 ? commit_error : folder_error);
  return saved;
}

/// Removes old files if the new one is durable. On a file system where no file can be, one more old
/// file is kept.
MEZZO_INLINE void CheckpointManager::finish(SavedCheckpoint& saved, int flush_error) {
  saved.durable = flush_error == 0;
  const bool is_hopeless = detail::is_never_flushed(flush_error);
  if (!saved.durable && !(is_hopeless && told_hopeless_)) {
    warn(saved.file.string() +
         " is in its place, but whether it would survive a crash of the machine is not known: the "
         "folder cannot be flushed to the disk: " +
         detail::reason(flush_error));
    told_hopeless_ = is_hopeless;
  }
  if (saved.durable) prune(options_.keep);
  if (is_hopeless) prune(options_.keep + 1);
}

/// Removes files older than the `keep` newest ones, not counting files known to be damaged.
MEZZO_INLINE void CheckpointManager::prune(std::int64_t keep) {
  std::int64_t kept = 0;
  for (const detail::CheckpointName& name : detail::checkpoints_in(folder_)) {
    if (kept < keep) {
      if (damaged_.count(name.path) == 0) ++kept;
    } else if (calls_.unlink(name.path.c_str()) != 0 && errno != ENOENT) {
      warn(name.path.string() + " cannot be removed: " + detail::reason(errno));
    }
  }
}

MEZZO_INLINE void CheckpointManager::pass_over(const std::filesystem::path& file,
                                               const std::string& words) {
  damaged_.insert(file);
  warn(file.string() + " " + words + "; the checkpoint before it is tried");
}

MEZZO_INLINE std::optional<LoadedCheckpoint> CheckpointManager::load_newest(
    const TrainingState& state, const LoadOptions& options) {
  const auto& parts = detail::CheckpointAccess::parts(state);
  TORCH_CHECK(!parts.empty(),
              "CheckpointManager::load_newest: the state is empty; add what was saved, as in "
              "state.add(\"model\", model)");
  std::string damages;
  for (const detail::CheckpointName& name : detail::checkpoints_in(folder_)) {
    LoadedCheckpoint loaded{name.path, 0};
    detail::DecodedParts decoded;
    try {
      decoded = detail::decode_file(calls_, name.path, parts, options.subset, options.device,
                                    loaded.step);
    } catch (const detail::UnusableCheckpoint& failure) {
      if (!detail::is_there(name.path)) return load_newest(state, options);  // as below
      pass_over(name.path, failure.words());
      damages += "\n  " + name.path.string() + " " + failure.words();
      continue;
    } catch (const c10::Error&) {
      if (detail::is_there(name.path)) throw;
      return load_newest(state, options);  // the writer removed it: there is a newer one
    }
    detail::apply_parts(name.path.string(), std::move(decoded.pending));
    for (const std::string& note : decoded.notes) warn(name.path.string() + ": " + note);
    return loaded;
  }
  TORCH_CHECK(damages.empty(), folder_.string(), " has no checkpoint that is whole:", damages,
              "\nMove them elsewhere to begin anew");
  tell_empty();
  return std::nullopt;
}

MEZZO_INLINE void CheckpointManager::tell_empty() {
  if (std::exchange(told_empty_, true)) return;
  const char* const what = detail::is_there(folder_) ? " has no checkpoint" : " does not exist";
  std::cerr << folder_.string() + what + ": nothing was loaded\n";
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
  return load_checkpoint(found->path, state, options);
}

MEZZO_INLINE std::vector<std::filesystem::path> CheckpointManager::files() const {
  std::vector<std::filesystem::path> files;
  for (const auto& name : detail::checkpoints_in(folder_)) files.push_back(name.path);
  return files;
}

MEZZO_INLINE SavedCheckpoint save_checkpoint(const std::filesystem::path& file,
                                             const TrainingState& state, std::int64_t step) {
  detail::check_can_be_saved("save_checkpoint", state);
  TORCH_CHECK(step >= 0, "save_checkpoint: step is ", step, "; it should be at least 0");
  const detail::FileCalls calls;
  const std::filesystem::path target = detail::replaceable_file(file);
  auto unflushed = detail::make_folder(target.parent_path());
  const int folder_error = detail::flush_folders(calls, unflushed);
  detail::AtomicFile atomic(calls, detail::temporary_of(target), target);
  {
    detail::CheckpointZip zip(atomic, step);
    detail::add_parts(state, zip);
    zip.finish();
  }
  const int commit_error = atomic.commit();
  const int error = commit_error != 0 ? commit_error : folder_error;
  if (error != 0) {
    TORCH_WARN(file.string(),
               " is in its place, but whether it would survive a crash of the machine is not "
               "known: the folder cannot be flushed to the disk: ",
               detail::reason(error));
  }
  return {file, atomic.total(), error == 0};
}

MEZZO_INLINE LoadedCheckpoint load_checkpoint(const std::filesystem::path& file,
                                              const TrainingState& state,
                                              const LoadOptions& options) {
  TORCH_CHECK(
      !detail::CheckpointAccess::parts(state).empty(),
      "load_checkpoint: the state is empty; add what was saved, as in state.add(\"model\", model)");
  LoadedCheckpoint loaded{file, 0};
  detail::DecodedParts decoded;
  try {
    decoded = detail::decode_file(detail::FileCalls(), file, detail::CheckpointAccess::parts(state),
                                  options.subset, options.device, loaded.step);
  } catch (const detail::DamagedCheckpoint& damage) {
    TORCH_CHECK(false, file.string(), " is damaged (", damage.what(),
                "); load the checkpoint before it");
  } catch (const detail::UnopenedCheckpoint& failure) {
    TORCH_CHECK(false, file.string(), " cannot be opened (", failure.what(),
                "); name a checkpoint, or give its folder to a CheckpointManager");
  } catch (const detail::ForeignCheckpoint& foreign) {
    TORCH_CHECK(false, file.string(), " is not a checkpoint of mezzo's (", foreign.what(),
                "); read a file by torch::save with torch::load(model, path), and one by Python's "
                "torch.save with torch::pickle_load");
  }
  detail::apply_parts(file.string(), std::move(decoded.pending));
  for (const std::string& note : decoded.notes) {
    TORCH_WARN(file.string(), ": ", note);
  }
  return loaded;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
