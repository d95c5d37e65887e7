#pragma once

#include <mezzo/base/detail/crc32c.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/checkpoint/detail/checkpoint_file.h>
#include <mezzo/checkpoint/detail/checkpoint_folder.h>
#include <mezzo/checkpoint/detail/checkpoint_part.h>
#include <mezzo/checkpoint/detail/load_checkpoint.h>
#include <mezzo/distributed/checkpoint_manager.h>
#include <mezzo/distributed/detail/rank_agreement.h>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

// After every stage in which one rank may fail, all ranks tell each other whether they have. Within
// a stage a rank that has failed goes on calling the collectives for which the others wait.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The result of one rank's attempt to load a file.
struct LoadAttempt {
  enum class Outcome : char { whole = 'w', damaged = 'd', gone = 'g', refused = 'r' };
  Outcome outcome = Outcome::whole;
  std::string words{};
  LoadedCheckpoint loaded{};
  DecodedParts decoded{};
};

/// A state that is ready to be written.
struct CollectedState {
  std::vector<std::vector<PickledValue>> objects{};  ///< by rank and part; common ones on rank 0
  std::string own{};  ///< on other ranks than 0: the bytes of its storages, part by part

  /// The storages of other ranks than 0, part by part and then rank by rank: whose, and how long.
  std::vector<std::pair<int, std::uint64_t>> storages{};
  std::size_t sent = 0;        ///< storages that rank 0 has got
  std::size_t own_offset = 0;  ///< bytes of `own` that it has got

  bool has_more() const { return sent < storages.size(); }

  /// Sends the next storage to rank 0, and returns its bytes there. All ranks call it.
  at::Tensor next(const RankAgreement& ranks) {
    const auto [from, size] = storages[sent++];
    const at::Tensor bytes = at::empty({static_cast<int64_t>(size)}, at::kByte);
    if (ranks.rank() == from) {
      std::memcpy(bytes.mutable_data_ptr(), own.data() + own_offset, size);
      own_offset += size;
    }
    const at::Tensor on_device = bytes.to(ranks.device());
    broadcast(ranks.group(), on_device, from).wait();
    return on_device.cpu();
  }
};

/// Returns the pickled objects without their storages, for other ranks.
inline std::string describe_pickled(const std::vector<PickledValue>& objects) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (const PickledValue& object : objects) {
    c10::impl::GenericList types(c10::AnyType::get()), sizes(c10::AnyType::get());
    for (const std::string& type : object.types) types.push_back(type);
    for (const auto& storage : object.storages) {
      sizes.push_back(static_cast<std::int64_t>(storage.size));
    }
    list.push_back(
        c10::ivalue::Tuple::create(std::vector<c10::IValue>{object.instructions, types, sizes}));
  }
  return whole_pickle(pickled({c10::IValue(list)}, "").instructions);
}

inline std::vector<PickledValue> parse_pickled(const std::string& text, int rank) {
  std::vector<PickledValue> objects;
  const c10::IValue list = torch::jit::unpickle(text.data(), text.size());
  for (const c10::IValue& one : list.toListRef()) {
    const auto& fields = one.toTupleRef().elements();
    PickledValue& object = objects.emplace_back(PickledValue{fields[0].toStringRef()});
    for (const c10::IValue& type : fields[1].toListRef())
      object.types.push_back(type.toStringRef());
    for (const c10::IValue& size : fields[2].toListRef()) {
      const std::string key =
          key_prefix(objects.size() - 1, rank) + std::to_string(object.storages.size());
      object.storages.push_back({key, static_cast<std::uint64_t>(size.toInt()), nullptr});
    }
  }
  return objects;
}

/// Returns a line for each thing in which ranks must not differ.
inline std::string describe(const TrainingState& state, bool with_values) {
  std::ostringstream lines;
  for (const auto& [name, part, is_per_rank] : CheckpointAccess::parts(state)) {
    lines << name << ": " << part->kind() << (is_per_rank ? " of each rank" : "");
    const std::string layout = part->layout();
    if (!layout.empty()) {
      lines << ", names and shapes with the CRC-32C " << crc32c_text(layout.data(), layout.size());
    }
    if (with_values && !is_per_rank) {
      std::string value;
      const std::string failure = failure_of([&, &of = *part] { value = of.value_in_common(); });
      TORCH_CHECK(failure.empty(), '"', name, "\": ", failure);
      c10::ReplaceAll(value, "\n", "\n" + name + ": ");
      lines << ' ' << value;
    }
    lines << '\n';
  }
  return lines.str();
}

/// Calls `f` for each part, also after one that throws, for other ranks may wait for its collectives.
/// Returns the message of the first exception.
template <class F>
std::string first_failure(const TrainingState& state, const F& f) {
  std::string failure;
  for (const NamedPart& part : CheckpointAccess::parts(state)) {
    const std::string own = failure_of([&] { f(part); });
    if (failure.empty() && !own.empty()) failure = '"' + part.name + "\": " + own;
  }
  return failure;
}

inline void check_states(const char* caller, RankAgreement& ranks, const TrainingState& state,
                         const std::string& call, bool with_values) {
  std::string text;
  ranks.check(caller, failure_of([&] {
                TORCH_CHECK(!CheckpointAccess::parts(state).empty(),
                            "the state is empty; add what training goes on from, as in "
                            "state.add(\"model\", model)");
                text = call + '\n' + describe(state, with_values);
              }));
  ranks.check_alike(caller, text,
                    "ranks save and load the same, and what is each rank's own is added with "
                    "add_per_rank");
}

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

/// Saves the objects into memory, on all ranks. A sharded object is gathered on rank 0.
inline detail::CollectedState DistributedCheckpointManager::collect(const TrainingState& state) {
  ranks_.check(detail::kSaveCaller, detail::first_failure(state, [](const detail::NamedPart& one) {
                 one.part->check_savable();
               }));
  detail::CollectedState collected;
  std::vector<detail::PickledValue> objects;
  const std::string failure = detail::first_failure(state, [&](const detail::NamedPart& one) {
    const std::size_t number = objects.size();
    detail::PickledValue& object = objects.emplace_back();
    const detail::SavedValue saved = one.part->save();
    if (ranks_.rank() != 0 && !one.is_per_rank) return;
    object = detail::pickled(saved, detail::key_prefix(number, ranks_.rank()));
    if (ranks_.rank() == 0) return;
    for (const detail::PickledStorage& storage : object.storages) {
      storage.read([&](const void* data, std::size_t size) {
        collected.own.append(static_cast<const char*>(data), size);
      });
    }
  });
  ranks_.check(detail::kSaveCaller, failure);
  const bool is_first = ranks_.rank() == 0;
  const std::vector<std::string> texts = ranks_.gather(
      detail::describe_pickled(is_first ? std::vector<detail::PickledValue>{} : objects));
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    collected.objects.push_back(detail::parse_pickled(texts[static_cast<std::size_t>(rank)], rank));
  }
  for (std::size_t i = 0; i < objects.size(); ++i) {
    for (int rank = 1; rank < ranks_.size(); ++rank) {
      for (const auto& storage : collected.objects[static_cast<std::size_t>(rank)][i].storages) {
        collected.storages.emplace_back(rank, storage.size);
      }
    }
  }
  if (is_first) collected.objects[0] = std::move(objects);
  return collected;
}

/// Writes the objects on rank 0: one of each rank for an object that each rank has of its own.
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
        storage.read = [&](const detail::PickledStorage::Take& take) {
          const at::Tensor bytes = collected.next(ranks_);
          take(bytes.const_data_ptr(), bytes.nbytes());
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

/// Writes the file on rank 0. Returns its name, bytes and durability as lines, on all ranks.
inline std::string DistributedCheckpointManager::write(const TrainingState& state,
                                                       std::int64_t step,
                                                       detail::CollectedState& collected) {
  const auto send_rest = [&] {
    while (collected.has_more()) collected.next(ranks_);
  };
  if (ranks_.rank() != 0) send_rest();
  return ranks_.from_rank_0(detail::kSaveCaller, [&] {
    std::ostringstream lines;
    try {
      const SavedCheckpoint saved =
          files_.write(step, [&](detail::CheckpointZip& zip) { add_all(state, collected, zip); });
      lines << saved.file.filename().string() << '\n' << saved.bytes << ' ' << saved.durable;
    } catch (...) {
      send_rest();  // to nobody: the other ranks do not know
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

/// Returns the newest file that rank 0 sees, except those in `passed_over`; empty if there is none.
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

/// Reads a file, and changes no object.
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

/// Gives the objects their values from the file, on all ranks or on none.
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
