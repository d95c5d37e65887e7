#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace bert_ner {

/// A whole file, read-only in memory; pages are read when they are touched. Throws InputError if it
/// cannot be opened or is no regular file. Whoever shortens the file while it is mapped takes the
/// process down (SIGBUS): files are replaced by renaming (AtomicFile), never rewritten in place.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  /// The bytes stay where they are for the life of the mapping, also when the object is moved.
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace bert_ner
