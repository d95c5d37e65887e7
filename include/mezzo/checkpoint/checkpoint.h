/// \file
/// The whole state of a training run in one file: model, optimizer, scaler, schedule, random states
/// and where the run stands in its data. A kill or a full disk at any moment leaves the old file or
/// the new one, whole; a damaged file is noticed before anything is loaded from it.
///
/// The file is the zip that torch.save writes. Python reads it without mezzo:
/// \code{.py}
///   checkpoint = torch.load("runs/ner/checkpoint-000012-step-3400.pt", weights_only=True)
///   checkpoint["step"], checkpoint["state"]["model"]["encoder"]["weight"]
/// \endcode
/// `examples/read_checkpoint` turns it into a state_dict.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/atomic_file.h>
#include <mezzo/checkpoint/detail/checkpoint_folder.h>
#include <mezzo/checkpoint/detail/checkpoint_part.h>
#include <mezzo/checkpoint/detail/part_of.h>

#include <c10/core/Device.h>

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

namespace detail {
struct CheckpointAccess;
class CheckpointZip;
}  // namespace detail

/// What belongs to a training run, by name. Holds references: the objects must outlive it. Make it
/// once, save and load it as often as you like.
///
/// \code
///   mezzo::TrainingState state;
///   state.add("model", model).add("optimizer", optimizer).add("scaler", scaler);
///   state.add("schedule", schedule).add("epoch", epoch).with_random_state();
/// \endcode
///
/// Objects are loaded in the order in which they were added: an optimizer comes before its
/// schedule.
class TrainingState {
 public:
  /// `object` may be
  /// - a module, a ModuleHolder (`torch::nn::Linear`) or a std::shared_ptr to one, which may be
  ///   given another module later, or a torch::jit::Module: parameters and buffers. The file has to have the same names,
  ///   dtypes and shapes;
  /// - any torch::optim::Optimizer, mezzo's with masters, averages and step counts. The file has to
  ///   be of the same class, over parameters of the same shapes and names in the same order;
  /// - MasterWeights;
  /// - whatever else torch::save and torch::load take: GradScaler, LrSchedule, Ema, Telemetry,
  ///   RunReport;
  /// - an integer, a bool, a float or double, a std::string, a tensor, a std::vector of integers
  ///   (an epoch's shuffled order, whose length may change): the position in the data;
  /// - an at::Generator, or an engine of the standard library (std::mt19937);
  /// - a std::vector<at::Tensor>, whose memory is kept and written to.
  /// Other tensors are given other memory by loading, as torch::load does: capture CUDA graphs
  /// after it.
  /// \throws c10::Error for an empty name, and one that was given before
  template <class T>
  TrainingState& add(std::string name, T& object);

  /// Adds what two callables give and take, for an object that is of none of these types:
  ///
  ///     state.add("loader", [&] { return loader.position(); },
  ///               [&](std::int64_t position) { loader.seek(position); });
  ///
  /// \param save  called when a state is saved, and before one is loaded, for the case that a later
  ///   object refuses its part; returns a value of one of the types above that can be copied: a
  ///   number, string, tensor, vector of integers or engine
  /// \param load  called with what `save` returned
  template <class Save, class Load>
  TrainingState& add(std::string name, Save save, Load load);

  /// The same for what differs from rank to rank in a job of several processes, which
  /// DistributedCheckpointManager (distributed/checkpoint_manager.h) saves: the residuals of error
  /// feedback, a rank's own generator or place in the data. For CheckpointManager it is an object
  /// like others; from a file of several ranks it loads what rank 0 had, with a warning.
  template <class T>
  TrainingState& add_per_rank(std::string name, T& object);

  /// The default generators of the CPU and of each CUDA device (which initialises CUDA, where there
  /// is one), of each rank its own. Takes the name "random_state". Where the number of CUDA devices
  /// has changed, loading warns, and sets those that are there.
  TrainingState& with_random_state();

 private:
  friend struct detail::CheckpointAccess;

  TrainingState& add_part(std::string name, std::shared_ptr<const detail::CheckpointPart> part,
                          bool is_per_rank);

  std::vector<detail::NamedPart> parts_;
};

struct SavedCheckpoint {
  std::filesystem::path file;
  std::uint64_t bytes = 0;
  /// Whether the file survives a crash of the machine from here on. False if all is in its place
  /// but the system refused to flush the folder: committed, durability unknown. No older file is
  /// removed then, except on a file system that never flushes folders.
  bool durable = false;
};

struct LoadedCheckpoint {
  std::filesystem::path file;
  std::int64_t step = 0;  ///< as it was given to `save`
};

/// How a checkpoint is loaded.
struct LoadOptions {
  /// Where tensors come to; where they were saved, without it. Parameters and buffers stay on their
  /// module's device in any case, and so does what mezzo's optimizers and Ema keep.
  std::optional<c10::Device> device = std::nullopt;
  /// Takes what the state names, and leaves the rest of the file: the model alone, for evaluation.
  bool subset = false;
};

/// How a folder of checkpoints is kept.
struct CheckpointManagerOptions {
  /// How many of the newest files stay; at least 1. More than one, so that there is something to
  /// fall back to. Files that were found damaged do not count. While a new one is written there is
  /// one more.
  std::int64_t keep = 2;
  /// Hears of damaged files, and of what the system refused after a file was in its place. By
  /// default they are warnings of libtorch's (TORCH_WARN).
  std::function<void(const std::string&)> on_warning = nullptr;
};

/// A folder of checkpoints of one training run.
///
/// \code
///   mezzo::CheckpointManager checkpoints("runs/ner", {.keep = 2});
///   if (auto resumed = checkpoints.load_newest(state)) step = resumed->step;
///   ...
///   if (step % 1000 == 0) checkpoints.save(state, step);
/// \endcode
///
/// Files are "checkpoint-000012-step-3400.pt": the twelfth that was saved. The newest is the one
/// that was saved last, whatever its step.
///
/// One writer a folder: from the first `save` on an object holds a lock until it goes; killed
/// processes hold none. A forked child has to take the lock itself, and where the folder or its
/// lock was removed, the next `save` makes them anew. A relative folder is found from the working
/// directory at construction. Of several processes let one save, or take
/// DistributedCheckpointManager. Reading takes
/// no lock, and may be done by any. One thread at a time, and an iteration's end: after
/// `scaler.update()`.
class CheckpointManager {
 public:
  /// Touches nothing yet; `save` makes the folder. \throws c10::Error unless keep is at least 1
  explicit CheckpointManager(std::filesystem::path folder, CheckpointManagerOptions options = {});

  /// Writes a temporary file with a CRC-32C of its bytes, flushes it to the disk, renames it,
  /// flushes the folder, and removes files beyond `keep`. Waits for the devices; takes memory for a
  /// copy of one tensor of theirs at a time.
  /// \throws c10::Error where an object cannot be saved, the system refuses (a full disk), or
  ///   another process saves here; what was there before is then untouched. Refused is what could
  ///   not be loaded again (sparse buffers), and parameters that hold averages (EmaScope)
  SavedCheckpoint save(const TrainingState& state, std::int64_t step);

  /// Loads the newest file that is whole, and says which. Returns none if there are no checkpoints,
  /// and says so once on std::cerr: a folder that was misspelt is no silent fresh start.
  /// A file that is damaged, cannot be opened or is not mezzo's is passed over with a warning that
  /// names it and the reason.
  ///
  /// All or nothing: everything is checked and read before the first object changes, and where an
  /// object refuses what the file has for it, all get back what they had. So it needs memory for
  /// the file's tensors, and for what the objects hold.
  /// \throws c10::Error if there are files and none is whole; for a file of a newer format; if a
  ///   name or kind, a module's parameter, or an optimizer's class, weight storage or parameter
  ///   (shape; name, if the state has the model) differs from the file's, naming it. mezzo's and
  ///   libtorch's optimizer of one name take each other's state
  std::optional<LoadedCheckpoint> load_newest(const TrainingState& state,
                                              const LoadOptions& options = {});

  /// Loads the file of this step, of several the one that was saved last.
  /// \throws c10::Error as `load_newest`, if there is none (naming the steps that there are), and
  ///   for damage
  LoadedCheckpoint load(const TrainingState& state, std::int64_t step,
                        const LoadOptions& options = {});

  /// The newest first; damaged ones too.
  std::vector<std::filesystem::path> files() const;

 private:
  CheckpointManager(std::filesystem::path folder, CheckpointManagerOptions options,
                    detail::FileCalls calls);
  SavedCheckpoint write(std::int64_t step, const std::function<void(detail::CheckpointZip&)>& add);
  void hold_lock();
  void finish(SavedCheckpoint& saved, int flush_error);
  void prune(std::int64_t keep);
  void pass_over(const std::filesystem::path& file, const std::string& words);
  void warn(const std::string& text) const;
  void tell_empty();

  friend struct detail::CheckpointAccess;
  friend class DistributedCheckpointManager;

  std::filesystem::path folder_;
  CheckpointManagerOptions options_;
  detail::FileCalls calls_;
  detail::FolderLock lock_;
  bool offers_locks_ = true;
  bool told_hopeless_ = false;                    // that the folder can never be flushed
  bool told_empty_ = false;                       // that there was nothing to load
  std::vector<std::filesystem::path> unflushed_;  // folders with a new name in them
  std::set<std::filesystem::path> damaged_;
};

/// Saves to one file that you choose, as CheckpointManager does: in the place of what was there,
/// and whole or not at all. Takes no lock: one process at a time.
/// \throws c10::Error as CheckpointManager::save
SavedCheckpoint save_checkpoint(const std::filesystem::path& file, const TrainingState& state,
                                std::int64_t step = 0);

/// Loads one file that you choose. \throws c10::Error as `load_newest`, and for damage
LoadedCheckpoint load_checkpoint(const std::filesystem::path& file, const TrainingState& state,
                                 const LoadOptions& options = {});

template <class T>  // moved on, which clang-tidy does not see in a template
// NOLINTNEXTLINE(performance-unnecessary-value-param)
TrainingState& TrainingState::add(std::string name, T& object) {
  return add_part(std::move(name), detail::part_of(object), /*is_per_rank=*/false);
}

template <class Save, class Load>
// NOLINTNEXTLINE(performance-unnecessary-value-param)
TrainingState& TrainingState::add(std::string name, Save save, Load load) {
  return add_part(std::move(name), detail::part_of_callables(std::move(save), std::move(load)),
                  /*is_per_rank=*/false);
}

template <class T>  // moved on, which clang-tidy does not see in a template
// NOLINTNEXTLINE(performance-unnecessary-value-param)
TrainingState& TrainingState::add_per_rank(std::string name, T& object) {
  return add_part(std::move(name), detail::part_of(object), /*is_per_rank=*/true);
}

namespace detail {

/// What tests and classes of mezzo's may do with a state and a manager beside what users may.
struct CheckpointAccess {
  static const std::vector<NamedPart>& parts(const TrainingState& state) { return state.parts_; }

  /// With other system calls, for tests of what happens when they fail.
  static CheckpointManager manager(std::filesystem::path folder, CheckpointManagerOptions options,
                                   FileCalls calls) {
    return CheckpointManager(std::move(folder), std::move(options), std::move(calls));
  }
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifndef MEZZO_LEFT_TO_LIBRARY
#include <mezzo/checkpoint/detail/checkpoint_impl.h>  // IWYU pragma: export
#endif
