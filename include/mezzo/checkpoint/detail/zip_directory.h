#pragma once

#include <mezzo/base/version.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

// Reads the zips that torch.save writes, whose files are not compressed. Every offset and size is
// checked against the size of the zip, and nothing is copied or decompressed, so that a small zip
// cannot allocate much memory. libtorch's own reader decompresses some files when it opens a zip.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// \throws c10::Error with `words` unless `holds`
template <class... Words>
void check_format(bool holds, const Words&... words) {
  if (holds) return;
  TORCH_CHECK(false, "it is not as torch.save writes files: ", words...,
              "; load an earlier file, or save this one anew");
}

/// Returns the little-endian number of `size` bytes at `offset`.
/// \throws c10::Error unless all of it lies in `bytes`
inline std::uint64_t read_little_endian(std::string_view bytes, std::uint64_t offset,
                                        std::size_t size) {
  check_format(offset <= bytes.size() && size <= bytes.size() - offset, "it is cut off");
  std::uint64_t number = 0;
  for (std::size_t i = size; i > 0; --i) {
    number = number << 8 | static_cast<unsigned char>(bytes[offset + i - 1]);
  }
  return number;
}

/// The files in a zip by name, without the directory that holds all of them.
class ZipDirectory {
 public:
  /// Reads the central directory of `zip`, which ends with a comment of `comment` bytes.
  /// \throws c10::Error for bytes that are no such zip
  ZipDirectory(std::string_view zip, std::size_t comment) : zip_(zip) {
    constexpr std::size_t kEnd = 22, kLocator = 20;
    check_format(zip.size() >= comment + kEnd, "it is cut off");
    const std::size_t end = zip.size() - comment - kEnd;
    check_format(read_little_endian(zip, end, 4) == 0x06054b50 &&
                     read_little_endian(zip, end + 20, 2) == comment,
                 "it does not end as a zip file does");
    std::uint64_t size = read_little_endian(zip, end + 12, 4),
                  offset = read_little_endian(zip, end + 16, 4);
    if (end >= kLocator && read_little_endian(zip, end - kLocator, 4) == 0x07064b50) {
      const std::uint64_t wide = read_little_endian(zip, end - kLocator + 8, 8);
      check_format(read_little_endian(zip, wide, 4) == 0x06064b50, "its end is corrupt");
      size = read_little_endian(zip, wide + 40, 8), offset = read_little_endian(zip, wide + 48, 8);
    }
    check_format(offset <= end && size <= end - offset, "its directory is cut off");
    for (std::string_view rest = zip.substr(offset, size); !rest.empty();) read_entry(rest);
  }

  /// Returns whether there is a file of this name.
  bool has(const std::string& name) const { return entries_.find(name) != entries_.end(); }

  /// Returns the bytes of a file.
  /// \throws c10::Error if there is none, or it is compressed or cut off
  std::string_view at(const std::string& name) const {
    const auto found = entries_.find(name);
    check_format(found != entries_.end(), "it lacks the file \"", name, "\"");
    const Entry& entry = found->second;
    TORCH_CHECK(!entry.is_compressed, name, " is compressed; save it anew");
    check_format(read_little_endian(zip_, entry.offset, 4) == 0x04034b50, "the header of ", name,
                 " is corrupt");
    const std::uint64_t begin = entry.offset + 30 + read_little_endian(zip_, entry.offset + 26, 2) +
                                read_little_endian(zip_, entry.offset + 28, 2);
    check_format(begin <= zip_.size() && entry.size <= zip_.size() - begin, name, " is cut off");
    return zip_.substr(begin, entry.size);
  }

 private:
  struct Entry {
    std::uint64_t offset, size;
    bool is_compressed;
  };

  /// Reads one entry of the central directory, and removes it from `rest`.
  void read_entry(std::string_view& rest) {
    constexpr std::size_t kHeader = 46;
    constexpr std::uint64_t kWide = 0xFFFFFFFF;  // the number stands in the extra field
    check_format(read_little_endian(rest, 0, 4) == 0x02014b50, "its directory is corrupt");
    const std::uint64_t name_size = read_little_endian(rest, 28, 2),
                        extra_size = read_little_endian(rest, 30, 2);
    const std::uint64_t all = kHeader + name_size + extra_size + read_little_endian(rest, 32, 2);
    check_format(all <= rest.size(), "its directory is cut off");
    Entry entry{read_little_endian(rest, 42, 4), read_little_endian(rest, 24, 4),
                read_little_endian(rest, 10, 2) != 0};
    std::uint64_t stored = read_little_endian(rest, 20, 4);
    for (std::string_view extra = rest.substr(kHeader + name_size, extra_size);
         extra.size() >= 4;) {
      const std::uint64_t size = read_little_endian(extra, 2, 2);
      std::uint64_t at = 4;
      for (std::uint64_t* const number : {&entry.size, &stored, &entry.offset}) {
        if (read_little_endian(extra, 0, 2) != 1 || *number != kWide) continue;
        *number = read_little_endian(extra, at, 8), at += 8;
      }
      extra.remove_prefix(std::min<std::uint64_t>(extra.size(), 4 + size));
    }
    entry.is_compressed = entry.is_compressed || stored != entry.size;
    const std::string_view name = rest.substr(kHeader, name_size);
    const std::size_t directory = name.find('/');  // npos + 1 is 0
    const bool is_new = entries_.emplace(name.substr(directory + 1), entry).second;
    check_format(is_new, "it has two files of the name ", name);
    rest.remove_prefix(all);
  }

  std::string_view zip_;
  std::map<std::string, Entry> entries_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
