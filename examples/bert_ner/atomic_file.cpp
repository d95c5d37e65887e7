#include "atomic_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "input_error.h"

namespace bert_ner {
namespace {

std::filesystem::path folder_of(const std::filesystem::path& file) {
  return file.has_parent_path() ? file.parent_path() : std::filesystem::path(".");
}

std::filesystem::path next_temporary(const std::filesystem::path& target) {
  static std::atomic<unsigned long> count{0};
  std::string name = target.filename().string();
  name.insert(0, 1, '.');
  name += '.' + std::to_string(::getpid()) + '-' + std::to_string(count++) + ".tmp";
  return folder_of(target) / name;
}

/// Whether the name is one that next_temporary may give in any process.
bool is_temporary_of(const std::filesystem::path& target, std::string_view name) {
  const std::string prefix = "." + target.filename().string() + ".";
  if (!name.starts_with(prefix)) return false;
  name.remove_prefix(prefix.size());
  const auto take_digits = [&name] {
    const auto count = std::min(name.find_first_not_of("0123456789"), name.size());
    name.remove_prefix(count);
    return count > 0;
  };
  if (!take_digits() || !name.starts_with('-')) return false;
  name.remove_prefix(1);
  return take_digits() && name == ".tmp";
}

/// Those that nobody holds locked: their writers were killed.
void remove_stale_temporaries(const std::filesystem::path& target) {
  std::error_code error;
  const std::filesystem::directory_iterator end;
  for (std::filesystem::directory_iterator entry(folder_of(target), error); !error && entry != end;
       entry.increment(error)) {
    if (!is_temporary_of(target, entry->path().filename().string())) continue;
    const int descriptor = ::open(entry->path().c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW);
    if (descriptor < 0) continue;
    if (::flock(descriptor, LOCK_EX | LOCK_NB) == 0) ::unlink(entry->path().c_str());
    ::close(descriptor);
  }
}

/// Brings the names in a folder to the disk. \returns 0 or the system's error
int flush_folder(const std::filesystem::path& folder) noexcept {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return errno;
  const int error = ::fsync(descriptor) == 0 ? 0 : errno;
  ::close(descriptor);
  return error;
}

}  // namespace

AtomicFile::AtomicFile(std::filesystem::path target) : target_(std::move(target)) {
  std::error_code ignored;
  if (!target_.has_filename() || std::filesystem::is_directory(target_, ignored)) {
    throw InputError(target_.string() + ": is a folder; give the name of a file to write");
  }
  remove_stale_temporaries(target_);
  while (!create_temporary()) {
  }
}

/// \returns false if that name is taken, or was removed by another process before it was locked.
bool AtomicFile::create_temporary() {
  temporary_ = next_temporary(target_);
  descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor_ < 0 && errno == EEXIST) return false;
  if (descriptor_ < 0) fail("cannot be created", errno);
  struct stat status {};
  // Where a file system has no locks, nobody gets one, and nothing is ever taken for stale.
  const bool is_locked = ::flock(descriptor_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
  if (is_locked && ::fstat(descriptor_, &status) == 0 && status.st_nlink > 0) return true;
  close_temporary();
  return false;
}

AtomicFile::~AtomicFile() { close_temporary(); }

void AtomicFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("cannot be written", errno);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void AtomicFile::write(std::string_view text) { write(std::as_bytes(std::span(text))); }

AtomicFile::Durability AtomicFile::commit() {
  if (::fsync(descriptor_) != 0) fail("cannot be written", errno);
  // Still open, and so locked: nobody may take it for stale before it has its place.
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail("cannot be put in place", errno);
  committed_ = true;
  ::close(std::exchange(descriptor_, -1));
  return flush_folder(folder_of(target_)) == 0 ? Durability::durable : Durability::unknown;
}

void AtomicFile::fail(std::string_view what, int error) const {
  std::error_code ignored;
  const bool has_previous = std::filesystem::exists(target_, ignored);
  std::string advice = "check the folder and its permissions";
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) advice = "make room and try again";
  throw InputError(target_.string() + ": " + std::string(what) + " (" +
                   std::generic_category().message(error) + "); " + advice +
                   (has_previous ? ", the previous file is untouched" : ", nothing was written"));
}

void AtomicFile::close_temporary() noexcept {
  if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
  if (!committed_) ::unlink(temporary_.c_str());
}

}  // namespace bert_ner
