/// \file
/// FlushedFile: a text file that survives a killed process up to its last write.
#pragma once

#include <mezzo/base/version.h>

#include <c10/util/Exception.h>

#include <fstream>
#include <ios>
#include <memory>
#include <string>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A file that is flushed to the operating system after each write, and shared by copies.
class FlushedFile {
 public:
  FlushedFile(std::string path, std::ios::openmode mode)
      : path_(std::move(path)), file_(std::make_shared<std::ofstream>(path_, mode)) {
    TORCH_CHECK(file_->is_open(), "Cannot open ", path_, " for writing; does its directory exist?");
  }

  void write(const std::string& text) {
    file_->write(text.data(), static_cast<std::streamsize>(text.size()));
    file_->flush();
    TORCH_CHECK(file_->good(), "Failed to write to ", path_, "; is the disk full?");
  }

 private:
  std::string path_;
  std::shared_ptr<std::ofstream> file_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
