#pragma once

#include <mezzo/base/version.h>

#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <string>
#include <system_error>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The calls that decide whether a checkpoint is whole, with their POSIX meaning. Tests give
/// others, which fail.
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

/// A descriptor that is closed at the end.
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
  /// For who wants to know whether closing went well.
  int release() noexcept { return std::exchange(descriptor_, -1); }

 private:
  int descriptor_ = -1;
};

/// Brings the names in a folder to the disk. \returns 0 or the system's error
inline int flush_folder(const FileCalls& calls, const std::filesystem::path& folder) {
  const OpenFile file(calls, folder, O_RDONLY | O_DIRECTORY);
  if (!file.is_open()) return errno;
  return calls.fsync(file.descriptor()) == 0 ? 0 : errno;
}

/// Whether `error`, of flushing a folder, says that it will be the same the next time: the file
/// system does not do that at all, or not for this user.
inline bool is_never_flushed(int error) {
  for (const int hopeless : {EINVAL, ENOTSUP, ENOSYS, EBADF, EACCES, EPERM}) {
    if (error == hopeless) return true;
  }
  return false;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
