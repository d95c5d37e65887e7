#pragma once

#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/checkpoint_file.h>
#include <mezzo/checkpoint/detail/checkpoint_folder.h>
#include <mezzo/checkpoint/detail/checkpoint_part.h>
#include <mezzo/checkpoint/detail/load_checkpoint.h>
#include <mezzo/distributed/checkpoint_manager.h>
#include <mezzo/distributed/detail/rank_agreement.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

// Every step at which one rank may fail ends with all ranks telling each other; between those only
// what cannot fail on one rank alone calls collectives, or what goes on calling them when it has.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// How far one rank came with a file.
struct LoadAttempt {
  enum class Outcome : char { whole = 'w', damaged = 'd', gone = 'g', refused = 'r' };
  Outcome outcome = Outcome::whole;
  std::string words{};
  LoadedCheckpoint loaded{};
  DecodedParts decoded{};
};

struct DistributedCheckpointAccess {
  /// With other system calls, for tests of what happens when they fail.
  static DistributedCheckpointManager manager(std::filesystem::path folder, GroupPtr group,
                                              CheckpointManagerOptions options, FileCalls calls) {
    return {std::move(folder), std::move(group), std::move(options), std::move(calls)};
  }
};

inline constexpr const char* kSaveCaller = "DistributedCheckpointManager::save";
inline constexpr const char* kLoadCaller = "DistributedCheckpointManager::load_newest";

}  // namespace detail

inline DistributedCheckpointManager::DistributedCheckpointManager(
    std::filesystem::path folder, c10::intrusive_ptr<c10d::Backend> group,
    CheckpointManagerOptions options)
    : DistributedCheckpointManager(std::move(folder), std::move(group), std::move(options),
                                   detail::FileCalls()) {}

inline DistributedCheckpointManager::DistributedCheckpointManager(
    std::filesystem::path folder, c10::intrusive_ptr<c10d::Backend> group,
    CheckpointManagerOptions options, detail::FileCalls calls)
    : folder_(detail::absolute_folder(folder)),
      ranks_(detail::checked(std::move(group), "DistributedCheckpointManager")),
      calls_(calls),
      files_(folder_, std::move(options), std::move(calls)) {}

inline SavedCheckpoint DistributedCheckpointManager::save(const TrainingState& state,
                                                          std::int64_t step) {
  detail::check_states(detail::kSaveCaller, ranks_, state, "step " + std::to_string(step),
                       /*with_values=*/true);
  detail::CollectedState collected = collect(state);
  std::istringstream outcome(write(state, step, collected));
  SavedCheckpoint saved;
  std::string file;
  std::getline(outcome, file) >> saved.bytes >> saved.durable;
  saved.file = folder_ / file;
  return saved;
}

/// Saves the objects into memory, on all ranks: what is to be gathered is on rank 0 then.
inline detail::CollectedState DistributedCheckpointManager::collect(const TrainingState& state) {
  ranks_.check(detail::kSaveCaller, detail::first_failure(state, [](const detail::NamedPart& one) {
                 one.part->check_savable();
               }));
  detail::CollectedState collected;
  std::vector<detail::PickledValue> objects;
  const std::string failure = detail::first_failure(state, [&](const detail::NamedPart& one) {
    const std::size_t number = objects.size();
    detail::PickledValue& object = objects.emplace_back();
    std::string& own = collected.own.emplace_back();
    const detail::SavedValue saved = one.part->save();
    if (ranks_.rank() != 0 && !one.is_per_rank) return;
    object = detail::pickled(saved, detail::key_prefix(number, ranks_.rank()));
    if (ranks_.rank() == 0) return;
    for (const detail::PickledStorage& storage : object.storages) {
      storage.read([&own](const void* data, std::size_t size) {
        own.append(static_cast<const char*>(data), size);
      });
    }
  });
  ranks_.check(detail::kSaveCaller, failure);
  const bool is_first = ranks_.rank() == 0;
  const std::vector<std::string> texts = ranks_.gather(
      detail::describe_pickled(is_first ? std::vector<detail::PickledValue>{} : objects));
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    collected.objects.push_back(detail::parse_pickled(texts[static_cast<std::size_t>(rank)], rank));
    for (const detail::PickledValue& object : collected.objects.back()) {
      for (const auto& storage : object.storages) {
        collected.pieces_left += detail::RankAgreement::pieces_of(storage.size);
      }
    }
  }
  if (is_first) collected.objects[0] = std::move(objects);
  return collected;
}

/// On rank 0: writes the objects, with one a rank for what is each rank's own.
inline void DistributedCheckpointManager::add_all(const TrainingState& state,
                                                  detail::CollectedState& collected,
                                                  detail::CheckpointZip& zip) {
  const auto& parts = detail::CheckpointAccess::parts(state);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const auto& [name, part, is_per_rank] = parts[i];
    const int owners = is_per_rank ? ranks_.size() : 1;
    for (int rank = 0; rank < owners; ++rank) {
      detail::PickledValue& object = collected.objects[static_cast<std::size_t>(rank)][i];
      for (detail::PickledStorage& storage : object.storages) {
        if (rank == 0) break;
        storage.read = [&, rank](const detail::PickledStorage::Take& take) {
          std::string bytes;
          const auto append = [&bytes](const void* data, std::size_t size) {
            bytes.append(static_cast<const char*>(data), size);
          };
          ranks_.send_to_rank_0(rank, nullptr, storage.size, append, collected.pieces_left);
          take(bytes.data(), bytes.size());
        };
      }
      zip.add({.name = detail::name_of_rank(name, rank),
               .kind = part->kind(),
               .owner = {rank, owners},
               .layout = part->layout(),
               .identity = rank == 0 ? part->identity(parts) : std::string()},
              object);
    }
  }
}

/// On the other ranks, in the same order, until rank 0 wants no more.
inline void DistributedCheckpointManager::send_all(detail::CollectedState& collected) {
  for (std::size_t i = 0; i < collected.own.size(); ++i) {
    for (int rank = 1; rank < ranks_.size(); ++rank) {
      const char* bytes = rank == ranks_.rank() ? collected.own[i].data() : nullptr;
      for (const auto& storage : collected.objects[static_cast<std::size_t>(rank)][i].storages) {
        if (!ranks_.send_to_rank_0(rank, bytes, storage.size, {}, collected.pieces_left)) return;
        if (bytes != nullptr) bytes += storage.size;
      }
    }
  }
}

/// \returns what was saved, as lines, on all ranks
inline std::string DistributedCheckpointManager::write(const TrainingState& state,
                                                       std::int64_t step,
                                                       detail::CollectedState& collected) {
  if (ranks_.rank() != 0) send_all(collected);
  return ranks_.from_rank_0(detail::kSaveCaller, [&] {
    std::ostringstream lines;
    try {
      const SavedCheckpoint saved =
          files_.write(step, [&](detail::CheckpointZip& zip) { add_all(state, collected, zip); });
      lines << saved.file.filename().string() << '\n' << saved.bytes << ' ' << saved.durable;
    } catch (...) {
      if (collected.pieces_left > 0) ranks_.asks_for_more(false);
      throw;
    }
    return lines.str();
  });
}

inline std::optional<LoadedCheckpoint> DistributedCheckpointManager::load_newest(
    const TrainingState& state, const LoadOptions& options) {
  using Outcome = detail::LoadAttempt::Outcome;
  detail::check_states(detail::kLoadCaller, ranks_, state,
                       options.subset ? "a subset" : "the whole state", /*with_values=*/false);
  std::vector<std::string> passed_over;
  std::string damages, unseen;
  for (std::string name; !(name = choose_file(passed_over)).empty();) {
    detail::LoadAttempt attempt = try_file(name, state, options);
    const auto reports = ranks_.gather(static_cast<char>(attempt.outcome) + attempt.words);
    const auto words_of = [&reports](Outcome outcome) {
      std::vector<std::string> words;
      words.reserve(reports.size());
      for (const std::string& report : reports) {
        words.push_back(report[0] == static_cast<char>(outcome) ? report.substr(1) : "");
      }
      return words;
    };
    const auto first = [](const std::vector<std::string>& words) {
      return std::find_if(words.begin(), words.end(), [](const auto& one) { return !one.empty(); });
    };
    ranks_.throw_first(detail::kLoadCaller, words_of(Outcome::refused));
    const auto gone = words_of(Outcome::gone);
    if (first(gone) != gone.end()) {
      if (name == unseen) ranks_.throw_first(detail::kLoadCaller, gone);
      unseen = name;  // who saves may have removed it, and then there is a newer one
      continue;
    }
    const auto damaged = words_of(Outcome::damaged);
    if (const auto damage = first(damaged); damage != damaged.end()) {
      const std::string where = " on rank " + std::to_string(damage - damaged.begin());
      if (ranks_.rank() == 0) files_.pass_over(folder_ / name, *damage + where);
      damages += "\n  " + name + " " + *damage + where;
      passed_over.push_back(name);
      continue;
    }
    apply(name, attempt);
    return attempt.loaded;
  }
  TORCH_CHECK(damages.empty(), detail::kLoadCaller, ": ", folder_.string(),
              " has no checkpoint that is whole:", damages, "\nMove them elsewhere to begin anew");
  if (ranks_.rank() == 0) files_.tell_empty();
  return std::nullopt;
}

/// The newest that rank 0 sees but for some; empty if there is none.
inline std::string DistributedCheckpointManager::choose_file(
    const std::vector<std::string>& passed_over) {
  return ranks_.from_rank_0(detail::kLoadCaller, [&]() -> std::string {
    for (const std::filesystem::path& file : files_.files()) {
      std::string name = file.filename().string();
      if (std::find(passed_over.begin(), passed_over.end(), name) == passed_over.end()) return name;
    }
    return {};
  });
}

/// Reads, and changes nothing.
inline detail::LoadAttempt DistributedCheckpointManager::try_file(
    const std::string& name, const TrainingState& state, const LoadOptions& options) const {
  using Outcome = detail::LoadAttempt::Outcome;
  const std::filesystem::path file = folder_ / name;
  detail::LoadAttempt attempt;
  attempt.loaded.file = file;
  try {
    attempt.decoded =
        detail::decode_file(calls_, file, detail::CheckpointAccess::parts(state), options.subset,
                            options.device, attempt.loaded.step, {ranks_.rank(), ranks_.size()});
    attempt.words = detail::first_failure(
        state, [](const detail::NamedPart& one) { one.part->check_savable(); });
    if (!attempt.words.empty()) attempt.outcome = Outcome::refused;
  } catch (const detail::UnusableCheckpoint& failure) {
    attempt.outcome = Outcome::damaged;
    attempt.words = failure.words();
  } catch (...) {
    attempt.outcome = Outcome::refused;
    attempt.words = detail::failure_of_current_exception();
  }
  if (attempt.outcome != Outcome::whole && !detail::is_there(file)) {
    attempt.outcome = Outcome::gone;
    attempt.words = file.string() + " is not there; all ranks must see the folder that rank 0 sees";
  }
  return attempt;
}

/// Gives the objects of all ranks what was read, or those of none.
inline void DistributedCheckpointManager::apply(const std::string& name,
                                                detail::LoadAttempt& attempt) {
  const std::string file = (folder_ / name).string();
  std::optional<detail::LoadedParts> parts;
  ranks_.check(detail::kLoadCaller, detail::failure_of([&] {
                 parts.emplace(file, std::move(attempt.decoded.pending));
               }));

  std::vector<std::string> failures = ranks_.gather(parts->apply());
  const bool has_failed =
      std::any_of(failures.begin(), failures.end(), [](const auto& one) { return !one.empty(); });
  if (has_failed) {
    const std::vector<std::string> left = ranks_.gather(parts->put_back());
    std::string end;
    for (std::size_t rank = 0; rank < left.size(); ++rank) {
      if (!left[rank].empty()) end += left[rank] + " on rank " + std::to_string(rank);
    }
    if (end.empty()) end = "; everything is as it was before, on all ranks";
    for (std::string& one : failures) {
      if (!one.empty()) one += end;
    }
    ranks_.throw_first(detail::kLoadCaller, failures);
  }
  for (const std::string& note : attempt.decoded.notes) {
    if (ranks_.rank() == 0) files_.warn(file + ": " + note);
  }
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
