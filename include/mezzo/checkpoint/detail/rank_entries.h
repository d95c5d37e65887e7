#pragma once

#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/checkpoint_folder.h>
#include <mezzo/checkpoint/detail/file_format.h>

#include <cstdint>
#include <string>
#include <string_view>

// What each rank of a job has of its own, as entries of a file: the object "position" of 2 ranks is
// "position" of the kind "rank 0 of 2: integer", and "position, rank 1" of the kind "rank 1 of 2:
// integer". With one rank it is an object like others.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// One of the ranks that read or write together. `ranks` is 0 for a process that knows of none.
struct RankOf {
  std::int64_t rank = 0;
  std::int64_t ranks = 0;

  bool operator==(const RankOf&) const = default;
};

/// A kind as a file has it, in its parts.
struct EntryKind {
  RankOf owner{0, 1};
  std::string kind;
};

inline std::string name_of_rank(const std::string& name, std::int64_t rank) {
  return rank == 0 ? name : name + ", rank " + std::to_string(rank);
}

inline std::string kind_of_rank(const std::string& kind, RankOf owner) {
  if (owner.ranks == 1) return kind;
  return "rank " + std::to_string(owner.rank) + " of " + std::to_string(owner.ranks) + ": " + kind;
}

inline EntryKind entry_kind(const std::string& in_file) {
  std::string_view rest = in_file;
  EntryKind found;
  if (take_text(rest, "rank ") && take_integer(rest, found.owner.rank) && take_text(rest, " of ") &&
      take_integer(rest, found.owner.ranks) && take_text(rest, ": ")) {
    found.kind = rest;
    return found;
  }
  return {{0, 1}, in_file};
}

inline const CheckpointEntry* entry_named(const CheckpointIndex& index, const std::string& name) {
  for (const CheckpointEntry& entry : index.entries) {
    if (entry.name == name) return &entry;
  }
  return nullptr;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
