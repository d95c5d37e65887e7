#pragma once

#include <mezzo/base/detail/exception_message.h>
#include <mezzo/base/detail/platform.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/checkpoint/detail/archive_conversion.h>
#include <mezzo/checkpoint/detail/atomic_file.h>
#include <mezzo/checkpoint/detail/checkpoint_file.h>
#include <mezzo/checkpoint/detail/checkpoint_name.h>
#include <mezzo/checkpoint/detail/directory_lock.h>
#include <mezzo/checkpoint/detail/load_plan.h>
#include <mezzo/checkpoint/detail/object_entries.h>
#include <mezzo/checkpoint/detail/optimizer_entry.h>
#include <mezzo/checkpoint/detail/root_dict.h>

#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <mutex>
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
  TORCH_CHECK(!name.empty(), "TrainingState::add: name is empty; pass a unique name");
  TORCH_CHECK(name != detail::kMezzoKey, "TrainingState::add: the name \"", name,
              "\" is reserved; pass another name");
  for (const detail::CheckpointEntry& other : entries_) {
    TORCH_CHECK(other.name != name, "TrainingState::add: the name \"", name,
                "\" is already in use; pass a unique name");
  }
  entries_.push_back({std::move(name), std::move(stateful), is_per_rank});
  return *this;
}

// --- CheckpointManager ---------------------------------------------------------------------------

MEZZO_INLINE CheckpointManager::CheckpointManager(const std::filesystem::path& directory,
                                                  CheckpointManagerOptions options)
    : directory_(std::filesystem::absolute(directory.empty() ? "." : directory)),
      options_(std::move(options)) {
  TORCH_CHECK(options_.max_to_keep >= 1, "CheckpointManager: max_to_keep is ", options_.max_to_keep,
              "; it should be at least 1 (at least 2 to fall back to the previous checkpoint)");
  if (const std::int64_t owner_pid = detail::DirectoryLock::owner_pid(directory_); owner_pid != 0) {
    warn(directory_.string() + " is being saved to by process " + std::to_string(owner_pid) +
         ": saving here throws until that process ends; loading works");
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
  const std::string earlier_error = detail::get_error_message([this] { wait(); });
  SavedCheckpoint saved = write(collect("CheckpointManager::save", state, step), step);
  TORCH_CHECK(earlier_error.empty(), saved.path.string(),
              " is saved, but the save_async before it failed: ", earlier_error);
  return saved;
}

MEZZO_INLINE void CheckpointManager::save_async(const TrainingState& state, std::int64_t step) {
  write_async(collect("CheckpointManager::save_async", state, step), step);
}

/// A save in another thread, which a forked child does not have: the child neither waits, nor
/// destroys what the thread was using.
struct CheckpointManager::AsyncSave {
  /// Returns false in a forked child.
  bool join() {
    if (pid != detail::process_id()) return false;
    if (done.valid()) done.wait();
    return true;
  }
  static void release(AsyncSave* save) {
    if (save->join()) delete save;
  }

  int pid = detail::process_id();
  std::vector<std::string> warnings{};
  std::future<SavedCheckpoint> done{};
};

MEZZO_INLINE void CheckpointManager::write_async(const c10::IValue& root_dict, std::int64_t step) {
  static struct PendingSaves {
    ~PendingSaves() {  // std::exit waits, because a save uses static objects
      for (const auto& save : saves) {
        if (const auto running = save.lock()) running->join();
      }
    }
    std::mutex mutex{};
    std::vector<std::weak_ptr<AsyncSave>> saves{};
  } pending;
  const auto write = prepare_write(step);
  detail::TensorCopies copies;
  const c10::NoGradGuard no_grad;
  auto copy = detail::copy_to_devices(root_dict, {}, at::kCPU, &copies);
  const std::shared_ptr<AsyncSave> save(new AsyncSave, AsyncSave::release);
  const auto warn_later = [save = save.get()](const auto& text) { save->warnings.push_back(text); };
  save->done =
      std::async(std::launch::async, [write, copy = std::move(copy), warn_later]() mutable {
        return write(std::exchange(copy, {}), warn_later);  // frees the copy
      });
  const std::lock_guard guard(pending.mutex);
  std::erase_if(pending.saves, [](const auto& old) { return old.expired(); });
  pending.saves.push_back(async_save_ = save);
}

MEZZO_INLINE void CheckpointManager::wait() {
  const auto save = std::exchange(async_save_, nullptr);
  if (save == nullptr || !save->join()) return;
  for (const std::string& text : save->warnings) warn(text);
  (void)save->done.get();
}

MEZZO_INLINE CheckpointManager::~CheckpointManager() {
  const std::string error = detail::get_error_message([this] { wait(); });
  if (error.empty()) return;
  (void)detail::get_error_message([&] { warn("CheckpointManager::save_async: " + error); });
}

MEZZO_INLINE c10::IValue CheckpointManager::collect(const char* caller, const TrainingState& state,
                                                    std::int64_t step) {
  wait();
  const auto& entries = state.entries();
  detail::check_saveable(caller, entries, step);
  if (!warned_nonfinite_) {
    const std::string warning = detail::get_nonfinite_buffer_warning(entries);
    warned_nonfinite_ = !warning.empty();
    if (warned_nonfinite_) warn("saving a checkpoint, but " + warning);
  }
  return detail::make_root_dict(detail::collect_values(entries), step);
}

MEZZO_INLINE SavedCheckpoint CheckpointManager::write(const c10::IValue& root_dict,
                                                      std::int64_t step) {
  return prepare_write(step)(root_dict, [this](const std::string& text) { warn(text); });
}

/// Locks the directory. Returns a function that writes the next checkpoint and removes old ones,
/// which does not use this object, so that another thread can call it. Checkpoints known to be
/// corrupt do not count as kept.
MEZZO_INLINE CheckpointManager::WriteFn CheckpointManager::prepare_write(std::int64_t step) {
  const int directory_error = detail::create_and_fsync_directories(directory_);
  const int lock_error = lock_.acquire(directory_);
  TORCH_CHECK(
      lock_error != EWOULDBLOCK, directory_.string(),
      " is being saved to by another process, or by another CheckpointManager of this process; use "
      "a separate directory for each, or save from one of them");
  if (lock_error != 0 && !std::exchange(warned_no_locks_, true)) {
    warn(directory_.string() + " is on a file system without locks (" +
         detail::errno_message(lock_error) +
         "): make sure that only one process saves there, and remove .checkpoint-*.tmp files that "
         "a killed process leaves");
  }
  detail::remove_stale_temporaries(directory_, [](const std::string& name) {
    return detail::CheckpointName::parse(name).has_value();
  });
  const auto names = detail::list_checkpoints(directory_);
  const std::uint64_t last = names.empty() ? 0 : names.front().sequence;
  TORCH_CHECK(last < std::numeric_limits<std::uint64_t>::max(), names.front().filename(),
              " has the largest sequence number, so that no checkpoint can be newer; move it "
              "elsewhere");
  const std::filesystem::path target =
      directory_ / detail::CheckpointName{last + 1, step}.filename();
  return [target, directory_error, directory = directory_, max_to_keep = options_.max_to_keep,
          corrupt = corrupt_, warned_not_durable = warned_not_durable_](
             const c10::IValue& root_dict, const WarnFn& warn) -> SavedCheckpoint {
    const std::uint64_t size_bytes = detail::write_atomically(
        target, directory_error,
        [&root_dict](detail::AtomicFile& file) { detail::write_zip(file, root_dict); },
        [&](const std::string& text) {
          if (!std::exchange(*warned_not_durable, true)) warn(text);
        });
    std::int64_t kept = 0;
    for (const detail::CheckpointName& name : detail::list_checkpoints(directory)) {
      const std::filesystem::path path = directory / name.filename();
      if (kept < max_to_keep) {
        if (corrupt.count(path) == 0) ++kept;
      } else if (const int error = detail::remove_file(path); error != 0 && error != ENOENT) {
        warn(path.string() + " cannot be removed: " + detail::errno_message(error));
      }
    }
    return {target, size_bytes};
  };
}

MEZZO_INLINE std::optional<LoadedCheckpoint> CheckpointManager::load_latest(
    const TrainingState& state, const LoadOptions& options) {
  wait();
  const auto& entries = state.entries();
  detail::check_loadable("CheckpointManager::load_latest", entries);
  std::string failures;
  for (const std::filesystem::path& path : checkpoints()) {
    detail::LoadPlan plan;
    try {
      plan = detail::make_load_plan(path, entries, options.ignore_unexpected);
    } catch (const std::exception& failure) {
      std::error_code error;
      // Not std::filesystem::exists, which follows symlinks: a dangling one is skipped with a
      // warning.
      const auto type = std::filesystem::symlink_status(path, error).type();
      if (type == std::filesystem::file_type::not_found) {
        return load_latest(state, options);  // the writer removed it after saving a newer one
      }
      if (dynamic_cast<const detail::InvalidCheckpointError*>(&failure) == nullptr) throw;
      skip_corrupt(path, failure.what());
      failures += "\n  " + path.string() + " " + failure.what();
      continue;
    }
    detail::apply(plan);
    for (const std::string& note : plan.notes) warn(path.string() + ": " + note);
    return LoadedCheckpoint{plan.path, plan.step};
  }
  TORCH_CHECK(failures.empty(), directory_.string(), " has no intact checkpoint:", failures,
              "\nMove them elsewhere to start from scratch");
  return std::nullopt;
}

MEZZO_INLINE void CheckpointManager::skip_corrupt(const std::filesystem::path& path,
                                                  const std::string& reason) {
  corrupt_.insert(path);
  warn(path.string() + " " + reason + "; trying the previous checkpoint");
}

MEZZO_INLINE LoadedCheckpoint CheckpointManager::load(const TrainingState& state, std::int64_t step,
                                                      const LoadOptions& options) {
  wait();
  std::string steps;
  const auto names = detail::list_checkpoints(directory_);
  const auto found = std::find_if(names.begin(), names.end(), [&](const auto& name) {
    steps += (steps.empty() ? "" : ", ") + std::to_string(name.step);
    return name.step == step;
  });
  TORCH_CHECK(found != names.end(), directory_.string(), " has no checkpoint of step ", step,
              steps.empty() ? ", nor of any other step" : "; load one of the steps " + steps);
  return load_checkpoint(directory_ / found->filename(), state, options);
}

MEZZO_INLINE std::vector<std::filesystem::path> CheckpointManager::checkpoints() const {
  std::vector<std::filesystem::path> paths;
  for (const auto& name : detail::list_checkpoints(directory_)) {
    paths.push_back(directory_ / name.filename());
  }
  return paths;
}

// --- Single files --------------------------------------------------------------------------------

namespace detail {

inline SavedCheckpoint replace_checkpoint_file(const std::filesystem::path& path,
                                               const c10::IValue& root_dict) {
  return {path,
          replace_atomically(path, [&root_dict](AtomicFile& file) { write_zip(file, root_dict); })};
}

MEZZO_INLINE SavedCheckpoint write_state_dict(const std::filesystem::path& path,
                                              const TrainingState& state) {
  return replace_checkpoint_file(path, collect_values(state.entries()).at("model"));
}

}  // namespace detail

MEZZO_INLINE SavedCheckpoint save_checkpoint(const std::filesystem::path& path,
                                             const TrainingState& state, std::int64_t step) {
  const auto& entries = state.entries();
  detail::check_saveable("save_checkpoint", entries, step);
  if (const auto warning = detail::get_nonfinite_buffer_warning(entries); !warning.empty()) {
    TORCH_WARN_ONCE("saving a checkpoint, but ", warning);
  }
  return detail::replace_checkpoint_file(
      path, detail::make_root_dict(detail::collect_values(entries), step));
}

MEZZO_INLINE LoadedCheckpoint load_checkpoint(const std::filesystem::path& path,
                                              const TrainingState& state,
                                              const LoadOptions& options) {
  const auto& entries = state.entries();
  detail::check_loadable("load_checkpoint", entries);
  detail::LoadPlan plan;
  try {
    plan = detail::make_load_plan(path, entries, options.ignore_unexpected);
  } catch (const detail::InvalidCheckpointError& failure) {
    TORCH_CHECK(false, path.string(), " ", failure.what(), "; ", failure.advice());
  }
  detail::apply(plan);
  for (const std::string& note : plan.notes) {
    TORCH_WARN(path.string(), ": ", note);
  }
  return {plan.path, plan.step};
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
