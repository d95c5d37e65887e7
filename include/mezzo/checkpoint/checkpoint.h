/// \file
/// Saves the whole state of a training run in one file: model, optimizer, scaler, schedule, random
/// states and the position in the data. A kill or a full disk at any moment leaves either the old
/// file or the new one intact. Damage is detected before anything is loaded.
///
/// The file is one that torch.save writes. Python reads it without mezzo:
/// \code{.py}
///   checkpoint = torch.load("runs/ner/checkpoint-000012-step-3400.pt", weights_only=True)
///   model.load_state_dict(checkpoint["model"])
///   optimizer.load_state_dict(checkpoint["optimizer"])      # of Adam, AdamW or SGD
///   checkpoint["mezzo"]["step"], checkpoint["epoch"]
/// \endcode
/// A file that Python wrote by `torch.save({"model": model.state_dict(), "optimizer":
/// optimizer.state_dict()}, path)` loads too. load_state_dict loads a file by
/// `torch.save(model.state_dict(), path)`.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/checkpoint_directory.h>
#include <mezzo/checkpoint/detail/stateful.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Names the objects that make up a training run. Holds references: the objects must outlive it.
/// Make it once; save and load it any number of times.
///
/// \code
///   mezzo::TrainingState state;
///   state.add("model", model).add("optimizer", optimizer).add("scaler", scaler);
///   state.add("schedule", schedule).add("epoch", epoch).add_rng_state();
/// \endcode
///
/// Objects are loaded in the order in which they were added, but objects that go through torch's
/// archives (a schedule, a scaler, an Ema) after all others.
class TrainingState {
 public:
  /// Adds `object` under `name`. `object` may be
  /// - a module, a ModuleHolder (`torch::nn::Linear`), or a std::shared_ptr to a module: its
  ///   parameters and buffers, which keep their memory. A holder or pointer may be given another
  ///   module later. The file must have the same names, dtypes and shapes;
  /// - any torch::optim::Optimizer, or a pointer to one; mezzo's with masters, averages and step
  ///   counts. The file must be of the same class, over parameters of the same shapes and names in
  ///   the same order. An optimizer class of your own goes through its `save` and `load`;
  /// - MasterWeights;
  /// - any other type that torch::save and torch::load accept: GradScaler, LrSchedule, Ema;
  /// - an integer, a bool, a float or double, a std::string, a tensor, a std::vector of integers or
  ///   real numbers (an epoch's shuffled order; its length may change), or a
  ///   std::map<std::string, double>: the position in the data;
  /// - an at::Generator, or an engine of the standard library (std::mt19937);
  /// - a std::vector<at::Tensor>; loading copies into the tensors' memory.
  /// Loading gives optimizers' states and single tensors new memory: capture CUDA graphs after it.
  /// An undefined tensor is loaded to the CPU; all others stay on their devices.
  /// \throws c10::Error for an empty name, the name "mezzo", or a name that is already taken
  template <class T>  // moved on, which clang-tidy does not see in a template
  // NOLINTNEXTLINE(performance-unnecessary-value-param)
  TrainingState& add(std::string name, T& object) {
    return add_entry(std::move(name), detail::make_stateful(object), /*is_per_rank=*/false);
  }

  /// Adds an object of any other type by two callables:
  ///
  ///     state.add("loader", [&] { return loader.position(); },
  ///               [&](std::int64_t position) { loader.seek(position); });
  ///
  /// \param save  called when a state is saved. Returns a copyable value of one of the types above:
  ///   a number, string, tensor, vector of integers or engine
  /// \param load  called with what `save` returned
  template <class Save, class Load>
  // NOLINTNEXTLINE(performance-unnecessary-value-param)
  TrainingState& add(std::string name, Save save, Load load) {
    return add_entry(std::move(name),
                     detail::make_stateful_from_callables(std::move(save), std::move(load)),
                     /*is_per_rank=*/false);
  }

  /// Adds an object whose value differs between ranks, such as a
  /// rank's own generator or position in the data. DistributedCheckpointManager
  /// (distributed/checkpoint_manager.h) saves the value of every rank. CheckpointManager treats it
  /// like any other object; from a file of several ranks it loads rank 0's value, with a warning.
  template <class T>
  // NOLINTNEXTLINE(performance-unnecessary-value-param)
  TrainingState& add_per_rank(std::string name, T& object) {
    return add_entry(std::move(name), detail::make_stateful(object), /*is_per_rank=*/true);
  }

  /// Adds the default generators of the CPU and of each CUDA device, for each rank, under the name
  /// "rng_state". Initialises CUDA if there is a device. If the number of CUDA devices has
  /// changed, loading warns and sets the generators of the devices that are present.
  TrainingState& add_rng_state();

  /// Returns the objects, for those who save and load.
  const std::vector<detail::CheckpointEntry>& entries() const noexcept { return entries_; }

 private:
  TrainingState& add_entry(std::string name, detail::Stateful stateful, bool is_per_rank);

  std::vector<detail::CheckpointEntry> entries_;
};

/// A file that `save` wrote.
struct SavedCheckpoint {
  std::filesystem::path path;    ///< with its directory
  std::uint64_t size_bytes = 0;  ///< size of the file
};

/// A file that was loaded.
struct LoadedCheckpoint {
  std::filesystem::path path;  ///< with its directory
  std::int64_t step = 0;       ///< as it was given to `save`
};

/// Options for loading a checkpoint.
struct LoadOptions {
  /// Whether the file may hold objects that the state does not name, which are then ignored: for
  /// loading the model alone.
  bool ignore_unexpected = false;
};

/// Options for a directory of checkpoints.
struct CheckpointManagerOptions {
  /// The number of newest files to keep; at least 1. With two or more, a corrupt file has a
  /// predecessor to fall back to. Files that were found corrupt do not count. There is one more
  /// file while a new one is written.
  std::int64_t max_to_keep = 2;
  /// Called with a message for each corrupt file, and for each failure of the system after a file
  /// was in place: an old file that cannot be removed, and, once, a file that cannot be closed or a
  /// directory that cannot be flushed, so that the file may not survive a crash of the machine. By
  /// default the messages are libtorch warnings (TORCH_WARN).
  std::function<void(const std::string&)> on_warning = nullptr;
};

/// A directory of checkpoints of one training run.
///
/// \code
///   mezzo::CheckpointManager checkpoints("runs/ner", {.max_to_keep = 2});
///   if (auto resumed = checkpoints.load_latest(state)) step = resumed->step;
///   ...
///   if (step % 1000 == 0) checkpoints.save(state, step);
/// \endcode
///
/// Files are named "checkpoint-000012-step-3400.pt": the twelfth that was saved. The newest file is
/// the one that was saved last, whatever its step.
///
/// A directory has one writer. The first `save` takes a lock, which the destructor or the end of
/// the process releases, whether or not forked children live on. If the directory or its lock was
/// removed, the next `save` makes them anew. A relative directory is found from the working
/// directory at construction. With several processes let one save, or use
/// DistributedCheckpointManager. Reading takes no lock; any process may read. One thread at a time.
/// Save at the end of an iteration, after `scaler.update()`.
class CheckpointManager {
 public:
  /// Writes nothing; `save` creates the directory. Warns if another process is saving to it.
  /// \throws c10::Error unless max_to_keep is at least 1
  explicit CheckpointManager(const std::filesystem::path& directory,
                             CheckpointManagerOptions options = {});

  /// Writes a temporary file with a CRC-32C of its bytes, flushes it to the disk, renames it,
  /// flushes the directory, and removes files beyond `max_to_keep`. Waits for the devices, and
  /// needs host memory for a copy of one device tensor at a time.
  /// \throws c10::Error if an object cannot be saved (sparse buffers, which could not be loaded
  ///   again; parameters that hold averages, see EmaGuard), if the system refuses (a full disk), or
  ///   if another process saves here. Existing files are then untouched
  SavedCheckpoint save(const TrainingState& state, std::int64_t step);

  /// Loads the newest intact file, and returns its path and step. Returns none if there are no
  /// checkpoints. Skips a file that is corrupt, cannot be opened or is not a checkpoint, with a
  /// warning that names it and the reason.
  ///
  /// Everything is checked before the first object changes. If an object itself then refuses its
  /// value (an `operator>>` or a callable of yours), the error names it; those before it are
  /// loaded.
  /// \throws c10::Error if there are files and none is intact; for a file of a newer format; if a
  ///   name or kind, a module's parameter, or an optimizer's class, weight storage or parameter
  ///   (shape; name, if the state has the model) differs from the file's, naming it. mezzo's and
  ///   libtorch's optimizers of the same name accept each other's state
  std::optional<LoadedCheckpoint> load_latest(const TrainingState& state,
                                              const LoadOptions& options = {});

  /// Loads the file of this step; if there are several, the one that was saved last.
  /// \throws c10::Error as `load_latest` does, if the file is corrupt, and if there is no file of
  ///   this step (naming the steps that exist)
  LoadedCheckpoint load(const TrainingState& state, std::int64_t step,
                        const LoadOptions& options = {});

  /// Returns all checkpoints, corrupt ones too, the newest first.
  std::vector<std::filesystem::path> checkpoints() const;

 private:
  SavedCheckpoint write(const c10::IValue& root_dict, std::int64_t step);
  void skip_corrupt(const std::filesystem::path& file, const std::string& words);
  void warn(const std::string& text) const;

  friend class DistributedCheckpointManager;

  std::filesystem::path directory_;
  CheckpointManagerOptions options_;
  detail::DirectoryLock lock_;
  bool warned_nonfinite_ = false;
  bool warned_no_locks_ = false;
  bool warned_not_durable_ = false;
  std::set<std::filesystem::path> corrupt_;
};

/// Saves to one file of your choice, which replaces an existing file atomically, as
/// CheckpointManager does. Follows links, and keeps an existing file's mode. Takes no lock: of
/// several writers at a time, the last one's file stays.
/// \throws c10::Error as CheckpointManager::save, and if the path is a directory, a pipe or a device
SavedCheckpoint save_checkpoint(const std::filesystem::path& file, const TrainingState& state,
                                std::int64_t step = 0);

/// Loads one file of your choice. \throws c10::Error as `load_latest` does, and if the file is
/// corrupt
LoadedCheckpoint load_checkpoint(const std::filesystem::path& file, const TrainingState& state,
                                 const LoadOptions& options = {});

namespace detail {

/// Writes the state_dict of the module that `state` holds under "model"; see save_state_dict.
SavedCheckpoint write_state_dict(const std::filesystem::path& file, const TrainingState& state);

}  // namespace detail

/// Saves only a module, as Python's `torch.save(model.state_dict(), file)` does. Python's
/// `model.load_state_dict(torch.load(file))` and mezzo's load_state_dict read the file. Replaces
/// the file atomically.
/// \param model  a module, a holder or a std::shared_ptr to one
/// \throws c10::Error as save_checkpoint does
template <class M>
SavedCheckpoint save_state_dict(const std::filesystem::path& file, M& model) {
  static_assert(detail::ModelHandle<M> || detail::ModuleVariable<M>,
                "mezzo::save_state_dict: give a module, a holder or a std::shared_ptr to one; "
                "save_checkpoint saves other objects");
  return detail::write_state_dict(file, TrainingState().add("model", model));
}

/// Loads a module from a file that save_state_dict or Python's `torch.save(model.state_dict(),
/// file)` wrote, or from a checkpoint that has the module under the name "model". Floating tensors
/// of another dtype are cast to the module's, with a warning, except from a mezzo checkpoint.
/// \throws c10::Error as load_checkpoint does, and then changes nothing
template <class M>
void load_state_dict(const std::filesystem::path& file, M& model) {
  static_assert(detail::ModelHandle<M> || detail::ModuleVariable<M>,
                "mezzo::load_state_dict: give a module, a holder or a std::shared_ptr to one; "
                "load_checkpoint loads other objects");
  load_checkpoint(file, TrainingState().add("model", model), {.ignore_unexpected = true});
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifndef MEZZO_COMPILED_LIB
#include <mezzo/checkpoint/detail/checkpoint_inl.h>  // IWYU pragma: export
#endif
