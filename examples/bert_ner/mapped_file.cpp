#include "mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "input_error.h"

namespace bert_ner {
namespace {

class Descriptor {
 public:
  // O_NONBLOCK: opening a pipe that nobody writes to would wait for ever.
  explicit Descriptor(const std::filesystem::path& path)
      : value_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {}
  ~Descriptor() {
    if (value_ >= 0) ::close(value_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return value_; }

 private:
  int value_;
};

[[noreturn]] void fail_to_open(const std::filesystem::path& path, int error) {
  throw InputError(path.string() + ": cannot be opened (" + std::generic_category().message(error) +
                   "); check the path and its permissions");
}

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) {
  const Descriptor descriptor(path);
  struct stat status {};
  if (descriptor.get() < 0 || ::fstat(descriptor.get(), &status) != 0) fail_to_open(path, errno);
  if (!S_ISREG(status.st_mode)) {
    throw InputError(path.string() + ": is no regular file; give the path of a file");
  }
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size == 0) return;  // mmap refuses to map nothing
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor.get(), 0);
  if (data == MAP_FAILED) fail_to_open(path, errno);
  bytes_ = {static_cast<const std::byte*>(data), size};
}

MappedFile::~MappedFile() {
  // munmap takes a plain pointer; nothing is written through it.
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

MappedFile::MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace bert_ner
