#pragma once

#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/atomic_file.h>

#include <c10/util/Exception.h>

#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
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

inline bool is_temporary_name(std::string_view file) {
  CheckpointName name;
  std::uint64_t process = 0;
  return take_text(file, ".") && take_checkpoint_name(file, name) && take_text(file, ".") &&
         take_integer(file, process) && file == ".tmp";
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

/// Creates the folder. \returns the parents of the folders that were created, which have yet to be
/// flushed to the disk
inline std::vector<std::filesystem::path> make_folder(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> parents;
  std::error_code error;
  for (auto path = folder; !path.empty() && !std::filesystem::exists(path, error);) {
    path = path.parent_path();
    parents.push_back(path.empty() ? std::filesystem::path(".") : path);
  }
  std::filesystem::create_directories(folder, error);
  TORCH_CHECK(!error, folder.string(), " cannot be made: ", error.message());
  return parents;
}

/// Flushes the names in `folders` to the disk. Folders that could not be flushed stay in the list,
/// for another attempt. \returns 0, or the system's last error
inline int flush_folders(const FileCalls& calls, std::vector<std::filesystem::path>& folders) {
  int failure = 0;
  std::erase_if(folders, [&](const std::filesystem::path& folder) {
    const int error = flush_folder(calls, folder);
    if (error != 0) failure = error;
    return error == 0;
  });
  return failure;
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

/// The lock of a folder of checkpoints: of its file ".lock", and of the process that took it.
class FolderLock {
 public:
  enum class Outcome { held, taken_by_another, not_offered };

  /// Takes the lock, unless this object holds it. Call it before each save: in the meantime the
  /// folder or its lock may have been removed, and a forked child does not hold its parent's lock.
  /// The destructor, or the end of the process, releases the lock.
  Outcome hold(const FileCalls& calls, const std::filesystem::path& folder) {
    const auto path = folder / ".lock";
    if (is_held() && process_ == ::getpid() && is_of(path)) return Outcome::held;
    do {
      file_ = OpenFile();  // closed before the next open: a child's old descriptor has the lock
      file_ = OpenFile(calls, path, O_RDWR | O_CREAT);
      TORCH_CHECK(file_.is_open(), path.string(), " cannot be opened: ", reason(errno));
      if (::flock(file_.descriptor(), LOCK_EX | LOCK_NB) != 0) {
        const bool is_taken = errno == EWOULDBLOCK;
        file_ = OpenFile();
        return is_taken ? Outcome::taken_by_another : Outcome::not_offered;
      }
    } while (!is_of(path));  // removed, and perhaps made anew, before it was locked
    process_ = ::getpid();
    return Outcome::held;
  }
  bool is_held() const noexcept { return file_.is_open(); }

 private:
  bool is_of(const std::filesystem::path& path) const {
    struct stat own {
    }, there{};
    return ::fstat(file_.descriptor(), &own) == 0 && ::stat(path.c_str(), &there) == 0 &&
           own.st_dev == there.st_dev && own.st_ino == there.st_ino;
  }

  OpenFile file_;
  pid_t process_ = 0;
};

/// Removes temporaries of killed writers. Only the holder of the lock may call this: no other
/// process is writing then.
inline void remove_stale_temporaries(const FileCalls& calls, const std::filesystem::path& folder) {
  for (const std::string& file : names_in(folder)) {
    if (is_temporary_name(file)) calls.unlink((folder / file).c_str());
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
