#include "atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

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

bool synchronize_folder(const std::filesystem::path& folder) noexcept {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return false;
  const bool synchronized = ::fsync(descriptor) == 0;
  ::close(descriptor);
  return synchronized;
}

}  // namespace

AtomicFile::AtomicFile(std::filesystem::path target) : target_(std::move(target)) {
  std::error_code ignored;
  if (!target_.has_filename() || std::filesystem::is_directory(target_, ignored)) {
    throw InputError(target_.string() + ": is a folder; give the name of a file to write");
  }
  do {  // a process of the same number may have died and left its temporary here
    temporary_ = next_temporary(target_);
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (descriptor_ < 0 && errno == EEXIST);
  if (descriptor_ < 0) fail("cannot be created", errno);
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
  if (::close(std::exchange(descriptor_, -1)) != 0) fail("cannot be written", errno);
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail("cannot be put in place", errno);
  committed_ = true;
  return synchronize_folder(folder_of(target_)) ? Durability::durable : Durability::unknown;
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
