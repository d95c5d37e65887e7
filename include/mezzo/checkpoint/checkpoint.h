/// \file
/// Saves the training state in one file: model, optimizer, scaler, schedule, RNG states and
/// position in the data. A crash or a full disk leaves either the old or the new file intact.
/// Corrupt files are detected before anything is loaded.
///
/// The format is torch.save's, so Python reads checkpoints without mezzo:
/// \code{.py}
///   checkpoint = torch.load("runs/ner/checkpoint-000012-step-3400.pt", weights_only=True)
///   model.load_state_dict(checkpoint["model"])
///   optimizer.load_state_dict(checkpoint["optimizer"])      # Adam, AdamW or SGD
///   checkpoint["mezzo"]["step"], checkpoint["epoch"]
/// \endcode
/// Files that Python wrote with `torch.save({"model": model.state_dict(), "optimizer":
/// optimizer.state_dict()}, path)` load too; load_state_dict reads `torch.save(model.state_dict(),
/// path)`.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/directory_lock.h>
#include <mezzo/checkpoint/detail/stateful.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// The objects of a training run, by name. Holds references: every object must outlive it.
///
/// \code
///   mezzo::TrainingState state;
///   state.add("model", model).add("optimizer", optimizer).add("scaler", scaler);
///   state.add("schedule", schedule).add("epoch", epoch).add_rng_state();
/// \endcode
///
/// Objects are loaded in the order in which they were added, except that objects that serialize
/// through torch archives (schedules, scalers, Ema) are loaded last.
class TrainingState {
 public:
  /// Adds `object` under `name`. Supported types:
  /// - a module, a module holder (`torch::nn::Linear`) or a std::shared_ptr to a module: its
  ///   parameters and buffers, loaded in place. A holder or pointer may be reassigned later. Names,
  ///   dtypes and shapes in the checkpoint must match;
  /// - a torch::optim::Optimizer or a pointer to one, with its master weights, averages and step
  ///   counts. The checkpoint must have the same class and the same parameter groups, with equal
  ///   shapes and names in the same order. Custom classes use their own `save` and `load`;
  /// - MasterWeights;
  /// - any other type that torch::save and torch::load accept: GradScaler, LrSchedule, Ema;
  /// - an integer, a bool, a float or double, a std::string, a tensor, a std::vector of integers or
  ///   real numbers (such as a shuffled order; its length may change), or a
  ///   std::map<std::string, double>;
  /// - an at::Generator, or a standard library engine (std::mt19937);
  /// - a std::vector<at::Tensor>, loaded in place.
  /// Optimizer states and single tensors get new memory at load: capture CUDA graphs afterwards.
  /// Tensors keep their devices; an undefined tensor is loaded to the CPU.
  /// \throws c10::Error for an empty name, the name "mezzo", or a name that is already in use
  template <class T>
  // clang-tidy does not see std::move in a template.
  // NOLINTNEXTLINE(performance-unnecessary-value-param)
  TrainingState& add(std::string name, T& object) {
    return add_entry(std::move(name), detail::make_stateful(object), /*is_per_rank=*/false);
  }

  /// Adds a value through two callables:
  ///
  ///     state.add("loader", [&] { return loader.position(); },
  ///               [&](std::int64_t position) { loader.seek(position); });
  ///
  /// \param save  called at each save. Returns a copyable value: a number, string, tensor, vector
  ///   of integers or engine
  /// \param load  called at each load with the value that `save` returned
  template <class Save, class Load>
  // NOLINTNEXTLINE(performance-unnecessary-value-param)
  TrainingState& add(std::string name, Save save, Load load) {
    return add_entry(std::move(name),
                     detail::make_stateful_from_callables(std::move(save), std::move(load)),
                     /*is_per_rank=*/false);
  }

  /// Adds an object that differs between ranks, such as a generator or a position in the data.
  /// DistributedCheckpointManager saves the value of every rank. CheckpointManager saves it like
  /// any other object, and loads rank 0's value from a distributed checkpoint, with a warning.
  template <class T>
  // NOLINTNEXTLINE(performance-unnecessary-value-param)
  TrainingState& add_per_rank(std::string name, T& object) {
    return add_entry(std::move(name), detail::make_stateful(object), /*is_per_rank=*/true);
  }

  /// Adds the default generators of the CPU and of every CUDA device as a per-rank object named
  /// "rng_state". Initializes CUDA if there is a device. If the number of CUDA devices has changed,
  /// loading warns and sets the generators of the devices that exist.
  TrainingState& add_rng_state();

  /// Returns the entries in the order in which they were added.
  const std::vector<detail::CheckpointEntry>& entries() const noexcept { return entries_; }

 private:
  TrainingState& add_entry(std::string name, detail::Stateful stateful, bool is_per_rank);

  std::vector<detail::CheckpointEntry> entries_;
};

/// Result of saving a checkpoint.
struct SavedCheckpoint {
  std::filesystem::path path;
  std::uint64_t size_bytes = 0;
};

/// Result of loading a checkpoint.
struct LoadedCheckpoint {
  std::filesystem::path path;
  std::int64_t step = 0;  ///< the `step` argument of `save`
};

/// Options for loading a checkpoint.
struct LoadOptions {
  /// Ignores objects in the checkpoint that the state does not name, for example to load the model
  /// alone.
  bool ignore_unexpected = false;
};

/// Options of CheckpointManager.
struct CheckpointManagerOptions {
  /// Number of most recent checkpoints to keep; >= 1. With two or more, loading can fall back to
  /// the previous checkpoint if the latest is corrupt. Checkpoints known to be corrupt do not
  /// count. One more file exists while a checkpoint is written.
  std::int64_t max_to_keep = 2;
  /// Called with a message for each corrupt checkpoint, and for errors after the rename of a new
  /// one: an old checkpoint that cannot be removed and, once, a failed close or fsync, after which
  /// the new checkpoint may not survive a system crash. Defaults to TORCH_WARN.
  std::function<void(const std::string&)> on_warning = nullptr;
};

/// Manages the checkpoints of one training run in a directory.
///
/// \code
///   mezzo::CheckpointManager checkpoints("runs/ner", {.max_to_keep = 2});
///   if (auto resumed = checkpoints.load_latest(state)) step = resumed->step;
///   ...
///   if (step % 1000 == 0) checkpoints.save(state, step);
/// \endcode
///
/// The twelfth checkpoint of a directory is named "checkpoint-000012-step-3400.pt". The latest
/// checkpoint is the last one saved, whatever its step.
///
/// A directory has one writer at a time: the first `save` acquires a lock, which the destructor or
/// the end of the process releases; forked children do not inherit it. If the directory or its lock
/// file is removed, the next `save` recreates it. Reading takes no lock. A relative directory is
/// resolved at construction. In a multi-process run use DistributedCheckpointManager, or save on
/// one process. Not thread-safe. Save at the end of an iteration, after `scaler.update()`.
class CheckpointManager {
 public:
  /// Does not create the directory. Warns if another process holds its lock.
  /// \throws c10::Error unless max_to_keep is at least 1
  explicit CheckpointManager(const std::filesystem::path& directory,
                             CheckpointManagerOptions options = {});
  /// Moves a save in progress, too.
  CheckpointManager(CheckpointManager&&) noexcept = default;
  /// Waits for save_async. Passes its error to on_warning.
  ~CheckpointManager();

  /// Writes and fsyncs a temporary file, renames it, fsyncs the directory and removes checkpoints
  /// beyond `max_to_keep`. Synchronizes with the devices; copies one device tensor at a time to the
  /// host. Strong exception guarantee.
  /// \throws c10::Error if an object cannot be saved (for example a sparse buffer, or parameters
  ///   under an EmaGuard), on system errors (disk full), and if another process saves here
  SavedCheckpoint save(const TrainingState& state, std::int64_t step);

  /// Copies the state to host memory and returns; a thread saves the copy as `save` does while
  /// training continues. `save`, `save_async`, `load`, `load_latest`, `wait` and std::exit first
  /// wait for it. If it failed, the next of these calls throws its error: `save` after it has saved,
  /// the others instead of what they do.
  /// \throws c10::Error as `save`, for what is known before the file is written
  void save_async(const TrainingState& state, std::int64_t step);

  /// Waits until the checkpoint of save_async is fsynced and renamed. \throws its error, once
  void wait();

  /// Loads the latest intact checkpoint; returns nullopt if there are no checkpoints. Skips files
  /// that are corrupt, cannot be opened or are not checkpoints, with a warning.
  ///
  /// Checks everything before changing any object. Only a user-defined `operator>>`, sampler or
  /// callable can throw later; the objects before it are then already loaded.
  /// \throws c10::Error if all checkpoints are corrupt, for a checkpoint of a newer format, and for
  ///   a mismatch: names and types of objects, names, shapes and dtypes of tensors, class,
  ///   weight storage and parameters of an optimizer. mezzo and torch optimizers of the same name
  ///   load each other's state
  std::optional<LoadedCheckpoint> load_latest(const TrainingState& state,
                                              const LoadOptions& options = {});

  /// Loads the checkpoint of `step`; of several, the last one saved.
  /// \throws c10::Error as load_latest, if the checkpoint is corrupt, and if there is none of this
  ///   step (listing the steps that exist)
  LoadedCheckpoint load(const TrainingState& state, std::int64_t step,
                        const LoadOptions& options = {});

  /// Returns the paths of all checkpoints, including corrupt ones, latest first.
  std::vector<std::filesystem::path> checkpoints() const;

 private:
  struct AsyncSave;
  using WarnFn = std::function<void(const std::string&)>;
  using WriteFn = std::function<SavedCheckpoint(const c10::IValue& root_dict, const WarnFn&)>;

  c10::IValue collect(const char* caller, const TrainingState& state, std::int64_t step);
  WriteFn prepare_write(std::int64_t step);
  SavedCheckpoint write(const c10::IValue& root_dict, std::int64_t step);
  void write_async(const c10::IValue& root_dict, std::int64_t step);
  void skip_corrupt(const std::filesystem::path& path, const std::string& reason);
  void warn(const std::string& text) const;

  friend class DistributedCheckpointManager;

  std::filesystem::path directory_;
  CheckpointManagerOptions options_;
  detail::DirectoryLock lock_;
  bool warned_nonfinite_ = false;
  bool warned_no_locks_ = false;
  std::shared_ptr<bool> warned_not_durable_ = std::make_shared<bool>(false);
  std::set<std::filesystem::path> corrupt_;
  std::shared_ptr<AsyncSave> async_save_;  // destroyed before lock_
};

/// Saves to `path`, replacing an existing file atomically. Follows symlinks and preserves the mode
/// of an existing file. Takes no lock: of concurrent writers the last one wins.
/// \throws c10::Error as CheckpointManager::save, and if `path` is not a regular file
SavedCheckpoint save_checkpoint(const std::filesystem::path& path, const TrainingState& state,
                                std::int64_t step = 0);

/// Loads the checkpoint at `path`.
/// \throws c10::Error as CheckpointManager::load_latest, and if the file is corrupt
LoadedCheckpoint load_checkpoint(const std::filesystem::path& path, const TrainingState& state,
                                 const LoadOptions& options = {});

namespace detail {

/// Writes the state_dict of the module under "model".
SavedCheckpoint write_state_dict(const std::filesystem::path& path, const TrainingState& state);

}  // namespace detail

/// Saves the state_dict of a module, as Python's `torch.save(model.state_dict(), path)`. Python's
/// `model.load_state_dict(torch.load(path))` and load_state_dict read it. Replaces `path`
/// atomically.
/// \param model  a module, a module holder or a std::shared_ptr to a module
/// \throws c10::Error as save_checkpoint
template <class M>
SavedCheckpoint save_state_dict(const std::filesystem::path& path, M& model) {
  static_assert(
      detail::ModelHandle<M> || detail::ModuleVariable<M>,
      "mezzo::save_state_dict: pass a module, a module holder or a std::shared_ptr to a module; "
      "save_checkpoint saves other objects");
  return detail::write_state_dict(path, TrainingState().add("model", model));
}

/// Loads a module from a file written by save_state_dict or by Python's `torch.save(
/// model.state_dict(), path)`, or from a checkpoint that has it under "model". Floating-point
/// tensors are cast to the module's dtypes, with a warning, except from a mezzo checkpoint.
/// \throws c10::Error as load_checkpoint. Strong exception guarantee
template <class M>
void load_state_dict(const std::filesystem::path& path, M& model) {
  static_assert(
      detail::ModelHandle<M> || detail::ModuleVariable<M>,
      "mezzo::load_state_dict: pass a module, a module holder or a std::shared_ptr to a module; "
      "load_checkpoint loads other objects");
  load_checkpoint(path, TrainingState().add("model", model), {.ignore_unexpected = true});
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifndef MEZZO_COMPILED_LIB
#include <mezzo/checkpoint/detail/checkpoint_inl.h>  // IWYU pragma: export
#endif
