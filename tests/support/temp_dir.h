#pragma once

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace test_support {

/// A temporary directory that the destructor removes; in memory (/dev/shm) if possible.
class TempDir {
 public:
  TempDir() {
    const bool has_memory = ::access("/dev/shm", W_OK) == 0;
    const auto parent = has_memory ? "/dev/shm" : std::filesystem::temp_directory_path();
    std::string name = (parent / "mezzo-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr)
      throw std::runtime_error("cannot create a temporary directory");
    path_ = name;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(std::string_view name) const { return path_ / name; }

  /// Writes a file and returns its path.
  std::filesystem::path write(std::string_view name, std::string_view bytes) const {
    const auto file = path_ / name;
    std::ofstream(file, std::ios::binary) << bytes;
    return file;
  }

 private:
  std::filesystem::path path_;
};

/// A temporary directory that the new processes of "threadsafe" death tests share, which repeat the
/// test up to their statement.
class SharedTempDir {
 public:
  SharedTempDir() {
    if (std::getenv(kPath) == nullptr) ::setenv(kPath, owned_.emplace().path().c_str(), 1);
  }
  ~SharedTempDir() {
    if (owned_) ::unsetenv(kPath);
  }
  SharedTempDir(const SharedTempDir&) = delete;
  SharedTempDir& operator=(const SharedTempDir&) = delete;

  std::filesystem::path path() const { return std::getenv(kPath); }

 private:
  static constexpr const char* kPath = "MEZZO_SHARED_TEMP_DIR";

  std::optional<TempDir> owned_;
};

inline std::string read_file(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

inline void write_file(const std::filesystem::path& file, const std::string& bytes) {
  std::ofstream(file, std::ios::binary) << bytes;
}

}  // namespace test_support
