#pragma once

#include <mezzo/base/detail/crc32c.h>
#include <mezzo/base/version.h>

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <string>
#include <system_error>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The system calls that write a checkpoint, with their POSIX meaning. Tests replace them with
/// calls that fail.
struct FileCalls {
  std::function<int(const char* path, int flags)> open = [](const char* path, int flags) {
    return ::open(path, flags | O_CLOEXEC, 0666);
  };
  std::function<ssize_t(int file, const void* from, size_t count)> write = ::write;
  std::function<ssize_t(int file, void* to, size_t count, off_t offset)> pread = ::pread;
  std::function<int(int file)> fsync = ::fsync;
  std::function<int(int file)> close = ::close;
  std::function<int(const char* from, const char* to)> rename = ::rename;
  std::function<int(const char* path)> unlink = ::unlink;
};

inline std::string reason(int error) { return std::generic_category().message(error); }

/// Owns a file descriptor, and closes it in the destructor.
class OpenFile {
 public:
  OpenFile() = default;
  OpenFile(const FileCalls& calls, const std::filesystem::path& path, int flags)
      : descriptor_(calls.open(path.c_str(), flags)) {}
  OpenFile(OpenFile&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  OpenFile& operator=(OpenFile&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  ~OpenFile() {
    if (is_open()) ::close(descriptor_);
  }

  bool is_open() const noexcept { return descriptor_ >= 0; }
  int descriptor() const noexcept { return descriptor_; }
  /// Gives up ownership, for a caller that checks the result of closing.
  int release() noexcept { return std::exchange(descriptor_, -1); }

 private:
  int descriptor_ = -1;
};

/// Flushes the names in a folder to the disk. \returns 0 or the system's error
inline int flush_folder(const FileCalls& calls, const std::filesystem::path& folder) {
  const OpenFile file(calls, folder, O_RDONLY | O_DIRECTORY);
  if (!file.is_open()) return errno;
  return calls.fsync(file.descriptor()) == 0 ? 0 : errno;
}

/// Whether `error`, from flushing a folder, is permanent: the file system does not support it, or
/// does not allow it to this user.
inline bool is_never_flushed(int error) {
  for (const int hopeless : {EINVAL, ENOTSUP, ENOSYS, EBADF, EACCES, EPERM}) {
    if (error == hopeless) return true;
  }
  return false;
}

/// Writes a file atomically: to a temporary beside the target, which is flushed to the disk and
/// then renamed. A failure before the rename throws and leaves the target unchanged.
class AtomicFile {
 public:
  /// `temporary` is a name in the folder of `target` that nobody else writes to.
  AtomicFile(const FileCalls& calls, std::filesystem::path temporary, std::filesystem::path target)
      : calls_(calls),
        temporary_(std::move(temporary)),
        target_(std::move(target)),
        file_(calls, temporary_, kNewFile) {
    if (!file_.is_open() && errno == EEXIST) {  // of a killed process that had this one's number
      calls_.unlink(temporary_.c_str());
      file_ = OpenFile(calls, temporary_, kNewFile);
    }
    if (!file_.is_open()) fail("cannot be created", errno);
    struct stat replaced {};
    if (::stat(target_.c_str(), &replaced) == 0) {
      (void)::fchmod(file_.descriptor(), replaced.st_mode & 07777);  // 0600 stays 0600
    }
    buffer_.reserve(kBlockBytes);
  }
  ~AtomicFile() {
    if (!is_committed_) calls_.unlink(temporary_.c_str());
  }
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, std::size_t size) {
    const auto* bytes = static_cast<const char*>(data);
    total_ += size;
    crc_ = crc32c(data, size, crc_);
    while (size > 0) {
      const std::size_t taken = std::min(size, kBlockBytes - buffer_.size());
      buffer_.append(bytes, taken);
      bytes += taken, size -= taken;
      if (buffer_.size() == kBlockBytes) flush();
    }
  }

  /// Returns the number of bytes written.
  std::uint64_t total() const noexcept { return total_; }

  /// Returns the CRC-32C of all bytes written.
  std::uint32_t crc() const noexcept { return crc_; }

  /// Renames the temporary to the target. \returns 0, or the system's error if only the last step,
  /// flushing the folder, failed: the file is then in place, but may not survive a crash
  [[nodiscard]] int commit() {
    flush();
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
  std::uint64_t total_ = 0;
  std::uint32_t crc_ = 0;
  bool is_committed_ = false;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
