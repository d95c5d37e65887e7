/// \file
/// DistributedCheckpointManager: checkpoints of a multi-process run.
#pragma once

#include <mezzo/base/detail/crc32c.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/checkpoint/detail/checkpoint_file.h>
#include <mezzo/checkpoint/detail/load_plan.h>
#include <mezzo/checkpoint/detail/root_dict.h>
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

/// Saves and loads the checkpoints of a distributed run, as CheckpointManager does for one process:
///
/// \code
///   mezzo::TrainingState state;
///   state.add("model", model).add("optimizer", optimizer).add("scaler", scaler);
///   state.add("epoch", epoch).add_rng_state();               // RNG states of all ranks
///
///   mezzo::DistributedCheckpointManager checkpoints("runs/ner", world);
///   if (auto resumed = checkpoints.load_latest(state)) step = resumed->step;
///   ...
///   if (step % 1000 == 0) checkpoints.save(state, step);     // on all ranks
/// \endcode
///
/// All methods except `checkpoints` are collective calls, with states of the same names in the same
/// order. If one rank throws, all ranks throw its message, which names the rank. A checkpoint has
/// the format of a single process: shared objects are saved from rank 0, a ShardedOptimizer is
/// gathered, and per-rank objects (`add_per_rank`, `add_rng_state`) are saved from all ranks.
///
/// The directory must be visible to all ranks. Rank 0 holds the lock, and writes while the others
/// wait. docs/checkpoints.md ("Distributed checkpoints") describes loading with another world size.
class DistributedCheckpointManager {
 public:
  /// Does not create the directory.
  /// \throws c10::Error if `backend` is null, or unless max_to_keep is at least 1
  DistributedCheckpointManager(const std::filesystem::path& directory,
                               c10::intrusive_ptr<c10d::Backend> backend,
                               CheckpointManagerOptions options = {})
      : directory_(std::filesystem::absolute(directory.empty() ? "." : directory)),
        backend_(detail::check_backend(std::move(backend), "DistributedCheckpointManager")),
        manager_(directory_, std::move(options)) {}

  /// Saves as CheckpointManager::save. Returns on all ranks after the checkpoint is renamed. First
  /// compares names, steps and checksums of all module parameters between ranks. Each rank needs
  /// memory for the per-rank objects of all ranks, and rank 0 for the gathered ShardedOptimizer.
  /// \throws c10::Error on all ranks if one cannot save, or if states, steps or parameters differ;
  ///   existing checkpoints are then unchanged
  SavedCheckpoint save(const TrainingState& state, std::int64_t step) {
    constexpr const char* kCaller = "DistributedCheckpointManager::save";
    const std::string result =
        collect_on_rank0(kCaller, state, step, [&](const c10::IValue& root_dict) {
          const SavedCheckpoint saved = manager_.write(root_dict, step);
          return std::to_string(saved.size_bytes) + ' ' + saved.path.filename().string();
        });
    return {directory_ / result.substr(result.find(' ') + 1), std::stoull(result)};
  }

  /// Saves as CheckpointManager::save_async: the ranks compare and gather their objects before it
  /// returns, and a thread of rank 0 writes, which calls no collectives. If that fails, the next
  /// collective call throws its error on all ranks.
  /// \throws c10::Error on all ranks as `save`, for what is known before the file is written
  void save_async(const TrainingState& state, std::int64_t step) {
    constexpr const char* kCaller = "DistributedCheckpointManager::save_async";
    (void)collect_on_rank0(kCaller, state, step, [&](const c10::IValue& root_dict) {
      manager_.write_async(root_dict, step);
      return std::string();
    });
    is_saving_ = true;
  }

  /// Waits until the checkpoint of save_async is renamed. \throws c10::Error on all ranks if
  ///   writing it failed, once
  void wait() { wait("DistributedCheckpointManager::wait"); }

  /// Loads the latest checkpoint that is intact on all ranks, as CheckpointManager::load_latest.
  /// \throws c10::Error on all ranks if CheckpointManager::load_latest throws on one of them. If a
  ///   rank fails after all checks, other ranks may have loaded the checkpoint: terminate the run
  std::optional<LoadedCheckpoint> load_latest(const TrainingState& state,
                                              const LoadOptions& options = {}) {
    constexpr const char* kCaller = "DistributedCheckpointManager::load_latest";
    wait(kCaller);
    check_states(kCaller, state,
                 options.ignore_unexpected ? "ignore_unexpected: true" : "ignore_unexpected: false",
                 /*with_parameters=*/false);
    std::istringstream filenames(detail::run_on_rank0(backend_, kCaller, [this] {
      std::string lines;  // latest first
      for (const auto& path : manager_.checkpoints()) lines += path.filename().string() + '\n';
      return lines;
    }));
    std::string failures;
    for (std::string filename; std::getline(filenames, filename);) {
      const std::filesystem::path path = directory_ / filename;
      detail::LoadPlan plan;
      std::string invalid_reason;
      const std::string mismatch = detail::get_error_message([&] {
        try {
          plan = detail::make_load_plan(path, state.entries(), options.ignore_unexpected,
                                        {backend_->getRank(), backend_->getSize()});
        } catch (const detail::InvalidCheckpointError& error) {
          invalid_reason =
              error.what() + std::string(" on rank ") + std::to_string(backend_->getRank());
        }
      });
      detail::throw_if_any_rank_failed(backend_, kCaller, mismatch);
      bool is_corrupt = false;
      for (const std::string& reason : detail::all_gather_strings(backend_, invalid_reason)) {
        if (reason.empty() || std::exchange(is_corrupt, true)) continue;
        failures += "\n  " + filename + ' ' + reason;
        notify_on_rank0(kCaller, [&] { manager_.skip_corrupt(path, reason); });
      }
      if (is_corrupt) continue;
      detail::throw_if_any_rank_failed(backend_, kCaller,
                                       detail::get_error_message([&] { detail::apply(plan); }));
      notify_on_rank0(kCaller, [&] {
        for (const std::string& note : plan.notes) manager_.warn(path.string() + ": " + note);
      });
      return LoadedCheckpoint{plan.path, plan.step};
    }
    TORCH_CHECK(failures.empty(), kCaller, ": ", directory_.string(),
                " has no intact checkpoint:", failures,
                "\nMove them elsewhere to start from scratch");
    return std::nullopt;
  }

  /// Returns the paths of all checkpoints that this rank sees, latest first.
  std::vector<std::filesystem::path> checkpoints() const { return manager_.checkpoints(); }

 private:
  void wait(const char* caller) {
    if (std::exchange(is_saving_, false)) notify_on_rank0(caller, [this] { manager_.wait(); });
  }

  /// Collects the objects of all ranks, and returns what `write(root_dict)` returns on rank 0.
  template <class Write>
  std::string collect_on_rank0(const char* caller, const TrainingState& state, std::int64_t step,
                               const Write& write) {
    wait(caller);
    check_states(caller, state, "step " + std::to_string(step), /*with_parameters=*/true);
    const auto& entries = state.entries();
    const detail::ParameterFqns names = detail::get_parameter_fqns(entries);
    // All ranks save all objects, also after an error, because some of them call collectives.
    detail::PythonDict values = detail::make_dict(), per_rank_values = detail::make_dict();
    std::string failure;
    for (const detail::CheckpointEntry& entry : entries) {
      c10::IValue value;
      const std::string message =
          detail::get_error_message([&] { value = entry.stateful.save(names); });
      if (failure.empty() && !message.empty()) failure = '"' + entry.name + "\": " + message;
      values.insert(entry.name, value);
      if (entry.is_per_rank) per_rank_values.insert(entry.name, value);
    }
    std::vector<char> bytes;
    const std::string message =
        detail::get_error_message([&] { bytes = torch::jit::pickle_save(per_rank_values); });
    detail::throw_if_any_rank_failed(backend_, caller, failure.empty() ? message : failure);
    const auto pickles = detail::all_gather_strings(backend_, {bytes.begin(), bytes.end()});
    return detail::run_on_rank0(backend_, caller, [&] {
      detail::check_saveable("CheckpointManager::save", entries, step);
      detail::PythonDict values_by_rank = detail::make_dict();  // lists of values, by name
      for (const std::string& pickle : pickles) {
        for (const auto& value :
             torch::jit::pickle_load({pickle.begin(), pickle.end()}).toGenericDict()) {
          if (!values_by_rank.contains(value.key()))
            values_by_rank.insert(value.key(), detail::make_list());
          values_by_rank.at(value.key()).toList().push_back(value.value());
        }
      }
      const bool has_per_rank_values = pickles.size() > 1 && !values_by_rank.empty();
      return write(detail::make_root_dict(
          values, step, has_per_rank_values ? c10::IValue(values_by_rank) : c10::IValue()));
    });
  }

  /// Calls `f` on rank 0. If it throws, all ranks throw.
  template <class F>
  void notify_on_rank0(const char* caller, const F& f) const {
    (void)detail::run_on_rank0(backend_, caller, [&f] {
      f();
      return std::string();
    });
  }

  /// Checks that `call`, the names of objects, and the names, dtypes and shapes of parameters (and,
  /// if `with_parameters`, their checksums) are equal on all ranks.
  void check_states(const char* caller, const TrainingState& state, const std::string& call,
                    bool with_parameters) const {
    std::ostringstream lines;
    lines << call << '\n';
    const std::string failure = detail::get_error_message([&] {
      detail::check_no_ema_guard();
      TORCH_CHECK(!state.entries().empty(),
                  "the state is empty; add the objects of the training run, as in "
                  "state.add(\"model\", model)");
      for (const auto& [name, stateful, is_per_rank] : state.entries()) {
        lines << name << (is_per_rank ? " (per rank)\n" : "\n");
        if (!stateful.parameters) continue;
        for (const auto& [parameter, tensor] : stateful.parameters()) {
          lines << name << '.' << parameter << ": " << tensor.scalar_type() << ' '
                << tensor.sizes();
          if (with_parameters) {
            const at::Tensor bytes = tensor.detach().cpu().contiguous();
            lines << ", CRC-32C " << detail::crc32c_hex(bytes.const_data_ptr(), bytes.nbytes());
          }
          lines << '\n';
        }
      }
    });
    detail::throw_if_any_rank_failed(backend_, caller, failure);
    detail::check_equal_on_all_ranks(backend_, caller, lines.str(),
                                     "all ranks must save and load the same objects; add "
                                     "objects that differ between ranks with add_per_rank");
  }

  std::filesystem::path directory_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  CheckpointManager manager_;
  bool is_saving_ = false;  // save_async, on all ranks
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
