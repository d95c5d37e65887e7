/// \file
/// Checkpoints of a run of several processes: one file, whatever the number of ranks.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/checkpoint/detail/atomic_file.h>
#include <mezzo/distributed/detail/rank_agreement.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

namespace detail {
struct CollectedState;
struct DistributedCheckpointAccess;
struct LoadAttempt;
}  // namespace detail

/// Saves and loads checkpoints of the ranks of a c10d group, as CheckpointManager
/// (mezzo/checkpoint/checkpoint.h) does for one process:
///
/// \code
///   mezzo::TrainingState state;
///   state.add("model", model).add("optimizer", optimizer).add("scaler", scaler);
///   state.add("epoch", epoch).with_random_state();           // dropout's generators, of each rank
///   auto residuals = ddp.residuals();                        // with error feedback
///   state.add_per_rank("residuals", residuals);
///
///   mezzo::DistributedCheckpointManager checkpoints("runs/ner", world);
///   if (auto resumed = checkpoints.load_newest(state)) step = resumed->step;
///   ...
///   if (step % 1000 == 0) checkpoints.save(state, step);     // on all ranks
/// \endcode
///
/// All ranks make the same calls, with states of the same names, kinds and shapes in the same
/// order, and wait for one another. If one rank throws, all throw its message, which names the rank.
/// The file is the one that a single process would write. Objects that all ranks share are rank
/// 0's; the ranks compare their checksums before anything is written, except for buffers and
/// objects for which `differs_by_rank(object)` is true. A ShardedOptimizer is gathered. Objects
/// that each rank has of its own (`add_per_rank`, `with_random_state`) go to the same file.
///
/// All ranks must see the folder. Rank 0 writes while the others wait, and holds the lock. A kill
/// at any moment leaves the last file whole; the group cannot be used after it. docs/checkpoints.md
/// ("Many processes") says what another number of ranks can load.
class DistributedCheckpointManager {
 public:
  /// Reads and writes nothing yet. `group` may take tensors on the CPU, or on CUDA devices only.
  /// \throws c10::Error if `group` is null, or unless keep is at least 1
  DistributedCheckpointManager(std::filesystem::path folder,
                               c10::intrusive_ptr<c10d::Backend> group,
                               CheckpointManagerOptions options = {});

  /// Does what CheckpointManager::save does. All ranks return when the file is in its place. Sends
  /// the objects that each rank has of its own to rank 0, tensor by tensor. Each rank needs memory
  /// for its own objects; rank 0 needs memory for one tensor of another rank, and for what a
  /// ShardedOptimizer gathers. Reads each object once more, for its checksum.
  /// \throws c10::Error, on all ranks, where one cannot save, or where the ranks' states, steps, or
  ///   numbers differ; earlier files are then untouched, and the next `save` may succeed
  SavedCheckpoint save(const TrainingState& state, std::int64_t step);

  /// Does what CheckpointManager::load_newest does, with the newest file that is whole for every
  /// rank. All or nothing: where one rank refuses, the objects of all ranks get back their values.
  /// \throws c10::Error, on all ranks, as CheckpointManager::load_newest does on one of them, and
  ///   where a rank does not see the file that rank 0 sees
  std::optional<LoadedCheckpoint> load_newest(const TrainingState& state,
                                              const LoadOptions& options = {});

  /// Returns the files that this rank sees, the newest first.
  std::vector<std::filesystem::path> files() const { return files_.files(); }

 private:
  friend struct detail::DistributedCheckpointAccess;

  DistributedCheckpointManager(std::filesystem::path folder,
                               c10::intrusive_ptr<c10d::Backend> group,
                               CheckpointManagerOptions options, detail::FileCalls calls);

  // Saving
  detail::CollectedState collect(const TrainingState& state);
  void add_all(const TrainingState& state, detail::CollectedState& collected,
               detail::CheckpointZip& zip);
  std::string write(const TrainingState& state, std::int64_t step,
                    detail::CollectedState& collected);

  // Loading
  std::string choose_file(const std::vector<std::string>& passed_over);
  detail::LoadAttempt try_file(const std::string& name, const TrainingState& state,
                               const LoadOptions& options) const;
  void apply(const std::string& name, detail::LoadAttempt& attempt);

  std::filesystem::path folder_;
  detail::RankAgreement ranks_;
  detail::FileCalls calls_;
  CheckpointManager files_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/distributed/detail/checkpoint_manager_impl.h>  // IWYU pragma: export
