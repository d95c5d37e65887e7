#pragma once

#include <c10/util/Exception.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/checkpoint_part.h>
#include <mezzo/checkpoint/detail/load_checkpoint.h>
#include <mezzo/checkpoint/detail/rank_entries.h>
#include <mezzo/checkpoint/detail/sha256.h>
#include <mezzo/distributed/rank_checkpoints.h>

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

/// A state on the point of being written.
struct CollectedState {
  std::vector<std::function<void(const ByteSink&)>> writers{};  ///< on rank 0, one a part
  std::vector<std::string> own{};  ///< on the others: the bytes of what is this rank's
  std::vector<std::vector<std::uint64_t>> sizes{};  ///< by rank and part; 0 of what is common
  std::uint64_t pieces_left = 0;                    ///< that rank 0 has not asked for yet
};

/// A part of the file that rank 0 writes.
class FilePart final : public CheckpointPart {
 public:
  FilePart(std::string kind, std::string layout, std::function<void(const ByteSink&)> writer)
      : kind_(std::move(kind)), layout_(std::move(layout)), writer_(std::move(writer)) {}
  const char* kind() const override { return kind_.c_str(); }
  std::string layout() const override { return layout_; }
  void write(const ByteSink& sink) const override { writer_(sink); }
  std::function<void()> decode(const ByteSource&, std::optional<c10::Device>) const override {
    TORCH_INTERNAL_ASSERT(false, "only written");
  }

 private:
  std::string kind_, layout_;
  std::function<void(const ByteSink&)> writer_;
};

/// How far one rank came with a file.
struct LoadAttempt {
  enum class Outcome : char { whole = 'w', damaged = 'd', gone = 'g', refused = 'r' };
  Outcome outcome = Outcome::whole;
  std::string words{};
  LoadedCheckpoint loaded{};
  DecodedParts decoded{};
};

/// A line for each thing in which ranks must not differ.
inline std::string describe(const TrainingState& state, bool with_values) {
  std::ostringstream lines;
  for (const auto& [name, part, is_per_rank] : state.parts()) {
    lines << name << ": " << part->kind() << (is_per_rank ? " of each rank" : "");
    const std::string layout = part->layout();
    if (!layout.empty()) {
      lines << ", names and shapes with the digest " << digest_text(layout.data(), layout.size());
    }
    if (with_values && !is_per_rank) lines << ' ' << part->value_in_common();
    lines << '\n';
  }
  return lines.str();
}

/// Calls `f` of each part, also of those behind one that throws, for other ranks may wait for them.
/// \returns what the first one threw
template <class F>
std::string first_failure(const TrainingState& state, const F& f) {
  std::string failure;
  for (const NamedPart& part : state.parts()) {
    try {
      f(part);
    } catch (...) {
      if (failure.empty()) failure = '"' + part.name + "\": " + failure_of_current_exception();
    }
  }
  return failure;
}

inline std::vector<std::uint64_t> numbers_in(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::uint64_t> numbers;
  for (std::uint64_t number = 0; stream >> number;) numbers.push_back(number);
  return numbers;
}

inline void check_states(const char* caller, RankAgreement& ranks, const TrainingState& state,
                         const std::string& call, bool with_values) {
  std::string text;
  std::string failure;
  try {
    TORCH_CHECK(!state.parts().empty(), "the state is empty; add to it");
    text = call + '\n' + describe(state, with_values);
  } catch (...) {
    failure = failure_of_current_exception();
  }
  ranks.check(caller, failure);
  ranks.check_alike(caller, text);
}

inline constexpr const char* kSaveCaller = "RankCheckpoints::save";
inline constexpr const char* kLoadCaller = "RankCheckpoints::load_newest";

}  // namespace detail

inline RankCheckpoints::RankCheckpoints(std::filesystem::path folder, Communicator communicator,
                                        CheckpointManagerOptions options)
    : RankCheckpoints(std::move(folder), std::move(communicator), std::move(options),
                      detail::FileCalls()) {}

inline RankCheckpoints::RankCheckpoints(std::filesystem::path folder, Communicator communicator,
                                        CheckpointManagerOptions options, detail::FileCalls calls)
    : folder_(folder.empty() ? std::filesystem::path(".") : std::move(folder)),
      ranks_(std::move(communicator)),
      calls_(calls),
      files_(folder_, std::move(options), std::move(calls)) {}

inline SavedCheckpoint RankCheckpoints::save(const TrainingState& state, std::int64_t step) {
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

/// The saves of the parts, on all ranks: what is to be gathered is on rank 0 then.
inline detail::CollectedState RankCheckpoints::collect(const TrainingState& state) {
  ranks_.check(detail::kSaveCaller, detail::first_failure(state, [](const detail::NamedPart& one) {
                 one.part->check_savable();
               }));
  detail::CollectedState collected;
  std::string sizes;
  const std::string failure = detail::first_failure(state, [&](const detail::NamedPart& one) {
    auto writer = one.part->collect();
    std::string& own = collected.own.emplace_back();
    if (ranks_.rank() == 0) {
      collected.writers.push_back(std::move(writer));
    } else if (one.is_per_rank) {
      writer([&own](const void* data, std::size_t size) {
        own.append(static_cast<const char*>(data), size);
      });
    }
    sizes += std::to_string(own.size()) + ' ';
  });
  ranks_.check(detail::kSaveCaller, failure);
  for (const std::string& of_rank : ranks_.gather(sizes)) {
    collected.sizes.push_back(detail::numbers_in(of_rank));
    for (const std::uint64_t size : collected.sizes.back()) {
      collected.pieces_left += detail::RankAgreement::pieces_of(size);
    }
  }
  return collected;
}

/// On rank 0: the state as the file has it, with an entry a rank for what is each rank's own.
inline TrainingState RankCheckpoints::in_file(const TrainingState& state,
                                              detail::CollectedState& collected) {
  TrainingState file;
  for (std::size_t i = 0; i < state.parts().size(); ++i) {
    const auto& [name, part, is_per_rank] = state.parts()[i];
    for (int rank = 0; rank < (is_per_rank ? ranks_.size() : 1); ++rank) {
      const std::uint64_t size = collected.sizes[static_cast<std::size_t>(rank)][i];
      const auto from_rank = [this, &collected, rank, size](const detail::ByteSink& sink) {
        ranks_.send_to_rank_0(rank, {}, size, sink, collected.pieces_left);
      };
      const std::string kind = detail::kind_of_rank(part->kind(), {rank, ranks_.size()});
      file.add_part(detail::name_of_rank(name, rank),
                    std::make_shared<detail::FilePart>(
                        is_per_rank ? kind : part->kind(), part->layout(),
                        rank == 0 ? std::move(collected.writers[i]) : from_rank));
    }
  }
  return file;
}

/// \returns what was saved, as lines, on all ranks
inline std::string RankCheckpoints::write(const TrainingState& state, std::int64_t step,
                                          detail::CollectedState& collected) {
  bool is_wanted = ranks_.rank() != 0;
  for (std::size_t i = 0; is_wanted && i < state.parts().size(); ++i) {
    for (int rank = 1; is_wanted && rank < ranks_.size(); ++rank) {
      const std::uint64_t size = collected.sizes[static_cast<std::size_t>(rank)][i];
      is_wanted = ranks_.send_to_rank_0(rank, collected.own[i], size, {}, collected.pieces_left);
    }
  }
  return ranks_.from_rank_0(detail::kSaveCaller, [&] {
    std::ostringstream lines;
    try {
      const SavedCheckpoint saved = files_.save(in_file(state, collected), step);
      lines << saved.file.filename().string() << '\n' << saved.bytes << ' ' << saved.durable;
    } catch (...) {
      if (collected.pieces_left > 0) ranks_.asks_for_more(false);
      throw;
    }
    return lines.str();
  });
}

inline std::optional<LoadedCheckpoint> RankCheckpoints::load_newest(const TrainingState& state,
                                                                    const LoadOptions& options) {
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
      damages += "\n  " + name + ": " + *damage + where;
      passed_over.push_back(name);
      continue;
    }
    apply(name, attempt);
    return attempt.loaded;
  }
  TORCH_CHECK(damages.empty(), detail::kLoadCaller, ": ", folder_.string(),
              " has no checkpoint that is whole:", damages, "\nMove them elsewhere to begin anew");
  return std::nullopt;
}

/// The newest that rank 0 sees but for some; empty if there is none.
inline std::string RankCheckpoints::choose_file(const std::vector<std::string>& passed_over) {
  return ranks_.from_rank_0(detail::kLoadCaller, [&]() -> std::string {
    for (const std::filesystem::path& file : files_.files()) {
      std::string name = file.filename().string();
      if (std::find(passed_over.begin(), passed_over.end(), name) == passed_over.end()) return name;
    }
    return {};
  });
}

/// Reads, and changes nothing.
inline detail::LoadAttempt RankCheckpoints::try_file(const std::string& name,
                                                     const TrainingState& state,
                                                     const LoadOptions& options) const {
  using Outcome = detail::LoadAttempt::Outcome;
  const std::filesystem::path file = folder_ / name;
  detail::LoadAttempt attempt;
  attempt.loaded.file = file;
  try {
    auto decoded = detail::decode_if_whole(calls_, file, state, options, attempt.loaded.step,
                                           attempt.words, {ranks_.rank(), ranks_.size()});
    if (!decoded) {
      attempt.outcome = Outcome::damaged;
      return attempt;
    }
    attempt.decoded = std::move(*decoded);
    attempt.words = detail::first_failure(
        state, [](const detail::NamedPart& one) { one.part->check_savable(); });
    if (!attempt.words.empty()) attempt.outcome = Outcome::refused;
  } catch (...) {
    const bool is_gone = !detail::is_there(file);
    attempt.outcome = is_gone ? Outcome::gone : Outcome::refused;
    attempt.words =
        is_gone ? file.string() + " is not there; all ranks must see the folder that rank 0 sees"
                : detail::failure_of_current_exception();
  }
  return attempt;
}

/// Gives the objects of all ranks what was read, or those of none.
inline void RankCheckpoints::apply(const std::string& name, detail::LoadAttempt& attempt) {
  const std::string file = (folder_ / name).string();
  std::optional<detail::LoadedParts> parts;
  std::string failure;
  try {
    parts.emplace(file, std::move(attempt.decoded.pending));
  } catch (...) {
    failure = detail::failure_of_current_exception();
  }
  ranks_.check(detail::kLoadCaller, failure);

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
