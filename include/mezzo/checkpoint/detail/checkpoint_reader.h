#pragma once

#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/file_calls.h>
#include <mezzo/checkpoint/detail/file_format.h>
#include <mezzo/checkpoint/detail/sha256.h>

#include <c10/util/Exception.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A checkpoint whose every byte has been read once and found to be what was written.
///
/// The descriptor stays open: what is read later is this file, whatever becomes of its name.
class CheckpointReader {
 public:
  /// \throws DamagedCheckpoint, or c10::Error where the file cannot be opened or is of a newer
  /// format
  CheckpointReader(const FileCalls& calls, std::filesystem::path path)
      : pread_(calls.pread), path_(std::move(path)), file_(calls, path_, O_RDONLY) {
    TORCH_CHECK(file_.is_open(), path_.string(), " cannot be opened: ", reason(errno));
    struct stat status {};
    TORCH_CHECK(::fstat(file_.descriptor(), &status) == 0, path_.string(),
                " cannot be looked at: ", reason(errno));
    TORCH_CHECK(S_ISREG(status.st_mode), path_.string(), " is not a file");
    size_ = static_cast<std::uint64_t>(status.st_size);
    check_header();
    check_digest();
    read_index();
  }

  const std::filesystem::path& path() const noexcept { return path_; }
  const CheckpointIndex& index() const noexcept { return index_; }

  /// Of an entry of `index`; this must outlive it.
  ByteSource source(const CheckpointEntry& entry) const {
    return {entry.size,
            [this, begin = entry.offset](std::uint64_t offset, void* to, std::size_t count) {
              read(begin + offset, to, count);
            }};
  }

 private:
  void read(std::uint64_t offset, void* to, std::size_t count) const {
    auto* bytes = static_cast<char*>(to);
    while (count > 0) {
      const ssize_t got = pread_(file_.descriptor(), bytes, count, static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) throw DamagedCheckpoint("it cannot be read: " + reason(errno));
      if (got == 0) throw DamagedCheckpoint("it became shorter while it was read");
      bytes += got, offset += static_cast<std::uint64_t>(got);
      count -= static_cast<std::size_t>(got);
    }
  }

  void check_header() const {
    if (size_ < kCheckpointHeaderBytes + kCheckpointTrailerBytes) {
      throw DamagedCheckpoint("it has " + std::to_string(size_) + " bytes, and is cut off");
    }
    std::string header(kCheckpointHeaderBytes, '\0');
    read(0, header.data(), header.size());
    const auto version = number_at<std::uint32_t>(header.data() + kCheckpointMagic.size());
    const auto complement = number_at<std::uint32_t>(header.data() + kCheckpointMagic.size() + 4);
    if (!header.starts_with(kCheckpointMagic) || version != ~complement || version == 0) {
      throw DamagedCheckpoint("it does not begin as a checkpoint does");
    }
    TORCH_CHECK(version == kCheckpointVersion, path_.string(), " is a checkpoint of format ",
                version, ", and this version of mezzo reads format ", kCheckpointVersion,
                ": update mezzo, or move the file elsewhere");
  }

  void check_digest() const {
    Sha256 sum;
    std::vector<char> block(std::min<std::uint64_t>(size_, std::uint64_t{1} << 18));
    const std::uint64_t end = size_ - kDigestBytes;
    for (std::uint64_t offset = 0; offset < end;) {
      const auto count =
          static_cast<std::size_t>(std::min<std::uint64_t>(block.size(), end - offset));
      read(offset, block.data(), count);
      sum.add(block.data(), count);
      offset += count;
    }
    Sha256Digest expected;
    read(end, expected.data(), expected.size());
    if (sum.finish() != expected) {
      throw DamagedCheckpoint(
          "its checksum does not fit its bytes, some of which are others than "
          "were written, or missing");
    }
  }

  void read_index() {
    const std::uint64_t end = size_ - kCheckpointTrailerBytes;
    std::string trailer(kCheckpointTrailerBytes - kDigestBytes, '\0');
    read(end, trailer.data(), trailer.size());
    const auto begin = number_at<std::uint64_t>(trailer.data());
    if (!trailer.ends_with(kCheckpointEnd) || begin < kCheckpointHeaderBytes || begin > end) {
      throw DamagedCheckpoint("it does not end as a checkpoint does");
    }
    std::string bytes(end - begin, '\0');
    read(begin, bytes.data(), bytes.size());
    index_ = parse_index(bytes, begin);
  }

  std::function<ssize_t(int, void*, size_t, off_t)> pread_;
  std::filesystem::path path_;
  OpenFile file_;
  std::uint64_t size_ = 0;
  CheckpointIndex index_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
