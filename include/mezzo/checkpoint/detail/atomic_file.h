#pragma once

#include <mezzo/base/detail/crc32c.h>
#include <mezzo/base/detail/platform_file.h>
#include <mezzo/base/version.h>

#include <c10/util/Exception.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns the names of the entries of `directory`; none if it does not exist.
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

/// Creates a directory and its parents, and fsyncs the parents of what it created.
/// \returns 0, or the errno of a failed fsync
inline int create_and_fsync_directories(const std::filesystem::path& directory) {
  std::error_code error;
  if (directory.empty() || std::filesystem::exists(directory, error)) return 0;
  const auto parent = directory.parent_path();
  const int parent_error = create_and_fsync_directories(parent);
  std::filesystem::create_directory(directory, error);
  TORCH_CHECK(!error, directory.string(), " cannot be created: ", error.message());
  const int fsync_error = fsync_directory(parent.empty() ? std::filesystem::path(".") : parent);
  return fsync_error != 0 ? fsync_error : parent_error;
}

/// Resolves the symlinks of `path`, whose target need not exist.
/// \throws c10::Error if something other than a regular file exists there
inline std::filesystem::path resolve_replaceable_path(std::filesystem::path path) {
  std::error_code error;
  for (int links = 0; std::filesystem::is_symlink(path, error); ++links) {
    TORCH_CHECK(links < 40, path.string(), ": too many levels of symbolic links");
    path = path.parent_path() / std::filesystem::read_symlink(path);
  }
  const auto status = std::filesystem::status(path, error);
  TORCH_CHECK(!std::filesystem::exists(status) || std::filesystem::is_regular_file(status),
              path.string(), " is not a regular file and cannot be replaced; pass another path");
  return path.has_parent_path() ? path : "." / path;
}

/// Removes the temporaries ".NAME.3.tmp" of killed writers, where `is_target(NAME)`. Temporaries of
/// running writers are locked.
template <class IsTarget>
void remove_stale_temporaries(const std::filesystem::path& directory, const IsTarget& is_target) {
  for (const std::filesystem::path file : list_directory(directory)) {
    const std::string name = file.stem().stem().string(), suffix = file.stem().extension().string();
    const bool is_temporary = file.extension() == ".tmp" && name.starts_with('.') &&
                              suffix.size() > 1 &&
                              suffix.find_first_not_of("0123456789", 1) == std::string::npos;
    if (!is_temporary || !is_target(name.substr(1))) continue;
    FileDescriptor stale(directory / file, OpenMode::write);
    if (!stale.is_open() || stale.lock() != 0) continue;
    if (remove_file(directory / file) != 0) {  // some systems cannot remove an open file
      stale = FileDescriptor();
      (void)remove_file(directory / file);
    }
  }
}

/// Writes a file atomically: to a temporary in the same directory, which is fsynced and renamed.
/// Errors before the rename throw and leave the target unchanged. Threads and processes may write
/// the same target concurrently; the last one to commit wins.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path target) : target_(std::move(target)) {
    int suffix = 0;
    do {  // until this process owns the lock: others create temporaries, and remove unlocked ones
      temporary_ = target_.parent_path() /
                   ("." + target_.filename().string() + "." + std::to_string(suffix++) + ".tmp");
      file_ = FileDescriptor(temporary_, OpenMode::create);
      if (!file_.is_open() && errno != EEXIST) fail("cannot be created", errno);
    } while (!file_.is_open() || file_.lock() == EWOULDBLOCK || !file_.refers_to(temporary_));
    std::error_code ignored;
    const auto status = std::filesystem::status(target_, ignored);
    if (std::filesystem::exists(status)) {  // preserves a mode such as 0600
      std::filesystem::permissions(temporary_, status.permissions(), ignored);
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
    size_ += size;
    crc_ = crc32c(data, size, crc_);
    const auto* bytes = static_cast<const char*>(data);
    while (size > 0) {
      const std::ptrdiff_t written = file_.write(bytes, size);
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) fail("cannot be written", written < 0 ? errno : EIO);
      bytes += written, size -= static_cast<std::size_t>(written);
    }
  }

  std::uint64_t size() const noexcept { return size_; }
  std::uint32_t crc() const noexcept { return crc_; }

  /// Fsyncs the temporary and renames it to the target.
  /// \returns 0, or the errno of a failed close or directory fsync: the target is then complete,
  ///   but may not survive a system crash
  [[nodiscard]] int commit() {
    if (const int error = file_.fsync()) fail("cannot be fsynced", error);
    if (const int error = replace_file(temporary_, target_, file_))
      fail("cannot be renamed", error);
    is_committed_ = true;
    const int close_error = file_.close(), fsync_error = fsync_directory(target_.parent_path());
    return close_error != 0 ? close_error : fsync_error;
  }

 private:
  [[noreturn]] void fail(const char* what, int error) const {
    TORCH_CHECK(false, target_.string(), " ", what, ": ", errno_message(error),
                "; check the disk, its free space and the permissions of the directory. Existing "
                "checkpoints are unchanged");
  }

  std::filesystem::path temporary_, target_;
  FileDescriptor file_;
  std::uint64_t size_ = 0;
  std::uint32_t crc_ = 0;
  bool is_committed_ = false;
};

/// Writes `target` atomically by `write(file)`, and returns its size in bytes. Calls `warn` if the
/// file may not survive a system crash.
/// \param directory_error  errno of a failed fsync of the directory's parents, or 0
template <class Write, class Warn>
std::uint64_t write_atomically(const std::filesystem::path& target, int directory_error,
                               const Write& write, const Warn& warn) {
  AtomicFile file(target);
  write(file);
  const int file_error = file.commit();
  const int error = file_error != 0 ? file_error : directory_error;
  if (error != 0) {
    warn(target.string() +
         " is written, but may not survive a system crash: closing it, or fsync of its directory, "
         "failed: " +
         errno_message(error));
  }
  return file.size();
}

/// Writes `path` atomically, and returns its size. Follows symlinks, creates the parent directories
/// and removes temporaries of killed writers.
template <class Write>
std::uint64_t replace_atomically(const std::filesystem::path& path, const Write& write) {
  const std::filesystem::path target = resolve_replaceable_path(path);
  const int directory_error = create_and_fsync_directories(target.parent_path());
  remove_stale_temporaries(target.parent_path(), [&target](const std::string& name) {
    return name == target.filename();
  });
  return write_atomically(target, directory_error, write,
                          [](const std::string& text) { TORCH_WARN(text); });
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
