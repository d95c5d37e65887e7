#pragma once

#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/byte_stream.h>

#include <cstdint>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

// A file of format 1; numbers are little-endian:
//
//   8 bytes  "MEZZOCKP"
//   4        1, the format's version, and 4 its complement: here every version has them, so that
//            a newer file is told from a damaged one
//   ...      what the entries wrote, one after the other
//   ...      the index: step (8), the number of entries (4), and of each its name, kind and layout,
//            strings behind their length (4), and its size (8)
//   8        where the index begins, and 8 "MEZZOEND"
//   32       SHA-256 of all that stands before
//
// Nothing but the version is believed before the checksum fits.
//
// What each of N ranks has of its own are N entries (rank_entries.h); readers that know of no ranks
// take that of rank 0.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline constexpr std::string_view kCheckpointMagic = "MEZZOCKP";
inline constexpr std::string_view kCheckpointEnd = "MEZZOEND";
inline constexpr std::uint32_t kCheckpointVersion = 1;
inline constexpr std::uint64_t kCheckpointHeaderBytes = 16;
inline constexpr std::uint64_t kDigestBytes = 32;
inline constexpr std::uint64_t kCheckpointTrailerBytes = 16 + kDigestBytes;

/// What is wrong with a file, for a sentence that begins with its name.
class DamagedCheckpoint : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct CheckpointEntry {
  std::string name;
  std::string kind;
  std::string layout;
  std::uint64_t offset = 0;
  std::uint64_t size = 0;
};

struct CheckpointIndex {
  std::int64_t step = 0;
  std::vector<CheckpointEntry> entries;
};

inline std::string checkpoint_header() {
  std::string bytes(kCheckpointMagic);
  append_number(bytes, kCheckpointVersion);
  append_number(bytes, ~kCheckpointVersion);
  return bytes;
}

/// The index and what follows, up to the checksum, of a file that has `offset` bytes so far.
inline std::string checkpoint_index(const CheckpointIndex& index, std::uint64_t offset) {
  std::string bytes;
  const auto append_text = [&bytes](const std::string& text) {
    append_number(bytes, static_cast<std::uint32_t>(text.size()));
    bytes += text;
  };
  append_number(bytes, static_cast<std::uint64_t>(index.step));
  append_number(bytes, static_cast<std::uint32_t>(index.entries.size()));
  for (const CheckpointEntry& entry : index.entries) {
    append_text(entry.name);
    append_text(entry.kind);
    append_text(entry.layout);
    append_number(bytes, entry.size);
  }
  append_number(bytes, offset);
  bytes += kCheckpointEnd;
  return bytes;
}

/// Reads an index bit by bit; throws where it ends too early.
class IndexReader {
 public:
  explicit IndexReader(std::string_view bytes) : rest_(bytes) {}

  template <class Unsigned>
  Unsigned number() {
    return number_at<Unsigned>(take(sizeof(Unsigned)).data());
  }
  std::string text() { return std::string(take(number<std::uint32_t>())); }
  bool is_at_end() const noexcept { return rest_.empty(); }

 private:
  std::string_view take(std::size_t size) {
    if (size > rest_.size()) throw DamagedCheckpoint("its index ends too early");
    const std::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }

  std::string_view rest_;
};

/// `entries_end` is where the index begins. \throws DamagedCheckpoint
inline CheckpointIndex parse_index(std::string_view bytes, std::uint64_t entries_end) {
  IndexReader reader(bytes);
  CheckpointIndex index{static_cast<std::int64_t>(reader.number<std::uint64_t>()), {}};
  const auto count = reader.number<std::uint32_t>();
  std::uint64_t offset = kCheckpointHeaderBytes;
  std::set<std::string> names;
  for (std::uint32_t i = 0; i < count; ++i) {
    CheckpointEntry entry{reader.text(), reader.text(), reader.text(), offset,
                          reader.number<std::uint64_t>()};
    if (!names.insert(entry.name).second) {
      throw DamagedCheckpoint("it has \"" + entry.name + "\" twice");
    }
    if (entry.size > entries_end - offset) {
      throw DamagedCheckpoint("\"" + entry.name + "\" reaches beyond the entries' end");
    }
    offset += entry.size;
    index.entries.push_back(std::move(entry));
  }
  if (!reader.is_at_end() || offset != entries_end) {
    throw DamagedCheckpoint("its index does not cover the file");
  }
  return index;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
