/// \file
/// Checkpoints of a run of several processes: one file, whatever the number of ranks.
#pragma once

#include <mezzo/base/detail/crc32c.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/checkpoint/detail/checkpoint_file.h>
#include <mezzo/checkpoint/detail/state_file.h>
#include <mezzo/distributed/detail/ranks.h>

#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/jit/serialization/pickle.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Saves and loads checkpoints of the ranks of a c10d group, as CheckpointManager
/// (mezzo/checkpoint/checkpoint.h) does for one process:
///
/// \code
///   mezzo::TrainingState state;
///   state.add("model", model).add("optimizer", optimizer).add("scaler", scaler);
///   state.add("epoch", epoch).with_random_state();           // dropout's generators, of each rank
///
///   mezzo::DistributedCheckpointManager checkpoints("runs/ner", world);
///   if (auto resumed = checkpoints.load_newest(state)) step = resumed->step;
///   ...
///   if (step % 1000 == 0) checkpoints.save(state, step);     // on all ranks
/// \endcode
///
/// All ranks make the same calls, with states of the same names in the same order, and
/// wait for one another. If one rank throws, all throw its message, which names the rank. The file
/// is the one that a single process would write: objects that all ranks share are rank 0's, and a
/// ShardedOptimizer is gathered. Objects that each rank has of its own (`add_per_rank`,
/// `with_random_state`) go to the same file.
///
/// All ranks must see the folder. Rank 0 writes while the others wait, and holds the lock. A kill
/// at any moment leaves the last file whole. docs/checkpoints.md ("Many processes") says what
/// another number of ranks can load.
class DistributedCheckpointManager {
 public:
  /// Reads and writes nothing yet.
  /// \throws c10::Error if `group` is null, or unless keep is at least 1
  DistributedCheckpointManager(const std::filesystem::path& folder,
                               c10::intrusive_ptr<c10d::Backend> group,
                               CheckpointManagerOptions options = {})
      : folder_(std::filesystem::absolute(folder.empty() ? "." : folder)),
        group_(detail::checked(std::move(group), "DistributedCheckpointManager")),
        files_(folder_, std::move(options)) {}

  /// Does what CheckpointManager::save does. All ranks return when the file is in its place. The
  /// ranks compare names, steps and the bits of all models' parameters before anything is
  /// written. Each rank needs memory for all ranks' own objects, and rank 0 for what a
  /// ShardedOptimizer gathers.
  /// \throws c10::Error, on all ranks, where one cannot save, or where the ranks' states, steps or
  ///   parameters differ; earlier files are then untouched, and the next `save` may succeed
  SavedCheckpoint save(const TrainingState& state, std::int64_t step) {
    constexpr const char* kCaller = "DistributedCheckpointManager::save";
    check_states(kCaller, state, "step " + std::to_string(step), /*with_parameters=*/true);
    const auto& parts = state.parts();
    const detail::ParameterNames names = detail::parameter_names(parts);
    // All ranks save all objects, for some of them gather: also after one that throws.
    detail::PythonDict values = detail::python_dict(), own = detail::python_dict();
    std::string failure;
    for (const detail::NamedPart& one : parts) {
      c10::IValue value;
      const std::string words = detail::failure_of([&] { value = one.part.save(names); });
      if (failure.empty() && !words.empty()) failure = '"' + one.name + "\": " + words;
      values.insert(one.name, value);
      if (one.is_per_rank) own.insert(one.name, value);
    }
    std::vector<char> bytes;
    const std::string words = detail::failure_of([&] { bytes = torch::jit::pickle_save(own); });
    detail::throw_together(group_, kCaller, failure.empty() ? words : failure);
    const auto of_ranks = detail::gather_texts(group_, {bytes.begin(), bytes.end()});
    const std::string outcome = detail::from_rank_0(group_, kCaller, [&] {
      detail::check_can_be_saved("CheckpointManager::save", parts, step);
      detail::PythonDict ranks = detail::python_dict();  // a list of values by name
      for (const std::string& text : of_ranks) {
        for (const auto& entry :
             torch::jit::pickle_load({text.begin(), text.end()}).toGenericDict()) {
          if (!ranks.contains(entry.key())) ranks.insert(entry.key(), detail::python_list());
          ranks.at(entry.key()).toList().push_back(entry.value());
        }
      }
      const bool has_ranks = of_ranks.size() > 1 && !ranks.empty();
      const SavedCheckpoint written = files_.write(
          detail::document_of(values, step, has_ranks ? c10::IValue(ranks) : c10::IValue()), step);
      return std::to_string(written.bytes) + ' ' + written.file.filename().string();
    });
    return {folder_ / outcome.substr(outcome.find(' ') + 1), std::stoull(outcome)};
  }

  /// Does what CheckpointManager::load_newest does, with the newest file that is whole for every
  /// rank.
  /// \throws c10::Error, on all ranks, as CheckpointManager::load_newest does on one of them. Where
  ///   a rank fails after the file was read and compared, other ranks may have loaded it: end the
  ///   job
  std::optional<LoadedCheckpoint> load_newest(const TrainingState& state,
                                              const LoadOptions& options = {}) {
    constexpr const char* kCaller = "DistributedCheckpointManager::load_newest";
    check_states(kCaller, state, options.subset ? "a subset" : "the whole state",
                 /*with_parameters=*/false);
    std::istringstream names(detail::from_rank_0(group_, kCaller, [this] {
      std::string all;  // the newest first, a line each
      for (const auto& file : files_.files()) all += file.filename().string() + '\n';
      return all;
    }));
    std::string damages;
    for (std::string name; std::getline(names, name);) {
      const std::filesystem::path file = folder_ / name;
      detail::CheckedLoad checked;
      std::string damage;
      const std::string refusal = detail::failure_of([&] {
        try {
          checked = detail::check_file(file, state.parts(), options.subset,
                                       {group_->getRank(), group_->getSize()});
        } catch (const detail::UnusableCheckpoint& unusable) {
          damage = unusable.what() + std::string(" on rank ") + std::to_string(group_->getRank());
        }
      });
      detail::throw_together(group_, kCaller, refusal);
      bool is_damaged = false;
      for (const std::string& of_rank : detail::gather_texts(group_, damage)) {
        if (of_rank.empty() || std::exchange(is_damaged, true)) continue;
        damages += "\n  " + name + ' ' + of_rank;
        on_rank_0(kCaller, [&] { files_.pass_over(file, of_rank); });
      }
      if (is_damaged) continue;
      detail::throw_together(group_, kCaller, detail::failure_of([&] { detail::apply(checked); }));
      on_rank_0(kCaller, [&] {
        for (const std::string& note : checked.notes) files_.warn(file.string() + ": " + note);
      });
      return LoadedCheckpoint{checked.file, checked.step};
    }
    TORCH_CHECK(damages.empty(), kCaller, ": ", folder_.string(),
                " has no checkpoint that is whole:", damages,
                "\nMove them elsewhere to begin anew");
    return std::nullopt;
  }

  /// Returns the files that this rank sees, the newest first.
  std::vector<std::filesystem::path> files() const { return files_.files(); }

 private:
  /// Calls `f`, which calls a callback of the user, on rank 0. If it throws, all ranks throw.
  template <class F>
  void on_rank_0(const char* caller, const F& f) const {
    (void)detail::from_rank_0(group_, caller, [&f] {
      f();
      return std::string();
    });
  }

  /// Compares what the ranks save or load, a line for each thing in which they must not differ.
  void check_states(const char* caller, const TrainingState& state, const std::string& call,
                    bool with_parameters) const {
    std::ostringstream lines;
    lines << call << '\n';
    const std::string failure = detail::failure_of([&] {
      detail::check_not_averaged();
      TORCH_CHECK(!state.parts().empty(),
                  "the state is empty; add what training goes on from, as in "
                  "state.add(\"model\", model)");
      for (const auto& [name, part, is_per_rank] : state.parts()) {
        lines << name << (is_per_rank ? " of each rank\n" : "\n");
        if (!part.parameters) continue;
        for (const auto& [parameter, tensor] : part.parameters()) {
          lines << name << '.' << parameter << ": " << tensor.scalar_type() << ' '
                << tensor.sizes();
          if (with_parameters) {
            const at::Tensor bytes = tensor.detach().cpu().contiguous();
            lines << ", bits with the CRC-32C "
                  << detail::crc32c_hex(bytes.const_data_ptr(), bytes.nbytes());
          }
          lines << '\n';
        }
      }
    });
    detail::throw_together(group_, caller, failure);
    detail::check_alike(group_, caller, lines.str(),
                        "ranks save and load the same; what is each rank's own is added with "
                        "add_per_rank");
  }

  std::filesystem::path folder_;
  c10::intrusive_ptr<c10d::Backend> group_;
  CheckpointManager files_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
