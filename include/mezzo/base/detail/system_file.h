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

// Files as the system has them: on Linux, macOS and Windows. What fails, says why in errno.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline std::string reason(int error) { return std::generic_category().message(error); }

/// What a file is opened for. read: without waiting for whoever writes to a pipe. create: a file
/// that is not there yet. lock: to read and write, created if it is not there.
enum class FileUse { read, write, create, lock };

/// Owns a file descriptor, and closes it in the destructor. A program that is started has it not.
class OpenFile {
 public:
  OpenFile() = default;
  OpenFile(const std::filesystem::path& path, FileUse use) : descriptor_(opened(path, use)) {}
  OpenFile(OpenFile&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  OpenFile& operator=(OpenFile&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  ~OpenFile() { (void)close(); }

  bool is_open() const noexcept { return descriptor_ >= 0; }
  int descriptor() const noexcept { return descriptor_; }

  /// \returns how many bytes were written, or read from `offset` on; -1 for an error
  std::ptrdiff_t write(const void* from, std::size_t count) const noexcept;
  std::ptrdiff_t read(void* to, std::size_t count, std::uint64_t offset) const noexcept;
  /// Brings the file to the disk. \returns 0 or the system's error
  int flush() const noexcept;
  /// \returns 0 or the system's error; the file is closed in any case
  int close() noexcept;
  /// Locks the file, for as long as this process or a child that it forked has it open.
  /// \returns 0, EWOULDBLOCK if somebody else has the lock, or another error of the system
  int lock() const noexcept;
  /// Locks the file for this process, whose forked children do not have the lock. Closing another
  /// descriptor of the file ends it. \returns as lock()
  int lock_for_process() const noexcept;
  /// Returns the process that has the lock of lock_for_process(); 0 if it is this one, none, or not
  /// known.
  std::int64_t process_with_lock() const noexcept;
  /// Whether the file has this path.
  bool is_at(const std::filesystem::path& path) const noexcept;

 private:
  static int opened(const std::filesystem::path& path, FileUse use) noexcept;

  int descriptor_ = -1;
};

#if defined(_WIN32)

inline int OpenFile::opened(const std::filesystem::path& path, FileUse use) noexcept {
  const int flags = use == FileUse::read     ? _O_RDONLY
                    : use == FileUse::write  ? _O_RDWR
                    : use == FileUse::create ? _O_WRONLY | _O_CREAT | _O_EXCL
                                             : _O_RDWR | _O_CREAT;
  return _wopen(path.c_str(), flags | _O_BINARY | _O_NOINHERIT, _S_IREAD | _S_IWRITE);
}
inline int OpenFile::close() noexcept {
  return !is_open() || _close(std::exchange(descriptor_, -1)) == 0 ? 0 : errno;
}
inline std::ptrdiff_t OpenFile::write(const void* from, std::size_t count) const noexcept {
  return _write(descriptor_, from, static_cast<unsigned>(count < (1U << 30) ? count : 1U << 30));
}
inline std::ptrdiff_t OpenFile::read(void* to, std::size_t count,
                                     std::uint64_t offset) const noexcept {
  if (_lseeki64(descriptor_, static_cast<std::int64_t>(offset), SEEK_SET) < 0) return -1;
  return _read(descriptor_, to, static_cast<unsigned>(count < (1U << 30) ? count : 1U << 30));
}
inline int OpenFile::flush() const noexcept { return _commit(descriptor_) == 0 ? 0 : errno; }
inline int OpenFile::lock() const noexcept {
  OVERLAPPED behind{};  // the bytes themselves stay readable
  behind.OffsetHigh = 1U << 30;
  const auto file = reinterpret_cast<HANDLE>(_get_osfhandle(descriptor_));
  if (LockFileEx(file, LOCKFILE_EXCLUSIVE_LOCK | LOCKFILE_FAIL_IMMEDIATELY, 0, 1, 0, &behind)) {
    return 0;
  }
  return GetLastError() == ERROR_LOCK_VIOLATION ? EWOULDBLOCK : EIO;
}
inline int OpenFile::lock_for_process() const noexcept { return lock(); }
inline std::int64_t OpenFile::process_with_lock() const noexcept { return 0; }
/// No file is removed or renamed there while it is open.
inline bool OpenFile::is_at(const std::filesystem::path&) const noexcept { return is_open(); }

/// The names in a folder are in the file system's journal.
inline int flush_folder(const std::filesystem::path&) noexcept { return 0; }
/// \returns 0 or the system's error
inline int remove_file(const std::filesystem::path& path) noexcept {
  return _wunlink(path.c_str()) == 0 ? 0 : errno;
}
/// Puts `from` in the place of `to`; an open file is closed for it. \returns 0 or the system's
/// error
inline int replace_file(const std::filesystem::path& from, const std::filesystem::path& to,
                        OpenFile& open) noexcept {
  open = OpenFile();
  if (MoveFileExW(from.c_str(), to.c_str(), MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH)) {
    return 0;
  }
  return GetLastError() == ERROR_ACCESS_DENIED ? EACCES : EIO;
}

/// Returns a copy of the file's bytes whose pages are read when they are needed; null for an error.
inline char* map_privately(const OpenFile& file, std::size_t /*size*/) noexcept {
  const auto handle = reinterpret_cast<HANDLE>(_get_osfhandle(file.descriptor()));
  const HANDLE mapping = CreateFileMappingW(handle, nullptr, PAGE_WRITECOPY, 0, 0, nullptr);
  if (mapping == nullptr) return nullptr;
  void* const memory = MapViewOfFile(mapping, FILE_MAP_COPY, 0, 0, 0);
  CloseHandle(mapping);
  return static_cast<char*>(memory);
}
inline void unmap(char* memory, std::size_t /*size*/) noexcept { UnmapViewOfFile(memory); }

#else

inline int OpenFile::opened(const std::filesystem::path& path, FileUse use) noexcept {
  const int flags = use == FileUse::read     ? O_RDONLY | O_NONBLOCK
                    : use == FileUse::write  ? O_RDWR
                    : use == FileUse::create ? O_WRONLY | O_CREAT | O_EXCL
                                             : O_RDWR | O_CREAT;
  return ::open(path.c_str(), flags | O_CLOEXEC, 0666);
}
inline int OpenFile::close() noexcept {
  return !is_open() || ::close(std::exchange(descriptor_, -1)) == 0 ? 0 : errno;
}
inline std::ptrdiff_t OpenFile::write(const void* from, std::size_t count) const noexcept {
  return ::write(descriptor_, from, count);
}
inline std::ptrdiff_t OpenFile::read(void* to, std::size_t count,
                                     std::uint64_t offset) const noexcept {
  return ::pread(descriptor_, to, count, static_cast<off_t>(offset));
}
inline int OpenFile::flush() const noexcept {
  while (::fsync(descriptor_) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}
inline int OpenFile::lock() const noexcept {
  return ::flock(descriptor_, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
}

inline struct flock lock_of_whole_file() noexcept {
  struct flock record {};
  record.l_type = F_WRLCK;
  record.l_whence = SEEK_SET;
  return record;
}
inline int OpenFile::lock_for_process() const noexcept {
  struct flock record = lock_of_whole_file();
  if (::fcntl(descriptor_, F_SETLK, &record) == 0) return 0;
  return errno == EACCES || errno == EAGAIN ? EWOULDBLOCK : errno;
}
inline std::int64_t OpenFile::process_with_lock() const noexcept {
  struct flock record = lock_of_whole_file();
  if (!is_open() || ::fcntl(descriptor_, F_GETLK, &record) != 0) return 0;
  return record.l_type == F_UNLCK ? 0 : record.l_pid;
}

inline bool OpenFile::is_at(const std::filesystem::path& path) const noexcept {
  struct stat own {
  }, there{};
  return ::fstat(descriptor_, &own) == 0 && ::stat(path.c_str(), &there) == 0 &&
         own.st_dev == there.st_dev && own.st_ino == there.st_ino;
}

/// Brings the names in a folder to the disk. \returns 0 or the system's error
inline int flush_folder(const std::filesystem::path& folder) noexcept {
  const OpenFile file(folder, FileUse::read);
  return file.is_open() ? file.flush() : errno;
}
/// \returns 0 or the system's error
inline int remove_file(const std::filesystem::path& path) noexcept {
  return ::unlink(path.c_str()) == 0 ? 0 : errno;
}
/// Puts `from` in the place of `to`. \returns 0 or the system's error
inline int replace_file(const std::filesystem::path& from, const std::filesystem::path& to,
                        OpenFile& /*open*/) noexcept {
  return ::rename(from.c_str(), to.c_str()) == 0 ? 0 : errno;
}

/// Returns a copy of the file's bytes whose pages are read when they are needed; null for an error.
inline char* map_privately(const OpenFile& file, std::size_t size) noexcept {
  void* const memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                              file.descriptor(), 0);
  return memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
}
inline void unmap(char* memory, std::size_t size) noexcept { ::munmap(memory, size); }

#endif

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
