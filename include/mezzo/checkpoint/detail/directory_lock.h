#pragma once

#include <mezzo/base/detail/platform.h>
#include <mezzo/base/detail/platform_file.h>
#include <mezzo/base/version.h>

#include <c10/macros/Export.h>
#include <c10/util/Exception.h>

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <system_error>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The directories that this process has locked. POSIX record locks belong to the process: they do
/// not exclude another owner in the same process, and closing any descriptor of the lock file
/// releases them. Exported, so that shared libraries use one instance.
struct LockedDirectories {
  struct Owner {
    int pid = 0;
    std::weak_ptr<const FileDescriptor> file{};
  };
  std::mutex mutex{};
  std::map<std::filesystem::path, Owner> owners{};  // a forked child inherits its parent's entries

  /// Returns the lock file if this process holds the lock and the file still exists, or null.
  std::shared_ptr<const FileDescriptor> find_lock(const std::filesystem::path& directory) {
    const Owner& owner = owners[directory];
    const auto file = owner.pid == process_id() ? owner.file.lock() : nullptr;
    return file != nullptr && file->refers_to(directory / ".lock") ? file : nullptr;
  }
};
C10_EXPORT inline LockedDirectories& locked_directories() {
  static LockedDirectories& directories = *new LockedDirectories;
  return directories;
}

/// Lock of a checkpoint directory: a record lock on its file ".lock". Released by the destructor or
/// at the end of the process. Forked children do not inherit it.
class DirectoryLock {
 public:
  DirectoryLock() = default;
  DirectoryLock(DirectoryLock&&) noexcept = default;
  DirectoryLock& operator=(DirectoryLock&&) = delete;
  ~DirectoryLock() {
    const std::lock_guard guard(locked_directories().mutex);
    file_ = nullptr;
  }

  /// Acquires the lock unless this object holds it. Call it before each save, because the directory
  /// or the lock file may have been removed, and the process may be a forked child.
  /// \returns as FileDescriptor::lock
  int acquire(const std::filesystem::path& existing_directory) {
    const auto directory = std::filesystem::canonical(existing_directory);
    LockedDirectories& locked = locked_directories();
    const std::lock_guard guard(locked.mutex);
    if (const auto held = locked.find_lock(directory)) return held == file_ ? 0 : EWOULDBLOCK;
    file_ = nullptr;
    do {  // until the locked file is the one at the path: other processes may remove it
      FileDescriptor file(directory / ".lock", OpenMode::lock);
      TORCH_CHECK(file.is_open(), (directory / ".lock").string(),
                  " cannot be opened: ", errno_message(errno));
      if (const int error = file.lock_for_process()) return error;
      file_ = std::make_shared<FileDescriptor>(std::move(file));
    } while (!file_->refers_to(directory / ".lock"));
    locked.owners[directory] = {process_id(), file_};
    return 0;
  }

  /// Returns the process that holds the lock; 0 if it is this one, none or unknown.
  static std::int64_t owner_pid(const std::filesystem::path& directory) {
    std::error_code error;
    const auto canonical = std::filesystem::canonical(directory, error);
    const std::lock_guard guard(locked_directories().mutex);
    if (error || locked_directories().find_lock(canonical) != nullptr) return 0;
    return FileDescriptor(canonical / ".lock", OpenMode::read).lock_owner_pid();
  }

 private:
  std::shared_ptr<const FileDescriptor> file_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
