#pragma once

#include <mezzo/base/version.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

// Reads the uncompressed zip archives that torch.save writes. Every offset and size is checked
// against the size of the archive, and nothing is copied or decompressed, so that a small file
// cannot allocate much memory. libtorch's reader decompresses some entries at open.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// \throws c10::Error with `message` unless `condition`
template <class... Message>
void check_format(bool condition, const Message&... message) {
  if (condition) return;
  TORCH_CHECK(false, "invalid torch.save format: ", message...,
              "; load an earlier checkpoint, or save it again");
}

/// Returns the little-endian integer of `size` bytes at `offset`.
/// \throws c10::Error if out of bounds
inline std::uint64_t read_little_endian(std::string_view bytes, std::uint64_t offset,
                                        std::size_t size) {
  check_format(offset <= bytes.size() && size <= bytes.size() - offset, "it is truncated");
  std::uint64_t number = 0;
  for (std::size_t i = size; i > 0; --i) {
    number = number << 8 | static_cast<unsigned char>(bytes[offset + i - 1]);
  }
  return number;
}

/// The entries of a zip archive by name, without their common top-level directory.
class ZipDirectory {
 public:
  /// Reads the central directory of `zip`, which ends with a comment of `comment_size` bytes.
  /// \throws c10::Error for a malformed archive
  ZipDirectory(std::string_view zip, std::size_t comment_size) : zip_(zip) {
    constexpr std::size_t kEnd = 22, kLocator = 20;
    check_format(zip.size() >= comment_size + kEnd, "it is truncated");
    const std::size_t end = zip.size() - comment_size - kEnd;
    check_format(read_little_endian(zip, end, 4) == 0x06054b50 &&
                     read_little_endian(zip, end + 20, 2) == comment_size,
                 "it lacks the end-of-central-directory record");
    std::uint64_t size = read_little_endian(zip, end + 12, 4),
                  offset = read_little_endian(zip, end + 16, 4);
    if (end >= kLocator && read_little_endian(zip, end - kLocator, 4) == 0x07064b50) {
      const std::uint64_t zip64_end = read_little_endian(zip, end - kLocator + 8, 8);
      check_format(read_little_endian(zip, zip64_end, 4) == 0x06064b50,
                   "its zip64 end record is corrupt");
      size = read_little_endian(zip, zip64_end + 40, 8),
      offset = read_little_endian(zip, zip64_end + 48, 8);
    }
    check_format(offset <= end && size <= end - offset, "its central directory is truncated");
    for (std::string_view rest = zip.substr(offset, size); !rest.empty();) read_entry(rest);
  }

  bool has(const std::string& name) const { return entries_.find(name) != entries_.end(); }

  /// Returns the bytes of an entry.
  /// \throws c10::Error if it does not exist, is compressed or is truncated
  std::string_view at(const std::string& name) const {
    const auto found = entries_.find(name);
    check_format(found != entries_.end(), "it lacks the entry \"", name, "\"");
    const Entry& entry = found->second;
    TORCH_CHECK(!entry.is_compressed, name, " is compressed; save it again");
    check_format(read_little_endian(zip_, entry.offset, 4) == 0x04034b50, "the header of ", name,
                 " is corrupt");
    const std::uint64_t begin = entry.offset + 30 + read_little_endian(zip_, entry.offset + 26, 2) +
                                read_little_endian(zip_, entry.offset + 28, 2);
    check_format(begin <= zip_.size() && entry.size <= zip_.size() - begin, name, " is truncated");
    return zip_.substr(begin, entry.size);
  }

 private:
  struct Entry {
    std::uint64_t offset, size;
    bool is_compressed;
  };

  /// Reads one entry of the central directory and removes it from `rest`.
  void read_entry(std::string_view& rest) {
    constexpr std::size_t kHeader = 46;
    constexpr std::uint64_t kZip64 = 0xFFFFFFFF;  // the value is in the zip64 extra field
    check_format(read_little_endian(rest, 0, 4) == 0x02014b50, "its central directory is corrupt");
    const std::uint64_t name_size = read_little_endian(rest, 28, 2),
                        extra_size = read_little_endian(rest, 30, 2);
    const std::uint64_t total_size =
        kHeader + name_size + extra_size + read_little_endian(rest, 32, 2);
    check_format(total_size <= rest.size(), "its central directory is truncated");
    Entry entry{read_little_endian(rest, 42, 4), read_little_endian(rest, 24, 4),
                read_little_endian(rest, 10, 2) != 0};
    std::uint64_t compressed_size = read_little_endian(rest, 20, 4);
    for (std::string_view extra = rest.substr(kHeader + name_size, extra_size);
         extra.size() >= 4;) {
      const std::uint64_t size = read_little_endian(extra, 2, 2);
      std::uint64_t at = 4;
      for (std::uint64_t* const field : {&entry.size, &compressed_size, &entry.offset}) {
        if (read_little_endian(extra, 0, 2) != 1 || *field != kZip64) continue;
        *field = read_little_endian(extra, at, 8), at += 8;
      }
      extra.remove_prefix(std::min<std::uint64_t>(extra.size(), 4 + size));
    }
    entry.is_compressed = entry.is_compressed || compressed_size != entry.size;
    const std::string_view name = rest.substr(kHeader, name_size);
    const std::size_t directory = name.find('/');  // npos + 1 is 0
    const bool is_new = entries_.emplace(name.substr(directory + 1), entry).second;
    check_format(is_new, "it has two entries named ", name);
    rest.remove_prefix(total_size);
  }

  std::string_view zip_;
  std::map<std::string, Entry> entries_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
