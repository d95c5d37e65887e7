#pragma once

#include <mezzo/base/detail/crc32c.h>
#include <mezzo/base/detail/system_file.h>
#include <mezzo/base/version.h>

#include <c10/util/Exception.h>

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
    OpenFile left(folder / file, FileUse::write);
    if (!left.is_open() || left.lock() != 0) continue;
    if (remove_file(folder / file) != 0) {  // where an open file cannot be removed
      left = OpenFile();
      (void)remove_file(folder / file);
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
      file_ = OpenFile(temporary_, FileUse::create);
      if (!file_.is_open() && errno != EEXIST) fail("cannot be created", errno);
    } while (!file_.is_open() || file_.lock() == EWOULDBLOCK || !file_.is_at(temporary_));
    file_.take_mode_of(target_);
  }
  ~AtomicFile() {
    if (is_committed_) return;
    file_ = OpenFile();
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
  /// failed, closing the file or flushing the folder: the file is then in place, but may not
  /// survive a crash
  [[nodiscard]] int commit() {
    if (const int error = file_.flush()) fail("cannot be brought to the disk", error);
    if (const int error = replace_file(temporary_, target_, file_)) {
      fail("cannot be put in its place", error);
    }
    is_committed_ = true;
    const int of_file = file_.close(), of_folder = flush_folder(target_.parent_path());
    return of_file != 0 ? of_file : of_folder;
  }

 private:
  [[noreturn]] void fail(const char* what, int error) const {
    TORCH_CHECK(false, target_.string(), " ", what, ": ", reason(error), "; ",
                is_full(error) ? "make room" : "see to the disk and the folder's permissions",
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
