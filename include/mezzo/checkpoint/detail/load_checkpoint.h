#pragma once

#include <mezzo/base/detail/cast_cache.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/atomic_file.h>
#include <mezzo/checkpoint/detail/checkpoint_file.h>
#include <mezzo/checkpoint/detail/checkpoint_part.h>
#include <mezzo/checkpoint/detail/checkpoint_reader.h>
#include <mezzo/checkpoint/detail/optimizer_identity.h>

#include <c10/core/Device.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

// Loading a checkpoint: the file's objects are first compared with those of the state, then read,
// and only then given to the objects.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Checks that file and state name the same objects. Objects that differ between ranks may be
/// missing in either.
inline void check_names(const CheckpointReader& reader, const std::vector<NamedPart>& parts,
                        bool subset, RankOf who) {
  std::string missing, extra;
  for (const NamedPart& part : parts) {
    const bool is_optional = part.is_per_rank && who.ranks > 0;
    if (reader.index().find(part.name) == nullptr && !is_optional) {
      missing += (missing.empty() ? " \"" : ", \"") + part.name + "\"";
    }
  }
  for (const CheckpointEntry& entry : reader.index().entries) {
    const bool is_wanted = std::any_of(parts.begin(), parts.end(), [&entry](const NamedPart& part) {
      return part.name == entry.name;
    });
    const bool is_per_rank = entry.owner.ranks > 1;
    if (!is_wanted && !is_per_rank && !subset)
      extra += (extra.empty() ? " \"" : ", \"") + entry.name + "\"";
  }
  TORCH_CHECK(missing.empty() && extra.empty(), reader.path().string(),
              " is another training state's:",
              missing.empty() ? std::string() : " it lacks" + missing + ";",
              extra.empty()
                  ? std::string()
                  : " it has" + extra +
                        ", which the state does not name: add them, or load with {.subset = true};",
              " nothing was loaded");
}

inline std::map<std::string, std::string> layout_lines(const std::string& layout) {
  std::map<std::string, std::string> lines;
  std::istringstream stream(layout);
  for (std::string line; std::getline(stream, line);) {
    const std::size_t colon = line.find(": ");
    lines[line.substr(0, colon)] = colon == std::string::npos ? "" : line.substr(colon + 2);
  }
  return lines;
}

/// Returns the first difference between two layouts; empty if there is none.
inline std::string layout_difference(const std::string& in_file, const std::string& here) {
  if (in_file == here) return {};
  const auto file_lines = layout_lines(in_file), own_lines = layout_lines(here);
  for (const auto& [name, shape] : file_lines) {
    const auto own = own_lines.find(name);
    if (own == own_lines.end()) return "the file has the " + name + ", and the module does not";
    if (own->second != shape) {
      return "the " + name + " is " + shape + " in the file, and " + own->second + " here";
    }
  }
  for (const auto& [name, shape] : own_lines) {
    if (file_lines.count(name) == 0) return "the file lacks the " + name;
  }
  return {};
}

/// The work that remains for one object after all objects have been read.
struct PendingPart {
  const NamedPart* part;
  std::function<void()> apply;
};

struct DecodedParts {
  std::vector<PendingPart> pending{};
  /// Differences because another number of ranks wrote the file, one sentence each.
  std::vector<std::string> notes{};
};

/// The entry that an object is read from.
struct ChosenEntry {
  const NamedPart* part;
  const CheckpointEntry* entry;
  bool is_for_other_ranks;
};

inline std::vector<ChosenEntry> choose_entries(const CheckpointReader& reader,
                                               const std::vector<NamedPart>& parts, RankOf who,
                                               std::vector<std::string>& notes) {
  std::vector<ChosenEntry> chosen;
  for (const NamedPart& part : parts) {
    const CheckpointEntry* entry = reader.index().find(part.name);
    if (entry == nullptr) {
      notes.push_back('"' + part.name + "\" is left as it is: the file has none");
      continue;
    }
    const std::int64_t ranks = entry->owner.ranks;
    const bool is_for_other_ranks = part.is_per_rank && who.ranks > 0 && ranks != who.ranks;
    if (part.is_per_rank && ranks == who.ranks) {
      entry = reader.index().find(name_of_rank(part.name, who.rank));
      if (entry == nullptr) {
        throw DamagedCheckpoint("it lacks the \"" + part.name + "\" of rank " +
                                std::to_string(who.rank));
      }
    } else if (!is_for_other_ranks && ranks > 1) {
      notes.push_back('"' + part.name + "\" is what rank 0 had: the file has one of each of " +
                      std::to_string(ranks) + " ranks");
    }
    chosen.push_back({&part, entry, is_for_other_ranks});
  }
  return chosen;
}

inline void note_what_is_left_out(const CheckpointReader& reader,
                                  const std::vector<NamedPart>& parts,
                                  std::vector<std::string>& notes) {
  for (const CheckpointEntry& entry : reader.index().entries) {
    const RankOf owner = entry.owner;
    const bool is_named = std::any_of(parts.begin(), parts.end(), [&entry](const NamedPart& part) {
      return part.name == entry.name;
    });
    if (owner.ranks == 1 || owner.rank != 0 || is_named) continue;
    notes.push_back('"' + entry.name + "\", which each of " + std::to_string(owner.ranks) +
                    " ranks had, is left out: the state does not name it");
  }
}

inline void check_entry(const std::string& file, const ChosenEntry& chosen,
                        const std::vector<NamedPart>& parts) {
  const CheckpointEntry& entry = *chosen.entry;
  const std::string& name = chosen.part->name;
  const CheckpointPart* const part = chosen.part->part.get();
  TORCH_CHECK(entry.kind == part->kind(), file, ": \"", name, "\" is of the kind \"", entry.kind,
              "\" there, and \"", part->kind(), "\" here; nothing was loaded");
  if (chosen.is_for_other_ranks) return;  // shapes may depend on the number of ranks
  const std::string difference = layout_difference(entry.layout, part->layout());
  TORCH_CHECK(difference.empty(), file, ": \"", name, "\" does not fit: ", difference,
              "; nothing was loaded");
  const std::string other = optimizer_difference(entry.identity, part->identity(parts));
  TORCH_CHECK(
      other.empty(), file, ": \"", name, "\" is another optimizer's state: ", other,
      "; nothing was loaded. In C++: make the optimizer as it was saved, or leave it out of "
      "the state, load with {.subset = true}, and begin its moments anew");
}

inline std::function<void()> load_on_other_ranks(const ChosenEntry& chosen, const SavedValue& saved,
                                                 std::int64_t step, RankOf who,
                                                 std::vector<std::string>& notes) {
  const std::string salt = "step " + std::to_string(step) + ", rank " + std::to_string(who.rank) +
                           " of " + std::to_string(who.ranks);
  auto apply = chosen.part->part->load_on_other_ranks(saved, salt);
  notes.push_back('"' + chosen.part->name + "\" is " +
                  (apply ? "begun anew, from the file's, the step and the rank" : "left as it is") +
                  ": the file has what " + std::to_string(chosen.entry->owner.ranks) +
                  " ranks had, and here are " + std::to_string(who.ranks));
  return apply;
}

/// \throws UnusableCheckpoint, or c10::Error for a file that is whole but does not fit
inline DecodedParts decode_parts(const CheckpointReader& reader,
                                 const std::vector<NamedPart>& parts, bool subset,
                                 std::optional<at::Device> device, RankOf who) {
  const std::string file = reader.path().string();
  check_names(reader, parts, subset, who);
  DecodedParts decoded;
  const auto chosen = choose_entries(reader, parts, who, decoded.notes);
  for (const ChosenEntry& one : chosen) check_entry(file, one, parts);
  if (!subset) note_what_is_left_out(reader, parts, decoded.notes);
  for (const ChosenEntry& one : chosen) {
    try {
      SavedValue saved = reader.read(*one.entry, device);
      auto apply = one.is_for_other_ranks
                       ? load_on_other_ranks(one, saved, reader.index().step, who, decoded.notes)
                       : one.part->part->load(std::move(saved));
      if (apply) decoded.pending.push_back({one.part, std::move(apply)});
    } catch (const UnusableCheckpoint&) {
      throw;
    } catch (...) {
      TORCH_CHECK(false, file, ": \"", one.part->name,
                  "\" cannot be read: ", message_of_current_exception(), "; nothing was loaded");
    }
  }
  return decoded;
}

/// Gives the objects the values that were read, and can restore their previous values.
class LoadedParts {
 public:
  /// Takes a snapshot of every object, also of those after one that throws: other ranks may be
  /// waiting for their collectives. \throws c10::Error if one throws
  LoadedParts(std::string file, std::vector<PendingPart> pending)
      : file_(std::move(file)), pending_(std::move(pending)) {
    const c10::NoGradGuard no_grad;
    std::string failure;
    for (const PendingPart& one : pending_) {
      try {
        undo_.push_back(one.part->part->snapshot());
      } catch (...) {
        if (!failure.empty()) continue;
        failure = file_ + ": nothing was loaded, because \"" + one.part->name +
                  "\" cannot be kept for the case of a failure: " + message_of_current_exception();
      }
    }
    TORCH_CHECK(failure.empty(), failure);
  }

  /// Applies the values up to the first object that throws. \returns its message, or an empty text
  std::string apply() {
    const c10::NoGradGuard no_grad;
    for (PendingPart& one : pending_) {
      ++begun_;
      try {
        one.apply();
        one.apply = nullptr;  // with the memory of what was read
      } catch (...) {
        return file_ + ": \"" + one.part->name +
               "\" cannot be loaded: " + message_of_current_exception();
      }
    }
    return {};
  }

  /// Restores the previous values. \returns what could not be restored, or an empty text
  std::string put_back() {
    const c10::NoGradGuard no_grad;
    std::string left;
    for (std::size_t i = 0; i < begun_; ++i) {
      try {
        undo_[i]();
      } catch (...) {
        left += "; and \"" + pending_[i].part->name +
                "\" could not be put back: " + message_of_current_exception();
      }
    }
    begun_ = 0;
    return left;
  }

 private:
  std::string file_;
  std::vector<PendingPart> pending_;
  std::vector<std::function<void()>> undo_;
  std::size_t begun_ = 0;
};

/// Gives the objects the values that were read; all or none.
inline void apply_parts(const std::string& file, std::vector<PendingPart> pending) {
  LoadedParts parts(file, std::move(pending));
  const std::string failure = parts.apply();
  drop_weight_casts();
  if (failure.empty()) return;
  const std::string left = parts.put_back();
  TORCH_CHECK(false, failure, left.empty() ? "; everything is as it was before" : left);
}

/// \throws UnusableCheckpoint, or c10::Error for a file that is whole but does not fit
inline DecodedParts decode_file(const FileCalls& calls, const std::filesystem::path& file,
                                const std::vector<NamedPart>& parts, bool subset,
                                std::optional<at::Device> device, std::int64_t& step,
                                RankOf who = {}) {
  const CheckpointReader reader(calls, file);
  step = reader.index().step;
  return decode_parts(reader, parts, subset, device, who);
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
