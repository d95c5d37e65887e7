#pragma once

#include <mezzo/base/detail/crc32c.h>
#include <mezzo/base/version.h>

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline std::string reason(int error) { return std::generic_category().message(error); }

/// Owns a file descriptor, and closes it in the destructor.
class OpenFile {
 public:
  OpenFile() = default;
  OpenFile(const std::filesystem::path& path, int flags)
      : descriptor_(::open(path.c_str(), flags | O_CLOEXEC, 0666)) {}
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
  /// Locks the file, for as long as this process or a child that it forked has it open.
  /// \returns 0, EWOULDBLOCK if somebody else has the lock, or another error of the system
  int lock() const noexcept { return ::flock(descriptor_, LOCK_EX | LOCK_NB) == 0 ? 0 : errno; }
  /// Whether the file has this path.
  bool is_at(const std::filesystem::path& path) const {
    struct stat own {
    }, there{};
    return ::fstat(descriptor_, &own) == 0 && ::stat(path.c_str(), &there) == 0 &&
           own.st_dev == there.st_dev && own.st_ino == there.st_ino;
  }

 private:
  int descriptor_ = -1;
};

/// Flushes a file or the names in a folder to the disk. \returns 0 or the system's error
inline int flush(const OpenFile& file) {
  while (::fsync(file.descriptor()) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}
inline int flush_folder(const std::filesystem::path& folder) {
  const OpenFile file(folder, O_RDONLY | O_DIRECTORY);
  return file.is_open() ? flush(file) : errno;
}

/// Returns all names in `folder`; none if it does not exist.
inline std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  std::filesystem::directory_iterator entry(folder, error);
  if (error == std::errc::no_such_file_or_directory) return names;
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  TORCH_CHECK(!error, folder.string(), " cannot be listed: ", error.message());
  return names;
}

/// Removes what killed writers left in `folder` of the files that `is_ours` picks by name: the
/// temporaries ".NAME.3.tmp" that nobody has locked.
template <class Pick>
void remove_stale_temporaries(const std::filesystem::path& folder, const Pick& is_ours) {
  for (const std::filesystem::path file : names_in(folder)) {
    const std::string name = file.stem().stem().string(), number = file.stem().extension().string();
    const bool is_temporary = file.extension() == ".tmp" && name.starts_with('.') &&
                              number.size() > 1 &&
                              number.find_first_not_of("0123456789", 1) == std::string::npos;
    if (!is_temporary || !is_ours(name.substr(1))) continue;
    const OpenFile left(folder / file, O_RDWR);
    if (left.is_open() && left.lock() == 0) ::unlink((folder / file).c_str());
  }
}

/// Writes a file atomically: to a temporary beside the target, which is flushed to the disk and
/// then renamed. A failure before the rename throws and leaves the target unchanged. Any number of
/// threads and processes may write the same target; the last to end wins.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path target) : target_(std::move(target)) {
    int number = 0;
    do {  // until the temporary is ours: others take names, and remove what nobody has locked
      temporary_ = target_.parent_path() /
                   ("." + target_.filename().string() + "." + std::to_string(number++) + ".tmp");
      file_ = OpenFile(temporary_, O_WRONLY | O_CREAT | O_EXCL);
      if (!file_.is_open() && errno != EEXIST) fail("cannot be created", errno);
    } while (!file_.is_open() || file_.lock() == EWOULDBLOCK || !file_.is_at(temporary_));
    struct stat replaced {};
    if (::stat(target_.c_str(), &replaced) == 0) {
      (void)::fchmod(file_.descriptor(), replaced.st_mode & 07777);  // 0600 stays 0600
    }
  }
  ~AtomicFile() {
    if (file_.is_open() && !is_committed_) ::unlink(temporary_.c_str());
  }
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, std::size_t size) {
    total_ += size;
    crc_ = crc32c(data, size, crc_);
    const auto* bytes = static_cast<const char*>(data);
    while (size > 0) {
      const ssize_t written = ::write(file_.descriptor(), bytes, size);
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) fail("cannot be written", written < 0 ? errno : EIO);
      bytes += written, size -= static_cast<std::size_t>(written);
    }
  }

  /// Returns the number of bytes written.
  std::uint64_t total() const noexcept { return total_; }

  /// Returns the CRC-32C of all bytes written.
  std::uint32_t crc() const noexcept { return crc_; }

  /// Renames the temporary to the target. \returns 0, or the system's error if only the last step,
  /// flushing the folder, failed: the file is then in place, but may not survive a crash
  [[nodiscard]] int commit() {
    if (const int error = flush(file_)) fail("cannot be brought to the disk", error);
    if (::rename(temporary_.c_str(), target_.c_str()) != 0) {
      fail("cannot be put in its place", errno);
    }
    is_committed_ = true;
    return flush_folder(target_.parent_path());
  }

 private:
  [[noreturn]] void fail(const char* what, int error) const {
    const bool is_full = error == ENOSPC || error == EDQUOT || error == EFBIG;
    TORCH_CHECK(false, target_.string(), " ", what, ": ", reason(error), "; ",
                is_full ? "make room" : "see to the disk and the folder's permissions",
                ". The checkpoints that were there before are untouched");
  }

  std::filesystem::path temporary_, target_;
  OpenFile file_;
  std::uint64_t total_ = 0;
  std::uint32_t crc_ = 0;
  bool is_committed_ = false;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
