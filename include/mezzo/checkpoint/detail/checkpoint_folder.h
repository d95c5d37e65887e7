#pragma once

#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/atomic_file.h>

#include <c10/macros/Export.h>
#include <c10/util/Exception.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// Names in a folder of checkpoints. "checkpoint-000012-step-3400.pt" is the twelfth that was saved;
// ".checkpoint-000012-step-3400.pt.4711.tmp" is the temporary that process 4711 writes before the
// rename. The newest file is the one saved last, whatever its step: a run that went back to an
// older checkpoint saves lower steps.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

struct CheckpointName {
  std::uint64_t sequence = 0;
  std::int64_t step = 0;
  std::filesystem::path path;
};

inline bool take_text(std::string_view& rest, std::string_view text) {
  if (!rest.starts_with(text)) return false;
  rest.remove_prefix(text.size());
  return true;
}

/// Parses an unsigned number.
template <class Integer>
bool take_integer(std::string_view& rest, Integer& number) {
  if (rest.empty() || rest.front() < '0' || rest.front() > '9') return false;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), number);
  if (error != std::errc()) return false;
  rest.remove_prefix(static_cast<std::size_t>(end - rest.data()));
  return true;
}

/// Removes a checkpoint's name from the front of `rest`.
inline bool take_checkpoint_name(std::string_view& rest, CheckpointName& name) {
  return take_text(rest, "checkpoint-") && take_integer(rest, name.sequence) &&
         take_text(rest, "-step-") && take_integer(rest, name.step) && take_text(rest, ".pt");
}

/// Returns the number of the process that wrote `file`, if that is the temporary of `target`, or
/// with an empty target of any checkpoint; otherwise 0.
inline pid_t writer_of_temporary(std::string_view file, std::string_view target = {}) {
  CheckpointName name;
  pid_t process = 0;
  const bool is_temporary =
      take_text(file, ".") &&
      (target.empty() ? take_checkpoint_name(file, name) : take_text(file, target)) &&
      take_text(file, ".") && take_integer(file, process) && file == ".tmp";
  return is_temporary ? process : 0;
}

inline std::filesystem::path checkpoint_path(const std::filesystem::path& folder,
                                             std::uint64_t sequence, std::int64_t step) {
  std::string number = std::to_string(sequence);
  number.insert(0, number.size() < 6 ? 6 - number.size() : 0, '0');
  return folder / ("checkpoint-" + number + "-step-" + std::to_string(step) + ".pt");
}

inline std::filesystem::path temporary_of(const std::filesystem::path& target) {
  return target.parent_path() /
         ("." + target.filename().string() + "." + std::to_string(::getpid()) + ".tmp");
}

/// Returns the file that `path` names, through links, which may dangle. \throws c10::Error if
/// something else than a regular file is there
inline std::filesystem::path replaceable_file(std::filesystem::path path) {
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

/// Returns the checkpoints in `folder`, the newest first.
inline std::vector<CheckpointName> checkpoints_in(const std::filesystem::path& folder) {
  std::vector<CheckpointName> found;
  for (const std::string& file : names_in(folder)) {
    CheckpointName name;
    std::string_view rest = file;
    if (!take_checkpoint_name(rest, name) || !rest.empty()) continue;
    name.path = folder / file;
    found.push_back(std::move(name));
  }
  std::sort(found.begin(), found.end(), [](const CheckpointName& a, const CheckpointName& b) {
    return a.sequence != b.sequence ? a.sequence > b.sequence : a.path > b.path;
  });
  return found;
}

/// Creates a folder, and flushes the names of what it had to create to the disk. \returns 0, or the
/// system's error from flushing
inline int make_folder(const std::filesystem::path& folder) {
  std::error_code error;
  if (folder.empty() || std::filesystem::exists(folder, error)) return 0;
  const auto parent = folder.parent_path();
  const int of_parent = make_folder(parent);
  std::filesystem::create_directory(folder, error);
  TORCH_CHECK(!error, folder.string(), " cannot be made: ", error.message());
  const int own = flush_folder(parent.empty() ? std::filesystem::path(".") : parent);
  return own != 0 ? own : of_parent;
}

/// Returns the sequence number of the next checkpoint, given the existing ones.
inline std::uint64_t next_sequence(const std::vector<CheckpointName>& newest_first) {
  if (newest_first.empty()) return 1;
  const CheckpointName& newest = newest_first.front();
  TORCH_CHECK(newest.sequence < std::numeric_limits<std::uint64_t>::max(), newest.path.string(),
              " has the last number that there is, so that none can be newer; move it elsewhere");
  return newest.sequence + 1;
}

/// Returns the folder by a path that a later chdir does not change.
inline std::filesystem::path absolute_folder(const std::filesystem::path& folder) {
  return std::filesystem::absolute(folder.empty() ? std::filesystem::path(".") : folder);
}

/// Whether `path` exists, if only as a dangling link.
inline bool is_there(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::symlink_status(path, error).type() !=
         std::filesystem::file_type::not_found;
}

/// The folders of checkpoints that this process has locked, by the device and inode of their lock
/// files. The system's record locks do not tell two owners in one process apart, and closing any
/// descriptor of a file drops them. Exported, so that shared libraries agree on it.
struct LockedFolders {
  std::mutex mutex{};
  std::map<std::pair<dev_t, ino_t>, pid_t> owners{};  // a forked child finds its parent's entries

  bool holds(const struct stat& file) const {
    const auto found = owners.find({file.st_dev, file.st_ino});
    return found != owners.end() && found->second == ::getpid();
  }
};
C10_EXPORT inline LockedFolders& locked_folders() {
  static LockedFolders& folders = *new LockedFolders;
  return folders;
}

/// The lock of a folder of checkpoints: a record lock of its file ".lock". It ends with the process
/// that took it, whose forked children do not inherit it.
class FolderLock {
 public:
  enum class Outcome { held, taken_by_another, not_offered };

  FolderLock() = default;
  FolderLock(FolderLock&& other) noexcept
      : file_(std::move(other.file_)), process_(std::exchange(other.process_, 0)) {}
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  FolderLock& operator=(FolderLock&&) = delete;
  ~FolderLock() {
    const std::lock_guard guard(locked_folders().mutex);
    release();
  }

  /// Takes the lock, unless this object holds it. Call it before each save: in the meantime the
  /// folder or its lock may have been removed, or the process may be a forked child.
  Outcome hold(const std::filesystem::path& folder) {
    const auto path = folder / ".lock";
    LockedFolders& locked = locked_folders();
    const std::lock_guard guard(locked.mutex);
    if (is_held() && is_of(path)) return Outcome::held;
    release();
    do {
      struct stat status {};
      if (::stat(path.c_str(), &status) == 0 && locked.holds(status)) {
        return Outcome::taken_by_another;
      }
      file_ = OpenFile();
      file_ = OpenFile(path, O_RDWR | O_CREAT);
      TORCH_CHECK(file_.is_open(), path.string(), " cannot be opened: ", reason(errno));
      struct flock record = whole_file();
      if (::fcntl(file_.descriptor(), F_SETLK, &record) != 0) {
        const bool is_taken = errno == EACCES || errno == EAGAIN;
        file_ = OpenFile();
        return is_taken ? Outcome::taken_by_another : Outcome::not_offered;
      }
    } while (!is_of(path));  // removed, and perhaps made anew, before it was locked
    process_ = ::getpid();
    locked.owners[key()] = process_;
    return Outcome::held;
  }
  bool is_held() const noexcept { return file_.is_open() && process_ == ::getpid(); }

  /// Returns the process that holds the lock of `folder`; 0 if it is this one, none, or not known.
  static pid_t holder(const std::filesystem::path& folder) {
    const auto path = folder / ".lock";
    LockedFolders& locked = locked_folders();
    const std::lock_guard guard(locked.mutex);
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0 || locked.holds(status)) return 0;
    const OpenFile file(path, O_RDONLY);
    struct flock record = whole_file();
    if (!file.is_open() || ::fcntl(file.descriptor(), F_GETLK, &record) != 0) return 0;
    return record.l_type == F_UNLCK ? 0 : record.l_pid;
  }

 private:
  static struct flock whole_file() {
    struct flock record {};
    record.l_type = F_WRLCK;
    record.l_whence = SEEK_SET;
    return record;
  }

  std::pair<dev_t, ino_t> key() const {
    struct stat own {};
    ::fstat(file_.descriptor(), &own);
    return {own.st_dev, own.st_ino};
  }

  bool is_of(const std::filesystem::path& path) const {
    struct stat there {};
    return ::stat(path.c_str(), &there) == 0 && key() == std::pair(there.st_dev, there.st_ino);
  }

  void release() {
    if (is_held()) locked_folders().owners.erase(key());
    file_ = OpenFile();
  }

  OpenFile file_;
  pid_t process_ = 0;
};

/// Removes temporaries of killed writers of a folder. Only the holder of the lock may call this: no
/// other process is writing then.
inline void remove_stale_temporaries(const std::filesystem::path& folder) {
  for (const std::string& file : names_in(folder)) {
    if (writer_of_temporary(file) != 0) ::unlink((folder / file).c_str());
  }
}

/// Removes temporaries of killed writers of one file, which has no lock.
inline void remove_stale_temporaries_of(const std::filesystem::path& target) {
  const auto folder = target.parent_path();
  for (const std::string& file : names_in(folder)) {
    const pid_t writer = writer_of_temporary(file, target.filename().string());
    const bool is_dead = writer > 0 && ::kill(writer, 0) != 0 && errno == ESRCH;
    if (is_dead) ::unlink((folder / file).c_str());
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
