#pragma once

#include <mezzo/base/detail/crc32c.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/atomic_file.h>
#include <mezzo/checkpoint/detail/checkpoint_file.h>

#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/unpickler.h>

#include <sys/stat.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// An open file. The descriptor stays open, so that later reads see this file even if it is renamed
/// or removed.
class OpenCheckpoint final : public caffe2::serialize::ReadAdapterInterface {
 public:
  OpenCheckpoint(const FileCalls& calls, const std::filesystem::path& path)
      : pread_(calls.pread), file_(calls, path, O_RDONLY | O_NONBLOCK) {  // pipes do not wait
    if (!file_.is_open()) throw UnopenedCheckpoint(reason(errno));
    struct stat status {};
    if (::fstat(file_.descriptor(), &status) != 0) throw UnopenedCheckpoint(reason(errno));
    if (!S_ISREG(status.st_mode)) throw UnopenedCheckpoint("it is not a regular file");
    size_ = static_cast<std::size_t>(status.st_size);
  }

  std::size_t size() const override { return size_; }

  /// \throws DamagedCheckpoint
  void read_all(std::uint64_t offset, void* to, std::size_t count) const {
    auto* bytes = static_cast<char*>(to);
    while (count > 0) {
      const ssize_t got = pread_(file_.descriptor(), bytes, count, static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) throw DamagedCheckpoint("it cannot be read: " + reason(errno));
      if (got == 0) throw DamagedCheckpoint("it became shorter while it was read");
      bytes += got, offset += static_cast<std::uint64_t>(got);
      count -= static_cast<std::size_t>(got);
    }
  }

  /// Reads for libtorch's zip code, through which no exception may pass.
  std::size_t read(std::uint64_t offset, void* to, std::size_t count,
                   const char* /*what*/) const override {
    if (failure_ || offset >= size_) return 0;
    count = std::min(count, size_ - static_cast<std::size_t>(offset));
    try {
      read_all(offset, to, count);
      return count;
    } catch (...) {
      failure_ = std::current_exception();
      return 0;
    }
  }

  /// Calls `f`, which reads through libtorch. \throws the error that `read` has kept
  template <class F>
  auto through_libtorch(const F& f) const {
    try {
      return f();
    } catch (...) {
      if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
      throw;
    }
  }

 private:
  std::function<ssize_t(int, void*, size_t, off_t)> pread_;
  OpenFile file_;
  std::size_t size_ = 0;
  mutable std::exception_ptr failure_;
};

/// A checkpoint whose CRC has been checked over all bytes.
class CheckpointReader {
 public:
  /// \throws UnusableCheckpoint, or c10::Error if the file has a newer format
  CheckpointReader(const FileCalls& calls, std::filesystem::path path)
      : path_(std::move(path)), file_(std::make_shared<OpenCheckpoint>(calls, path_)) {
    check_is_not_foreign();
    check_crc();
    check_format();
    zip_ = file_->through_libtorch(
        [this] { return std::make_unique<caffe2::serialize::PyTorchStreamReader>(file_); });
    data_ = record("data.pkl");
    index_ = parse_index(record("index.pkl"), data_.size());
  }

  const std::filesystem::path& path() const noexcept { return path_; }
  const CheckpointIndex& index() const noexcept { return index_; }

  /// Reads an object of `index` with its tensors, onto `device` or the device they were saved from.
  SavedValue read(const CheckpointEntry& entry, std::optional<c10::Device> device) const {
    const std::string pickle =
        whole_pickle(std::string_view(data_).substr(entry.begin, entry.size));
    std::size_t position = 0;
    const auto next = [&](char* to, std::size_t count) {
      count = std::min(count, pickle.size() - position);
      std::memcpy(to, pickle.data() + position, count);
      position += count;
      return count;
    };
    return file_->through_libtorch([&]() -> SavedValue {
      torch::jit::Unpickler unpickler(
          next, nullptr, nullptr,
          [this](const std::string& key) { return std::get<0>(zip_->getRecord("data/" + key)); },
          device);
      return {unpickler.parse_ivalue(), entry.types};
    });
  }

 private:
  void check_crc() const {
    if (file_->size() <= kCrcDigits) {
      throw DamagedCheckpoint("it has " + std::to_string(file_->size()) + " bytes, and is cut off");
    }
    const std::size_t end = file_->size() - kCrcDigits;
    std::vector<char> block(std::min<std::size_t>(end, std::size_t{1} << 18));
    std::uint32_t crc = 0;
    for (std::size_t offset = 0; offset < end;) {
      const std::size_t count = std::min(block.size(), end - offset);
      file_->read_all(offset, block.data(), count);
      crc = crc32c(block.data(), count, crc);
      offset += count;
    }
    std::string digits(kCrcDigits, '\0');
    file_->read_all(end, digits.data(), digits.size());
    if (digits != crc_text(crc)) {
      throw DamagedCheckpoint(
          "its checksum does not fit its bytes, some of which are others than were written, or "
          "missing");
    }
  }

  static constexpr std::size_t kTail = 100;  // holds all of mezzo's comment

  std::string last_bytes(std::size_t count) const {
    std::string bytes(std::min(file_->size(), count), '\0');
    file_->read_all(file_->size() - bytes.size(), bytes.data(), bytes.size());
    return bytes;
  }

  /// A damaged checkpoint still begins as a zip file, or ends with mezzo's comment. libtorch's zips
  /// have no comment: their last record, of 22 bytes, is the end of the file. In a checkpoint that
  /// has lost its last bytes, that record still holds the length of the comment.
  void check_is_not_foreign() const {
    constexpr std::size_t kEndOfZip = 22;
    std::string begin(4, '\0');
    if (file_->size() < begin.size()) return;
    file_->read_all(0, begin.data(), begin.size());
    const std::string tail = last_bytes(kTail);
    const bool is_zip = begin == "PK\x03\x04";
    if (!is_zip && tail.find(kCommentBegin) == std::string::npos) {
      throw ForeignCheckpoint("it is not a zip file");
    }
    const std::string_view end =
        std::string_view(tail).substr(tail.size() - std::min(tail.size(), kEndOfZip));
    if (is_zip && end.starts_with("PK\x05\x06") && end.ends_with(std::string_view("\0\0", 2))) {
      throw ForeignCheckpoint("torch::save wrote it, and torch::load reads it");
    }
  }

  void check_format() const {
    const std::string tail = last_bytes(kTail);
    const std::size_t begin = tail.rfind(kCommentBegin);
    const std::size_t end = tail.rfind(kCommentEnd);
    if (begin == std::string::npos || end == std::string::npos || end < begin) {
      throw DamagedCheckpoint("it does not end as a checkpoint does");
    }
    const std::size_t digits = begin + kCommentBegin.size();
    const std::string format = tail.substr(digits, end - digits);
    TORCH_CHECK(format == kCheckpointFormat, path_.string(), " is a checkpoint of format ", format,
                ", and this version of mezzo reads format ", kCheckpointFormat,
                ": update mezzo, or move the file elsewhere");
  }

  std::string record(const std::string& name) const {
    return file_->through_libtorch([&] {
      const auto [bytes, size] = zip_->getRecord(name);
      return std::string(static_cast<const char*>(bytes.get()), size);
    });
  }

  std::filesystem::path path_;
  std::shared_ptr<OpenCheckpoint> file_;
  std::unique_ptr<caffe2::serialize::PyTorchStreamReader> zip_;
  std::string data_;  ///< data.pkl
  CheckpointIndex index_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
