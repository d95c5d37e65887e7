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

/// Checkpoints of the ranks of a c10d group, as CheckpointManager (mezzo/checkpoint/checkpoint.h)
/// makes them of one process:
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
/// order, and wait for one another. Every call ends alike on all of them: what one rank throws, all
/// throw, in the same words that name the rank.
///
/// **What is common** is what rank 0 has: model, optimizer (a ShardedOptimizer is gathered),
/// scaler, schedule. Checksums (CRC-32C) of numbers, generators, models' parameters, optimizers'
/// options and states, and of all other objects are compared before anything is written, and a rank
/// that has other bits is named; not those of buffers, which forward passes change on each rank,
/// nor of objects for which `differs_by_rank(object)` is true. So the file is the one that a
/// single process would have written. It loads on any number of ranks, and, with CheckpointManager
/// and the optimizer that ShardedOptimizer shards, in a process without any.
///
/// **What is each rank's own** (`add_per_rank`, `with_random_state`) goes to the same file, and
/// back to the rank with that number. So the same number of ranks resumes bitwise on the CPU.
/// Another number of ranks cannot take it over. The default generators are then seeded anew, from
/// rank 0's in the file, the step and the rank: differently on each rank, and alike each time. All
/// else, and what the file lacks, stays as it is. A warning names each of these.
///
/// **The folder** is one that all ranks see, as of a shared file system. Rank 0 writes, and holds
/// the lock; all read. While rank 0 writes the others wait: a Watchdog's collective_timeout must
/// exceed that. Warnings come from rank 0 alone.
///
/// A kill of any rank at any moment leaves the last file whole, and beside it at most a temporary
/// file, which the next `save` removes. After a kill or a failed collective the group cannot
/// be used again: end the job (Watchdog) and start a new one.
class DistributedCheckpointManager {
 public:
  /// Touches nothing yet. `group` may take tensors on the CPU or on CUDA devices alone.
  /// \throws c10::Error if `group` is null, or unless keep is at least 1
  DistributedCheckpointManager(std::filesystem::path folder,
                               c10::intrusive_ptr<c10d::Backend> group,
                               CheckpointManagerOptions options = {});

  /// As CheckpointManager::save; all return when the file is in its place. Sends, beside what the
  /// objects send themselves, what is each rank's own to rank 0, in pieces of 4 MiB. Needs memory
  /// for the own on each rank, and on rank 0 for one tensor of another rank's at a time and for
  /// what a ShardedOptimizer gathers. Reads each object once more, for its checksum.
  /// \throws c10::Error, on all ranks, where one cannot save, or where the ranks' states, steps, or
  ///   numbers differ; what was there before is then untouched, and the next `save` may go well
  SavedCheckpoint save(const TrainingState& state, std::int64_t step);

  /// As CheckpointManager::load_newest: the newest file that is whole for every rank, on all of
  /// them. All or nothing: where one rank refuses, all get back what they had.
  /// \throws c10::Error, on all ranks, as CheckpointManager::load_newest does on one of them, and
  ///   where a rank does not see the file that rank 0 sees
  std::optional<LoadedCheckpoint> load_newest(const TrainingState& state,
                                              const LoadOptions& options = {});

  /// As this rank sees them; the newest first.
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
  void send_all(detail::CollectedState& collected);
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
