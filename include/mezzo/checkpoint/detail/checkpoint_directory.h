#pragma once

#include <mezzo/base/detail/crc32c.h>
#include <mezzo/base/detail/platform.h>
#include <mezzo/base/detail/platform_file.h>
#include <mezzo/base/version.h>

#include <c10/macros/Export.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

// A directory of checkpoints. "checkpoint-000012-step-3400.pt" is the twelfth that was saved. The
// newest file is the one saved last, whatever its step: a run that went back to an older checkpoint
// saves lower steps.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns all names in `directory`; none if it does not exist.
inline std::vector<std::string> list_directory(const std::filesystem::path& directory) {
  std::vector<std::string> names;
  std::error_code error;
  std::filesystem::directory_iterator entry(directory, error);
  if (error == std::errc::no_such_file_or_directory) return names;
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  TORCH_CHECK(!error, directory.string(), " cannot be listed: ", error.message());
  return names;
}

/// Removes what killed writers left in `directory` of the files that `is_ours` picks by name: the
/// temporaries ".NAME.3.tmp" that nobody has locked.
template <class Pick>
void remove_stale_temporaries(const std::filesystem::path& directory, const Pick& is_ours) {
  for (const std::filesystem::path file : list_directory(directory)) {
    const std::string name = file.stem().stem().string(), number = file.stem().extension().string();
    const bool is_temporary = file.extension() == ".tmp" && name.starts_with('.') &&
                              number.size() > 1 &&
                              number.find_first_not_of("0123456789", 1) == std::string::npos;
    if (!is_temporary || !is_ours(name.substr(1))) continue;
    FileDescriptor left(directory / file, OpenMode::write);
    if (!left.is_open() || left.lock() != 0) continue;
    if (remove_file(directory / file) != 0) {  // where an open file cannot be removed
      left = FileDescriptor();
      (void)remove_file(directory / file);
    }
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
      file_ = FileDescriptor(temporary_, OpenMode::create);
      if (!file_.is_open() && errno != EEXIST) fail("cannot be created", errno);
    } while (!file_.is_open() || file_.lock() == EWOULDBLOCK || !file_.refers_to(temporary_));
    std::error_code none;
    const auto status = std::filesystem::status(target_, none);
    if (std::filesystem::exists(status)) {  // 0600 stays 0600
      std::filesystem::permissions(temporary_, status.permissions(), none);
    }
  }
  ~AtomicFile() {
    if (is_committed_) return;
    file_ = FileDescriptor();
    (void)remove_file(temporary_);
  }
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, std::size_t size) {
    total_ += size;
    crc_ = crc32c(data, size, crc_);
    const auto* bytes = static_cast<const char*>(data);
    while (size > 0) {
      const std::ptrdiff_t written = file_.write(bytes, size);
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) fail("cannot be written", written < 0 ? errno : EIO);
      bytes += written, size -= static_cast<std::size_t>(written);
    }
  }

  /// Returns the number of bytes written.
  std::uint64_t total() const noexcept { return total_; }

  /// Returns the CRC-32C of all bytes written.
  std::uint32_t crc() const noexcept { return crc_; }

  /// Renames the temporary to the target. \returns 0, or the system's error if only a last step
  /// failed, closing the file or flushing the directory: the file is then in place, but may not
  /// survive a crash
  [[nodiscard]] int commit() {
    if (const int error = file_.fsync()) fail("cannot be brought to the disk", error);
    if (const int error = replace_file(temporary_, target_, file_)) {
      fail("cannot be put in its place", error);
    }
    is_committed_ = true;
    const int of_file = file_.close(), of_folder = fsync_directory(target_.parent_path());
    return of_file != 0 ? of_file : of_folder;
  }

 private:
  [[noreturn]] void fail(const char* what, int error) const {
    TORCH_CHECK(
        false, target_.string(), " ", what, ": ", errno_message(error),
        "; see to the disk, to room on it and to the directory's permissions. The checkpoints "
        "that were there before are untouched");
  }

  std::filesystem::path temporary_, target_;
  FileDescriptor file_;
  std::uint64_t total_ = 0;
  std::uint32_t crc_ = 0;
  bool is_committed_ = false;
};

struct CheckpointName {
  std::uint64_t sequence = 0;
  std::int64_t step = 0;

  std::string filename() const {
    std::string number = std::to_string(sequence);
    number.insert(0, number.size() < 6 ? 6 - number.size() : 0, '0');
    return "checkpoint-" + number + "-step-" + std::to_string(step) + ".pt";
  }
  /// Returns the name of a checkpoint, and none for another file's.
  static std::optional<CheckpointName> parse(const std::string& file) {
    CheckpointName name;
    const int numbers = std::sscanf(file.c_str(), "checkpoint-%" SCNu64 "-step-%" SCNd64 ".pt",
                                    &name.sequence, &name.step);
    return numbers == 2 && name.filename() == file ? std::optional(name) : std::nullopt;
  }
};

/// Returns the file that `path` names, through links, which may dangle. \throws c10::Error if
/// something else than a regular file is there
inline std::filesystem::path resolve_replaceable_path(std::filesystem::path path) {
  std::error_code error;
  for (int links = 0; std::filesystem::is_symlink(path, error); ++links) {
    TORCH_CHECK(links < 40, path.string(), " is a link in a circle of links; remove it");
    path = path.parent_path() / std::filesystem::read_symlink(path);
  }
  const auto status = std::filesystem::status(path, error);
  TORCH_CHECK(!std::filesystem::exists(status) || std::filesystem::is_regular_file(status),
              path.string(),
              " is not a regular file, and a checkpoint would replace it; name another path");
  return path.has_parent_path() ? path : "." / path;
}

/// Returns the checkpoints in `directory`, the newest first.
inline std::vector<CheckpointName> list_checkpoints(const std::filesystem::path& directory) {
  std::vector<CheckpointName> found;
  for (const std::string& file : list_directory(directory)) {
    if (const auto name = CheckpointName::parse(file)) found.push_back(*name);
  }
  std::sort(found.begin(), found.end(), [](const CheckpointName& a, const CheckpointName& b) {
    return std::pair(a.sequence, a.step) > std::pair(b.sequence, b.step);
  });
  return found;
}

/// Creates a directory, and flushes the names of what it had to create to the disk. \returns 0, or
/// the system's error from flushing
inline int create_and_fsync_directories(const std::filesystem::path& directory) {
  std::error_code error;
  if (directory.empty() || std::filesystem::exists(directory, error)) return 0;
  const auto parent = directory.parent_path();
  const int of_parent = create_and_fsync_directories(parent);
  std::filesystem::create_directory(directory, error);
  TORCH_CHECK(!error, directory.string(), " cannot be made: ", error.message());
  const int own = fsync_directory(parent.empty() ? std::filesystem::path(".") : parent);
  return own != 0 ? own : of_parent;
}

/// The directories of checkpoints that this process has locked: its locks do not tell two owners in
/// one process apart, and opening and closing a lock's file would end the lock. Exported, so that
/// shared libraries agree on it.
struct LockedDirectories {
  struct Owner {
    int process = 0;
    std::weak_ptr<const FileDescriptor> file{};
  };
  std::mutex mutex{};
  std::map<std::filesystem::path, Owner> owners{};  // a forked child finds its parent's entries

  /// Returns the file of the lock that this process has; null if it has none, or it was removed.
  std::shared_ptr<const FileDescriptor> find_lock(const std::filesystem::path& directory) {
    const Owner& owner = owners[directory];
    const auto file = owner.process == process_id() ? owner.file.lock() : nullptr;
    return file != nullptr && file->refers_to(directory / ".lock") ? file : nullptr;
  }
};
C10_EXPORT inline LockedDirectories& locked_directories() {
  static LockedDirectories& directories = *new LockedDirectories;
  return directories;
}

/// The lock of a directory of checkpoints, its file ".lock". It ends with the object or its
/// process, whose forked children do not have it.
class DirectoryLock {
 public:
  DirectoryLock() = default;
  DirectoryLock(DirectoryLock&&) noexcept = default;
  DirectoryLock& operator=(DirectoryLock&&) = delete;
  ~DirectoryLock() {
    const std::lock_guard guard(locked_directories().mutex);
    file_ = nullptr;
  }

  /// Takes the lock, unless this object has it. Call it before each save: in the meantime the
  /// directory or its lock may have been removed, or the process may be a forked child.
  /// \returns as FileDescriptor::lock
  int acquire(const std::filesystem::path& existing_directory) {
    const auto directory = std::filesystem::canonical(existing_directory);
    LockedDirectories& locked = locked_directories();
    const std::lock_guard guard(locked.mutex);
    if (const auto own = locked.find_lock(directory)) return own == file_ ? 0 : EWOULDBLOCK;
    file_ = nullptr;
    do {  // until what is locked is there: others may remove it
      FileDescriptor file(directory / ".lock", OpenMode::lock);
      TORCH_CHECK(file.is_open(), (directory / ".lock").string(),
                  " cannot be opened: ", errno_message(errno));
      if (const int error = file.lock_for_process()) return error;
      file_ = std::make_shared<FileDescriptor>(std::move(file));
    } while (!file_->refers_to(directory / ".lock"));
    locked.owners[directory] = {process_id(), file_};
    return 0;
  }

  /// Returns the process that has the lock of `directory`; 0 if it is this one, none, or not known.
  static std::int64_t owner_pid(const std::filesystem::path& directory) {
    std::error_code error;
    const auto own = std::filesystem::canonical(directory, error);
    const std::lock_guard guard(locked_directories().mutex);
    if (error || locked_directories().find_lock(own) != nullptr) return 0;
    return FileDescriptor(own / ".lock", OpenMode::read).lock_owner_pid();
  }

 private:
  std::shared_ptr<const FileDescriptor> file_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
