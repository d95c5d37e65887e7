#pragma once

#include <mezzo/base/version.h>

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>

#if defined(_WIN32)
#include <c10/util/win32-headers.h>

#include <io.h>
#else
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

// File system calls on Linux, macOS and Windows. Failures set errno.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline std::string errno_message(int error) { return std::generic_category().message(error); }

/// read: does not block on a pipe without a writer. create: fails if the file exists. lock: opens
/// for reading and writing, and creates the file if it does not exist.
enum class OpenMode { read, write, create, lock };

/// An owning file descriptor, which child programs do not inherit.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  FileDescriptor(const std::filesystem::path& path, OpenMode mode)
      : descriptor_(open_descriptor(path, mode)) {}
  FileDescriptor(FileDescriptor&& other) noexcept
      : descriptor_(std::exchange(other.descriptor_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() { (void)close(); }

  bool is_open() const noexcept { return descriptor_ >= 0; }
  int descriptor() const noexcept { return descriptor_; }

  /// Writes up to `count` bytes. \returns the number written, or -1
  std::ptrdiff_t write(const void* from, std::size_t count) const noexcept;
  /// Reads up to `count` bytes from `offset`. \returns the number read, or -1
  std::ptrdiff_t read(void* to, std::size_t count, std::uint64_t offset) const noexcept;
  /// Flushes the file to the disk. \returns 0 or errno
  int fsync() const noexcept;
  /// Closes the file, also if it fails. \returns 0 or errno
  int close() noexcept;
  /// Locks the file until this process and its forked children have closed it.
  /// \returns 0, EWOULDBLOCK if the file is locked, or another errno
  int lock() const noexcept;
  /// Locks the file for this process without its forked children. Closing any descriptor of the
  /// file releases the lock. \returns as lock()
  int lock_for_process() const noexcept;
  /// Returns the id of the process with the lock of lock_for_process(); 0 if it is this process,
  /// none or unknown.
  std::int64_t lock_owner_pid() const noexcept;
  /// Returns whether the file still exists under `path`.
  bool refers_to(const std::filesystem::path& path) const noexcept;

 private:
  static int open_descriptor(const std::filesystem::path& path, OpenMode mode) noexcept;

  int descriptor_ = -1;
};

#if defined(_WIN32)

inline int FileDescriptor::open_descriptor(const std::filesystem::path& path,
                                           OpenMode mode) noexcept {
  const int flags = mode == OpenMode::read     ? _O_RDONLY
                    : mode == OpenMode::write  ? _O_RDWR
                    : mode == OpenMode::create ? _O_WRONLY | _O_CREAT | _O_EXCL
                                               : _O_RDWR | _O_CREAT;
  return _wopen(path.c_str(), flags | _O_BINARY | _O_NOINHERIT, _S_IREAD | _S_IWRITE);
}
inline int FileDescriptor::close() noexcept {
  return !is_open() || _close(std::exchange(descriptor_, -1)) == 0 ? 0 : errno;
}
inline std::ptrdiff_t FileDescriptor::write(const void* from, std::size_t count) const noexcept {
  return _write(descriptor_, from, static_cast<unsigned>(count < (1U << 30) ? count : 1U << 30));
}
inline std::ptrdiff_t FileDescriptor::read(void* to, std::size_t count,
                                           std::uint64_t offset) const noexcept {
  if (_lseeki64(descriptor_, static_cast<std::int64_t>(offset), SEEK_SET) < 0) return -1;
  return _read(descriptor_, to, static_cast<unsigned>(count < (1U << 30) ? count : 1U << 30));
}
inline int FileDescriptor::fsync() const noexcept { return _commit(descriptor_) == 0 ? 0 : errno; }
inline int FileDescriptor::lock() const noexcept {
  OVERLAPPED range{};  // beyond the data, which stays readable
  range.OffsetHigh = 1U << 30;
  const auto file = reinterpret_cast<HANDLE>(_get_osfhandle(descriptor_));
  if (LockFileEx(file, LOCKFILE_EXCLUSIVE_LOCK | LOCKFILE_FAIL_IMMEDIATELY, 0, 1, 0, &range)) {
    return 0;
  }
  return GetLastError() == ERROR_LOCK_VIOLATION ? EWOULDBLOCK : EIO;
}
inline int FileDescriptor::lock_for_process() const noexcept { return lock(); }
inline std::int64_t FileDescriptor::lock_owner_pid() const noexcept { return 0; }
/// Windows cannot remove or rename an open file.
inline bool FileDescriptor::refers_to(const std::filesystem::path&) const noexcept {
  return is_open();
}

/// No-op: NTFS journals directory entries.
inline int fsync_directory(const std::filesystem::path&) noexcept { return 0; }
/// \returns 0 or errno
inline int remove_file(const std::filesystem::path& path) noexcept {
  return _wunlink(path.c_str()) == 0 ? 0 : errno;
}
/// Renames `from` to `to`, replacing it, after closing `open`. \returns 0 or errno
inline int replace_file(const std::filesystem::path& from, const std::filesystem::path& to,
                        FileDescriptor& open) noexcept {
  open = FileDescriptor();
  if (MoveFileExW(from.c_str(), to.c_str(), MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH)) {
    return 0;
  }
  return GetLastError() == ERROR_ACCESS_DENIED ? EACCES : EIO;
}

/// Maps the file copy-on-write. \returns null on error
inline char* mmap_copy_on_write(const FileDescriptor& file, std::size_t /*size*/) noexcept {
  const auto handle = reinterpret_cast<HANDLE>(_get_osfhandle(file.descriptor()));
  const HANDLE mapping = CreateFileMappingW(handle, nullptr, PAGE_WRITECOPY, 0, 0, nullptr);
  if (mapping == nullptr) return nullptr;
  void* const memory = MapViewOfFile(mapping, FILE_MAP_COPY, 0, 0, 0);
  CloseHandle(mapping);
  return static_cast<char*>(memory);
}
inline void unmap(char* memory, std::size_t /*size*/) noexcept { UnmapViewOfFile(memory); }

#else

inline int FileDescriptor::open_descriptor(const std::filesystem::path& path,
                                           OpenMode mode) noexcept {
  const int flags = mode == OpenMode::read     ? O_RDONLY | O_NONBLOCK
                    : mode == OpenMode::write  ? O_RDWR
                    : mode == OpenMode::create ? O_WRONLY | O_CREAT | O_EXCL
                                               : O_RDWR | O_CREAT;
  return ::open(path.c_str(), flags | O_CLOEXEC, 0666);
}
inline int FileDescriptor::close() noexcept {
  return !is_open() || ::close(std::exchange(descriptor_, -1)) == 0 ? 0 : errno;
}
inline std::ptrdiff_t FileDescriptor::write(const void* from, std::size_t count) const noexcept {
  return ::write(descriptor_, from, count);
}
inline std::ptrdiff_t FileDescriptor::read(void* to, std::size_t count,
                                           std::uint64_t offset) const noexcept {
  return ::pread(descriptor_, to, count, static_cast<off_t>(offset));
}
inline int FileDescriptor::fsync() const noexcept {
  while (::fsync(descriptor_) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}
inline int FileDescriptor::lock() const noexcept {
  return ::flock(descriptor_, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
}

inline struct flock whole_file_lock() noexcept {
  struct flock record {};
  record.l_type = F_WRLCK;
  record.l_whence = SEEK_SET;
  return record;
}
inline int FileDescriptor::lock_for_process() const noexcept {
  struct flock record = whole_file_lock();
  if (::fcntl(descriptor_, F_SETLK, &record) == 0) return 0;
  return errno == EACCES || errno == EAGAIN ? EWOULDBLOCK : errno;
}
inline std::int64_t FileDescriptor::lock_owner_pid() const noexcept {
  struct flock record = whole_file_lock();
  if (!is_open() || ::fcntl(descriptor_, F_GETLK, &record) != 0) return 0;
  return record.l_type == F_UNLCK ? 0 : record.l_pid;
}

inline bool FileDescriptor::refers_to(const std::filesystem::path& path) const noexcept {
  struct stat open_stat {
  }, path_stat{};
  return ::fstat(descriptor_, &open_stat) == 0 && ::stat(path.c_str(), &path_stat) == 0 &&
         open_stat.st_dev == path_stat.st_dev && open_stat.st_ino == path_stat.st_ino;
}

/// Flushes the entries of a directory to the disk. \returns 0 or errno
inline int fsync_directory(const std::filesystem::path& directory) noexcept {
  const FileDescriptor file(directory, OpenMode::read);
  return file.is_open() ? file.fsync() : errno;
}
/// \returns 0 or errno
inline int remove_file(const std::filesystem::path& path) noexcept {
  return ::unlink(path.c_str()) == 0 ? 0 : errno;
}
/// Renames `from` to `to`, replacing it. \returns 0 or errno
inline int replace_file(const std::filesystem::path& from, const std::filesystem::path& to,
                        FileDescriptor& /*open*/) noexcept {
  return ::rename(from.c_str(), to.c_str()) == 0 ? 0 : errno;
}

/// Maps the file copy-on-write. \returns null on error
inline char* mmap_copy_on_write(const FileDescriptor& file, std::size_t size) noexcept {
  void* const memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                              file.descriptor(), 0);
  return memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
}
inline void unmap(char* memory, std::size_t size) noexcept { ::munmap(memory, size); }

#endif

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
