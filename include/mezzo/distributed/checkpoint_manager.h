/// \file
/// Checkpoints of a run of several processes: one file, whatever the number of ranks.
#pragma once

#include <mezzo/base/detail/crc32c.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/checkpoint/detail/checkpoint_file.h>
#include <mezzo/checkpoint/detail/state_file.h>
#include <mezzo/distributed/detail/collectives.h>

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

/// Saves and loads checkpoints of the ranks of a c10d backend, as CheckpointManager
/// (mezzo/checkpoint/checkpoint.h) does for one process:
///
/// \code
///   mezzo::TrainingState state;
///   state.add("model", model).add("optimizer", optimizer).add("scaler", scaler);
///   state.add("epoch", epoch).add_rng_state();           // dropout's generators, of each rank
///
///   mezzo::DistributedCheckpointManager checkpoints("runs/ner", world);
///   if (auto resumed = checkpoints.load_latest(state)) step = resumed->step;
///   ...
///   if (step % 1000 == 0) checkpoints.save(state, step);     // on all ranks
/// \endcode
///
/// All ranks make the same calls, with states of the same names in the same order, and
/// wait for one another. If one rank throws, all throw its message, which names the rank. The file
/// is the one that a single process would write: objects that all ranks share are rank 0's, and a
/// ShardedOptimizer is gathered. Objects that each rank has of its own (`add_per_rank`,
/// `add_rng_state`) go to the same file.
///
/// All ranks must see the directory. Rank 0 writes while the others wait, and holds the lock. A
/// kill at any moment leaves the last file whole. docs/checkpoints.md ("Many processes") says what
/// another number of ranks can load.
class DistributedCheckpointManager {
 public:
  /// Reads and writes nothing yet.
  /// \throws c10::Error if `backend` is null, or unless max_to_keep is at least 1
  DistributedCheckpointManager(const std::filesystem::path& directory,
                               c10::intrusive_ptr<c10d::Backend> backend,
                               CheckpointManagerOptions options = {})
      : directory_(std::filesystem::absolute(directory.empty() ? "." : directory)),
        backend_(detail::check_backend(std::move(backend), "DistributedCheckpointManager")),
        manager_(directory_, std::move(options)) {}

  /// Does what CheckpointManager::save does. All ranks return when the file is in its place. The
  /// ranks compare names, steps and the bits of all models' parameters before anything is
  /// written. Each rank needs memory for all ranks' own objects, and rank 0 for what a
  /// ShardedOptimizer gathers.
  /// \throws c10::Error, on all ranks, where one cannot save, or where the ranks' states, steps or
  ///   parameters differ; earlier files are then untouched, and the next `save` may succeed
  SavedCheckpoint save(const TrainingState& state, std::int64_t step) {
    constexpr const char* kCaller = "DistributedCheckpointManager::save";
    check_states(kCaller, state, "step " + std::to_string(step), /*with_parameters=*/true);
    const auto& entries = state.entries();
    const detail::ParameterFqns names = detail::get_parameter_fqns(entries);
    // All ranks save all objects, for some of them gather: also after one that throws.
    detail::PythonDict values = detail::make_dict(), own = detail::make_dict();
    std::string failure;
    for (const detail::CheckpointEntry& one : entries) {
      c10::IValue value;
      const std::string words =
          detail::get_error_message([&] { value = one.stateful.save(names); });
      if (failure.empty() && !words.empty()) failure = '"' + one.name + "\": " + words;
      values.insert(one.name, value);
      if (one.is_per_rank) own.insert(one.name, value);
    }
    std::vector<char> bytes;
    const std::string words =
        detail::get_error_message([&] { bytes = torch::jit::pickle_save(own); });
    detail::throw_if_any_rank_failed(backend_, kCaller, failure.empty() ? words : failure);
    const auto of_ranks = detail::all_gather_strings(backend_, {bytes.begin(), bytes.end()});
    const std::string outcome = detail::run_on_rank0(backend_, kCaller, [&] {
      detail::check_saveable("CheckpointManager::save", entries, step);
      detail::PythonDict ranks = detail::make_dict();  // a list of values by name
      for (const std::string& text : of_ranks) {
        for (const auto& entry :
             torch::jit::pickle_load({text.begin(), text.end()}).toGenericDict()) {
          if (!ranks.contains(entry.key())) ranks.insert(entry.key(), detail::make_list());
          ranks.at(entry.key()).toList().push_back(entry.value());
        }
      }
      const bool has_ranks = of_ranks.size() > 1 && !ranks.empty();
      const SavedCheckpoint written = manager_.write(
          detail::make_root_dict(values, step, has_ranks ? c10::IValue(ranks) : c10::IValue()),
          step);
      return std::to_string(written.size_bytes) + ' ' + written.path.filename().string();
    });
    return {directory_ / outcome.substr(outcome.find(' ') + 1), std::stoull(outcome)};
  }

  /// Does what CheckpointManager::load_latest does, with the newest file that is whole for every
  /// rank.
  /// \throws c10::Error, on all ranks, as CheckpointManager::load_latest does on one of them. Where
  ///   a rank fails after the file was read and compared, other ranks may have loaded it: end the
  ///   job
  std::optional<LoadedCheckpoint> load_latest(const TrainingState& state,
                                              const LoadOptions& options = {}) {
    constexpr const char* kCaller = "DistributedCheckpointManager::load_latest";
    check_states(kCaller, state, options.ignore_unexpected ? "a subset" : "the whole state",
                 /*with_parameters=*/false);
    std::istringstream names(detail::run_on_rank0(backend_, kCaller, [this] {
      std::string all;  // the newest first, a line each
      for (const auto& file : manager_.checkpoints()) all += file.filename().string() + '\n';
      return all;
    }));
    std::string failures;
    for (std::string name; std::getline(names, name);) {
      const std::filesystem::path file = directory_ / name;
      detail::LoadPlan load_plan;
      std::string failure;
      const std::string refusal = detail::get_error_message([&] {
        try {
          load_plan = detail::make_load_plan(file, state.entries(), options.ignore_unexpected,
                                             {backend_->getRank(), backend_->getSize()});
        } catch (const detail::InvalidCheckpointError& unusable) {
          failure =
              unusable.what() + std::string(" on rank ") + std::to_string(backend_->getRank());
        }
      });
      detail::throw_if_any_rank_failed(backend_, kCaller, refusal);
      bool is_corrupt = false;
      for (const std::string& of_rank : detail::all_gather_strings(backend_, failure)) {
        if (of_rank.empty() || std::exchange(is_corrupt, true)) continue;
        failures += "\n  " + name + ' ' + of_rank;
        notify_on_rank0(kCaller, [&] { manager_.skip_corrupt(file, of_rank); });
      }
      if (is_corrupt) continue;
      detail::throw_if_any_rank_failed(
          backend_, kCaller, detail::get_error_message([&] { detail::apply(load_plan); }));
      notify_on_rank0(kCaller, [&] {
        for (const std::string& note : load_plan.notes) manager_.warn(file.string() + ": " + note);
      });
      return LoadedCheckpoint{load_plan.path, load_plan.step};
    }
    TORCH_CHECK(failures.empty(), kCaller, ": ", directory_.string(),
                " has no checkpoint that is whole:", failures,
                "\nMove them elsewhere to begin anew");
    return std::nullopt;
  }

  /// Returns the files that this rank sees, the newest first.
  std::vector<std::filesystem::path> checkpoints() const { return manager_.checkpoints(); }

 private:
  /// Calls `f`, which calls a callback of the user, on rank 0. If it throws, all ranks throw.
  template <class F>
  void notify_on_rank0(const char* caller, const F& f) const {
    (void)detail::run_on_rank0(backend_, caller, [&f] {
      f();
      return std::string();
    });
  }

  /// Compares what the ranks save or load, a line for each thing in which they must not differ.
  void check_states(const char* caller, const TrainingState& state, const std::string& call,
                    bool with_parameters) const {
    std::ostringstream lines;
    lines << call << '\n';
    const std::string failure = detail::get_error_message([&] {
      detail::check_not_averaged();
      TORCH_CHECK(!state.entries().empty(),
                  "the state is empty; add what training goes on from, as in "
                  "state.add(\"model\", model)");
      for (const auto& [name, stateful, is_per_rank] : state.entries()) {
        lines << name << (is_per_rank ? " of each rank\n" : "\n");
        if (!stateful.parameters) continue;
        for (const auto& [parameter, tensor] : stateful.parameters()) {
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
    detail::throw_if_any_rank_failed(backend_, caller, failure);
    detail::check_equal_on_all_ranks(
        backend_, caller, lines.str(),
        "ranks save and load the same; what is each rank's own is added with "
        "add_per_rank");
  }

  std::filesystem::path directory_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  CheckpointManager manager_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
