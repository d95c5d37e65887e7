#pragma once

#include <mezzo/base/detail/cast_cache.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/checkpoint/detail/atomic_file.h>
#include <mezzo/checkpoint/detail/checkpoint_file.h>
#include <mezzo/checkpoint/detail/checkpoint_folder.h>
#include <mezzo/checkpoint/detail/object_parts.h>

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iostream>
#include <optional>
#include <string>
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

namespace detail {

// --- Saving ------------------------------------------------------------------------------------

inline void check_can_be_saved(const char* caller, const TrainingState& state, std::int64_t step) {
  TORCH_CHECK(!CheckpointAccess::parts(state).empty(), caller,
              ": the state is empty; add what training goes on from, as in "
              "state.add(\"model\", model)");
  TORCH_CHECK(step >= 0, caller, ": step is ", step, "; it should be at least 0");
}

/// Returns the values of a state's objects by name, with their own tensors.
inline PythonDict values_of(const TrainingState& state) {
  const auto& parts = CheckpointAccess::parts(state);
  const ParameterNames names = parameter_names(parts);
  PythonDict values = python_dict();
  for (const NamedPart& one : parts) {
    try {
      values.insert(one.name, one.part.save(names));
    } catch (...) {
      TORCH_CHECK(false, "\"", one.name, "\" cannot be saved: ", message_of_current_exception());
    }
  }
  return values;
}

/// Returns what a file holds: the values, and mezzo's own entry.
inline c10::IValue document_of(const PythonDict& values, std::int64_t step,
                               const c10::IValue& ranks = {}) {
  PythonDict own = python_dict();
  own.insert("format", std::int64_t{2});
  own.insert("step", step);
  if (!ranks.isNone()) own.insert("ranks", ranks);
  PythonDict document = values.copy();
  document.insert(kMezzoKey, own);
  return document;
}

/// Writes a file. `folder_error` is the system's from flushing the folder's own name, or 0.
inline SavedCheckpoint write_file(const std::filesystem::path& target, const c10::IValue& document,
                                  int folder_error,
                                  const std::function<void(const std::string&)>& warn) {
  AtomicFile file(temporary_of(target), target);
  write_zip(file, document);
  const int file_error = file.commit();
  const int error = file_error != 0 ? file_error : folder_error;
  if (error != 0) {
    warn(target.string() +
         " is in its place, but whether it would survive a crash of the machine is not known: the "
         "folder cannot be flushed to the disk: " +
         reason(error));
  }
  return {target, file.total(), error == 0};
}

// --- Loading: everything is compared and checked before the first object changes
// -------------------

/// One of the ranks that read together. `ranks` is 0 for a process without ranks.
struct RankOf {
  std::int64_t rank = 0;
  std::int64_t ranks = 0;
};

/// What remains to be done for a file that fits.
struct CheckedLoad {
  LoadedCheckpoint loaded{};
  std::vector<std::pair<std::string, CheckpointPart::Apply>> pending{};
  /// Differences because another number of ranks wrote the file, one sentence each.
  std::vector<std::string> notes{};
};

inline void check_names(const std::string& file, const ReadCheckpoint& read,
                        const std::vector<NamedPart>& parts, bool subset, RankOf who) {
  std::string missing, extra;
  for (const NamedPart& one : parts) {
    const bool is_optional = one.is_per_rank && who.ranks > 0;
    if (read.values.contains(one.name) || is_optional) continue;
    missing += (missing.empty() ? " \"" : ", \"") + one.name + "\"";
  }
  for (const auto& entry : read.values) {
    const std::string& name = entry.key().toStringRef();
    const bool is_wanted = std::any_of(parts.begin(), parts.end(),
                                       [&name](const NamedPart& one) { return one.name == name; });
    if (is_wanted || subset) continue;
    extra += (extra.empty() ? " \"" : ", \"") + name + "\"";
  }
  TORCH_CHECK(missing.empty() && extra.empty(), file, " is another training state's:",
              missing.empty() ? std::string() : " it lacks" + missing + ";",
              extra.empty()
                  ? std::string()
                  : " it has" + extra +
                        ", which the state does not name: add them, or load with {.subset = true};",
              " nothing was loaded");
}

/// Checks one object. Returns the function that changes it; null to leave it as it is.
inline CheckpointPart::Apply check_part(const NamedPart& one, const ReadCheckpoint& read,
                                        const LoadContext& context, RankOf who,
                                        std::vector<std::string>& notes) {
  const c10::IValue of_ranks = item(read.ranks, one.name);
  const auto ranks = static_cast<std::int64_t>(of_ranks.isNone() ? 1 : of_ranks.toListRef().size());
  const std::string name = '"' + one.name + '"';
  if (one.is_per_rank && who.ranks == ranks && ranks > 1) {
    return one.part.load(of_ranks.toListRef()[static_cast<std::size_t>(who.rank)], context);
  }
  if (!one.is_per_rank || who.ranks <= 1) {
    if (ranks > 1) {
      notes.push_back(name + " is rank 0's: the file has what " + std::to_string(ranks) +
                      " ranks had");
    }
    return one.part.load(read.values.at(one.name), context);
  }
  const bool begins_anew = one.part.begin_anew != nullptr && read.values.contains(one.name);
  notes.push_back(name +
                  (begins_anew ? " is begun anew, from the file's, the step and the rank"
                               : " is left as it is") +
                  ": the file has what " + std::to_string(ranks) + " ranks had, and here are " +
                  std::to_string(who.ranks));
  if (!begins_anew) return nullptr;
  return one.part.begin_anew(read.values.at(one.name), "step " + std::to_string(read.step) +
                                                           ", rank " + std::to_string(who.rank) +
                                                           " of " + std::to_string(who.ranks));
}

/// \throws UnusableCheckpoint, or c10::Error for a file that is whole but does not fit
inline CheckedLoad check_file(const std::filesystem::path& path, const TrainingState& state,
                              const LoadOptions& options, RankOf who = {}) {
  const auto& parts = CheckpointAccess::parts(state);
  const std::string file = path.string();
  const ReadCheckpoint read = read_checkpoint(path);
  check_names(file, read, parts, options.subset, who);
  CheckedLoad checked{.loaded = {path, read.step}};
  const LoadContext context{parameter_names(parts), options.device};
  for (const NamedPart& one : parts) {
    try {
      auto apply = check_part(one, read, context, who, checked.notes);
      if (apply) checked.pending.emplace_back(one.name, std::move(apply));
    } catch (...) {
      TORCH_CHECK(false, file, ": \"", one.name,
                  "\" does not fit: ", message_of_current_exception(), "; nothing was loaded");
    }
  }
  return checked;
}

/// Gives the objects their values, in their order.
inline void apply(CheckedLoad& checked) {
  const c10::NoGradGuard no_grad;
  const auto end = c10::make_scope_exit([] { drop_weight_casts(); });
  for (auto& [name, apply_one] : checked.pending) {
    try {
      apply_one();
      apply_one = nullptr;  // with what it holds of the file
    } catch (...) {
      TORCH_CHECK(false, checked.loaded.file.string(), ": \"", name,
                  "\" refuses its value: ", message_of_current_exception(),
                  "; the objects before it are loaded, and those behind it are not: load another "
                  "checkpoint, or begin anew, before you go on");
    }
  }
}

inline void check_can_be_loaded(const char* caller, const TrainingState& state) {
  TORCH_CHECK(!CheckpointAccess::parts(state).empty(), caller,
              ": the state is empty; add what was saved, as in state.add(\"model\", model)");
}

}  // namespace detail

// --- A folder ------------------------------------------------------------------------------------

MEZZO_INLINE CheckpointManager::CheckpointManager(std::filesystem::path folder,
                                                  CheckpointManagerOptions options)
    : folder_(detail::absolute_folder(folder)), options_(std::move(options)) {
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
  const Outcome outcome = lock_.hold(folder_);
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

MEZZO_INLINE SavedCheckpoint CheckpointManager::save(const TrainingState& state,
                                                     std::int64_t step) {
  detail::check_can_be_saved("CheckpointManager::save", state, step);
  return write(detail::document_of(detail::values_of(state), step), step);
}

/// Writes a checkpoint, and removes old ones; one fewer if the new one may not survive a crash.
MEZZO_INLINE SavedCheckpoint CheckpointManager::write(const c10::IValue& document,
                                                      std::int64_t step) {
  const int folder_error = detail::make_folder(folder_);
  hold_lock();
  if (lock_.is_held()) detail::remove_stale_temporaries(folder_);
  const std::uint64_t sequence = detail::next_sequence(detail::checkpoints_in(folder_));
  const SavedCheckpoint saved =
      detail::write_file(detail::checkpoint_path(folder_, sequence, step), document, folder_error,
                         [this](const std::string& text) {
                           if (!std::exchange(told_not_durable_, true)) warn(text);
                         });
  prune(options_.keep + (saved.durable ? 0 : 1));
  return saved;
}

/// Removes files older than the `keep` newest ones, not counting files known to be damaged.
MEZZO_INLINE void CheckpointManager::prune(std::int64_t keep) {
  std::int64_t kept = 0;
  for (const detail::CheckpointName& name : detail::checkpoints_in(folder_)) {
    if (kept < keep) {
      if (damaged_.count(name.path) == 0) ++kept;
    } else if (::unlink(name.path.c_str()) != 0 && errno != ENOENT) {
      warn(name.path.string() + " cannot be removed: " + detail::reason(errno));
    }
  }
}

MEZZO_INLINE std::optional<LoadedCheckpoint> CheckpointManager::load_newest(
    const TrainingState& state, const LoadOptions& options) {
  detail::check_can_be_loaded("CheckpointManager::load_newest", state);
  std::string damages;
  for (const detail::CheckpointName& name : detail::checkpoints_in(folder_)) {
    detail::CheckedLoad checked;
    try {
      checked = detail::check_file(name.path, state, options);
    } catch (const detail::UnusableCheckpoint& failure) {
      if (!detail::is_there(name.path)) return load_newest(state, options);  // as below
      pass_over(name.path, failure.what());
      damages += "\n  " + name.path.string() + " " + failure.what();
      continue;
    } catch (const c10::Error&) {
      if (detail::is_there(name.path)) throw;
      return load_newest(state, options);  // the writer removed it: there is a newer one
    }
    detail::apply(checked);
    for (const std::string& note : checked.notes) warn(name.path.string() + ": " + note);
    return checked.loaded;
  }
  TORCH_CHECK(damages.empty(), folder_.string(), " has no checkpoint that is whole:", damages,
              "\nMove them elsewhere to begin anew");
  tell_empty();
  return std::nullopt;
}

MEZZO_INLINE void CheckpointManager::pass_over(const std::filesystem::path& file,
                                               const std::string& words) {
  damaged_.insert(file);
  warn(file.string() + " " + words + "; the checkpoint before it is tried");
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

// --- One file ------------------------------------------------------------------------------------

MEZZO_INLINE SavedCheckpoint save_checkpoint(const std::filesystem::path& file,
                                             const TrainingState& state, std::int64_t step) {
  detail::check_can_be_saved("save_checkpoint", state, step);
  const std::filesystem::path target = detail::replaceable_file(file);
  const int folder_error = detail::make_folder(target.parent_path());
  detail::remove_stale_temporaries_of(target);
  SavedCheckpoint saved =
      detail::write_file(target, detail::document_of(detail::values_of(state), step), folder_error,
                         [](const std::string& text) { TORCH_WARN(text); });
  saved.file = file;
  return saved;
}

MEZZO_INLINE LoadedCheckpoint load_checkpoint(const std::filesystem::path& file,
                                              const TrainingState& state,
                                              const LoadOptions& options) {
  detail::check_can_be_loaded("load_checkpoint", state);
  detail::CheckedLoad checked;
  try {
    checked = detail::check_file(file, state, options);
  } catch (const detail::UnusableCheckpoint& failure) {
    TORCH_CHECK(false, file.string(), " ", failure.what(), "; ", failure.advice());
  }
  detail::apply(checked);
  for (const std::string& note : checked.notes) TORCH_WARN(file.string(), ": ", note);
  return checked.loaded;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
