#pragma once

#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/file_calls.h>
#include <mezzo/checkpoint/detail/file_format.h>
#include <mezzo/checkpoint/detail/sha256.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A file that appears at its place whole or not at all: a temporary beside it, which is flushed to
/// the disk and then renamed. Whatever fails before throws, and leaves what was there.
class CheckpointWriter {
 public:
  /// The temporary is a name of `target`'s folder that nobody else writes to.
  CheckpointWriter(const FileCalls& calls, std::filesystem::path temporary,
                   std::filesystem::path target)
      : calls_(calls),
        temporary_(std::move(temporary)),
        target_(std::move(target)),
        file_(calls, temporary_, kNewFile) {
    if (!file_.is_open() && errno == EEXIST) {  // of a killed process that had this one's number
      calls_.unlink(temporary_.c_str());
      file_ = OpenFile(calls, temporary_, kNewFile);
    }
    if (!file_.is_open()) fail("cannot be created", errno);
    buffer_.reserve(kBlockBytes);
  }
  ~CheckpointWriter() {
    if (!is_committed_) calls_.unlink(temporary_.c_str());
  }
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  void write(const void* data, std::size_t size) {
    const auto* bytes = static_cast<const char*>(data);
    total_ += size;
    while (size > 0) {
      const std::size_t taken = std::min(size, kBlockBytes - buffer_.size());
      buffer_.append(bytes, taken);
      bytes += taken, size -= taken;
      if (buffer_.size() == kBlockBytes) flush();
    }
  }

  /// How much was written.
  std::uint64_t total() const noexcept { return total_; }

  /// Ends the file with the checksum and puts it in its place. \returns 0, or the system's error
  /// where only the last flush, of the folder, failed: it is in place, but may not survive a crash
  [[nodiscard]] int commit() {
    flush();
    const Sha256Digest digest = sum_.finish();
    put(reinterpret_cast<const char*>(digest.data()), digest.size());
    total_ += digest.size();
    while (calls_.fsync(file_.descriptor()) != 0) {
      if (errno != EINTR) fail("cannot be brought to the disk", errno);
    }
    if (calls_.close(file_.release()) != 0) fail("cannot be closed", errno);
    if (calls_.rename(temporary_.c_str(), target_.c_str()) != 0) {
      fail("cannot be put in its place", errno);
    }
    is_committed_ = true;
    return flush_folder(calls_, target_.parent_path());
  }

 private:
  static constexpr int kNewFile = O_WRONLY | O_CREAT | O_EXCL;
  static constexpr std::size_t kBlockBytes = std::size_t{1} << 20;

  void flush() {
    sum_.add(buffer_.data(), buffer_.size());
    put(buffer_.data(), buffer_.size());
    buffer_.clear();
  }

  void put(const char* bytes, std::size_t size) {
    while (size > 0) {
      const ssize_t written = calls_.write(file_.descriptor(), bytes, size);
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) fail("cannot be written", written < 0 ? errno : EIO);
      bytes += written, size -= static_cast<std::size_t>(written);
    }
  }

  [[noreturn]] void fail(const char* what, int error) const {
    const bool is_full = error == ENOSPC || error == EDQUOT || error == EFBIG;
    TORCH_CHECK(false, target_.string(), " ", what, ": ", reason(error), "; ",
                is_full ? "make room" : "see to the disk and the folder's permissions",
                ". The checkpoints that were there before are untouched");
  }

  const FileCalls& calls_;
  std::filesystem::path temporary_, target_;
  OpenFile file_;
  std::string buffer_;
  Sha256 sum_;
  std::uint64_t total_ = 0;
  bool is_committed_ = false;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
