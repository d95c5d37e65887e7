#pragma once

#include <mezzo/base/detail/crc32c.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/atomic_file.h>
#include <mezzo/checkpoint/detail/pickle_reader.h>
#include <mezzo/checkpoint/detail/stateful.h>
#include <mezzo/checkpoint/detail/zip_directory.h>

#include <ATen/core/ivalue.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Storage.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/export.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// A checkpoint is a zip archive as Python's torch.save writes it. Its pickle is the dict
//
//   {"model": {"0.weight": tensor, ...}, "epoch": 7, ...,
//    "mezzo": {"format": 2, "step": 3400, "per_rank": {"position": [3, 5]}}}
//
// "per_rank" has the values of all ranks for per-rank objects; the top level has rank 0's.
//
// The zip comment ends with the CRC-32C of all preceding bytes, which is verified before anything
// else is read. (libtorch's reader does not verify the CRC-32 of zip entries, and that would not
// cover the bytes between them.) It detects corruption, not tampering. Files that Python
// wrote have no comment.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline constexpr const char* kCheckpointFormat = "2";
inline constexpr std::string_view kCommentBegin = "mezzo checkpoint, format ";
inline constexpr std::string_view kCommentEnd = ", CRC-32C of all preceding bytes: ";
inline constexpr std::size_t kCrcDigits = 8;
inline constexpr const char* kMezzoKey = "mezzo";

/// Thrown for a file that is corrupt, cannot be opened or is not a checkpoint. `what()` continues a
/// sentence that begins with the path.
class InvalidCheckpointError : public std::runtime_error {
 public:
  InvalidCheckpointError(const std::string& message, const char* advice)
      : std::runtime_error(message), advice_(advice) {}
  /// Returns what to do if the user passed the path.
  const char* advice() const noexcept { return advice_; }

 private:
  const char* advice_;
};

[[noreturn]] inline void throw_corrupt(const std::string& reason) {
  throw InvalidCheckpointError("is corrupt (" + reason + ")", "load the previous checkpoint");
}
[[noreturn]] inline void throw_cannot_open(const std::string& reason) {
  throw InvalidCheckpointError("cannot be opened (" + reason + ")",
                               "pass the path of a checkpoint, or its directory to a "
                               "CheckpointManager");
}
[[noreturn]] inline void throw_not_a_checkpoint(const std::string& reason) {
  throw InvalidCheckpointError("is not a checkpoint (" + reason + ")",
                               "load a file of C++'s torch::save with torch::load(model, path), "
                               "and save a state_dict() in Python");
}

// --- Writing -----------------------------------------------------------------------------------

/// Writes a zip archive to `file`, with the CRC-32C of its bytes at the end.
///
/// Exceptions must not propagate through libtorch's zip writer: its destructor continues to write,
/// and a second exception would terminate. The first error is stored and rethrown afterwards.
inline void write_zip(AtomicFile& file, const c10::IValue& root_dict) {
  std::string pickle;  // without type tags, for which torch.load(weights_only=True) throws
  torch::jit::Pickler pickler(
      [&pickle](const char* bytes, std::size_t size) { pickle.append(bytes, size); }, nullptr,
      nullptr, nullptr, nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(root_dict);
  pickler.stop();
  std::exception_ptr failure;
  bool is_ending = false;
  std::string end;
  const auto write = [&](const void* data, std::size_t size) {
    try {
      if (is_ending) {
        end.append(static_cast<const char*>(data), size);
      } else if (!failure) {
        file.write(data, size);
      }
    } catch (...) {
      failure = std::current_exception();
    }
    return size;
  };
  {
    caffe2::serialize::PyTorchStreamWriter zip(write);
    torch::jit::writeArchiveAndTensors("data", pickle.data(), pickle.size(), pickler.tensorData(),
                                       zip);
    is_ending = true;  // the end record, to which the comment is added
    zip.writeEndOfFile();
  }
  if (failure) std::rethrow_exception(failure);
  std::string comment;
  comment.append(kCommentBegin).append(kCheckpointFormat).append(kCommentEnd);
  TORCH_INTERNAL_ASSERT(end.ends_with(std::string_view("\0\0", 2)),
                        "the zip archive already has a comment");
  end[end.size() - 2] = static_cast<char>(comment.size() + kCrcDigits);
  end += comment;
  file.write(end.data(), end.size());
  const std::string digits = crc_to_hex(file.crc());
  file.write(digits.data(), digits.size());
}

// --- Reading -----------------------------------------------------------------------------------

/// A memory-mapped file, whose pages are read on demand. It stays valid if the file is renamed or
/// removed.
class MappedFile {
 public:
  /// Verifies the CRC of a file that has one.
  explicit MappedFile(const std::filesystem::path& path) : file_(path, OpenMode::read) {
    if (!file_.is_open()) throw_cannot_open(errno_message(errno));
    std::error_code error;
    const bool is_regular = std::filesystem::is_regular_file(path, error);
    if (!is_regular) throw_cannot_open(error ? error.message() : "it is not a regular file");
    size_ = static_cast<std::size_t>(std::filesystem::file_size(path, error));
    if (error) throw_cannot_open(error.message());
    check_comment();
    if (size_ == 0) throw_corrupt("it has 0 bytes");
    memory_ = mmap_copy_on_write(file_, size_);
    if (memory_ == nullptr) throw_cannot_open(errno_message(errno));
  }
  ~MappedFile() {
    if (memory_ != nullptr) unmap(memory_, size_);
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::size_t size() const noexcept { return size_; }
  std::string_view bytes() const noexcept { return {memory_, size_}; }
  /// Returns the format version in the comment; empty for files that Python wrote.
  const std::string& format() const noexcept { return format_; }
  /// Returns the size of the comment in bytes; 0 for files that Python wrote.
  std::size_t comment_size() const noexcept { return comment_size_; }

 private:
  void read_all(std::uint64_t offset, void* to, std::size_t size) const {
    auto* bytes = static_cast<char*>(to);
    while (size > 0) {
      const std::ptrdiff_t num_read = file_.read(bytes, size, offset);
      if (num_read < 0 && errno == EINTR) continue;
      if (num_read < 0) throw_corrupt("it cannot be read: " + errno_message(errno));
      if (num_read == 0) throw_corrupt("it was truncated while it was read");
      bytes += num_read, offset += static_cast<std::uint64_t>(num_read);
      size -= static_cast<std::size_t>(num_read);
    }
  }

  /// Reads the comment and verifies the CRC. A corrupt checkpoint still begins as a zip archive or
  /// ends with mezzo's comment. Archives of torch.save have no comment: they end with the 22-byte
  /// end-of-central-directory record, which stores a comment length of 0. In a mezzo checkpoint it
  /// is not 0, so that a file truncated after this record is detected too.
  void check_comment() {
    constexpr std::size_t kTail = 100, kEndRecord = 22;  // kTail exceeds the comment
    std::string begin(std::min<std::size_t>(size_, 4), '\0');
    std::string tail(std::min(size_, kTail), '\0');
    read_all(0, begin.data(), begin.size());
    read_all(size_ - tail.size(), tail.data(), tail.size());
    const std::size_t comment = tail.rfind(kCommentBegin);
    const bool is_zip = begin == "PK\x03\x04";
    if (comment == std::string::npos) {
      if (!is_zip && size_ >= 4) throw_not_a_checkpoint("it is not a zip file");
      const std::string_view end =
          std::string_view(tail).substr(tail.size() - std::min(tail.size(), kEndRecord));
      if (end.starts_with("PK\x05\x06") && end.ends_with(std::string_view("\0\0", 2))) return;
      throw_corrupt("it does not end as a checkpoint");
    }
    check_crc();
    const std::size_t digits = comment + kCommentBegin.size(), end = tail.rfind(kCommentEnd);
    if (end == std::string::npos || end < digits) throw_corrupt("its comment is truncated");
    format_ = tail.substr(digits, end - digits);
    comment_size_ = tail.size() - comment;
  }

  void check_crc() const {
    const std::size_t end = size_ - kCrcDigits;
    std::vector<char> chunk(std::min<std::size_t>(end, std::size_t{1} << 18));
    std::uint32_t crc = 0;
    for (std::size_t offset = 0; offset < end;) {
      const std::size_t size = std::min(chunk.size(), end - offset);
      read_all(offset, chunk.data(), size);
      crc = crc32c(chunk.data(), size, crc);
      offset += size;
    }
    std::string digits(kCrcDigits, '\0');
    read_all(end, digits.data(), digits.size());
    if (digits != crc_to_hex(crc)) {
      throw_corrupt("its checksum does not match: bytes have changed or are missing");
    }
  }

  FileDescriptor file_;
  std::size_t size_ = 0, comment_size_ = 0;
  std::string format_;
  char* memory_ = nullptr;
};

/// Contents of a checkpoint. Tensors are views of the mapped file.
struct CheckpointContents {
  std::int64_t step = 0;
  PythonDict values = make_dict();  ///< by name
  c10::IValue per_rank_values{};    ///< by name, a list of values by rank; None for one process
  bool has_mezzo_metadata = false;  ///< false for files that Python wrote and for bare state_dicts
};

/// Reads the root object of a file. Tensors are on the CPU and alias its memory.
inline c10::IValue read_root_object(const std::shared_ptr<MappedFile>& file) {
  const ZipDirectory zip(file->bytes(), file->comment_size());
  if (zip.has("constants.pkl")) {
    throw_not_a_checkpoint("torch::save wrote it, and torch::load reads it");
  }
  TORCH_CHECK(!zip.has("byteorder") || zip.at("byteorder") == "little",
              "it is big-endian; save it on a little-endian machine");
  std::map<std::string, c10::Storage> storages;  // by key: views share a storage
  std::size_t num_copied_bytes = 0;
  const auto read_storage = [&](const std::string& key) {
    const auto [storage, is_new] = storages.try_emplace(key);
    if (!is_new) return storage->second;
    const std::string_view bytes = zip.at("data/" + key);
    constexpr std::uintptr_t kAlignment = 16;  // in bytes; torch.save aligns records to 64
    c10::DataPtr memory;
    if (reinterpret_cast<std::uintptr_t>(bytes.data()) % kAlignment == 0) {
      // Tensors are only read, and the mapping is copy-on-write.
      memory = c10::InefficientStdFunctionContext::makeDataPtr(
          const_cast<char*>(bytes.data()), [file](void*) {}, at::kCPU);
    } else {
      num_copied_bytes += bytes.size();
      check_format(num_copied_bytes <= file->size(), "its zip has overlapping records");
      memory = c10::GetCPUAllocator()->allocate(bytes.size());
      std::copy(bytes.begin(), bytes.end(), static_cast<char*>(memory.get()));
    }
    return storage->second = c10::Storage(c10::Storage::use_byte_size_t(), bytes.size(),
                                          std::move(memory), nullptr, /*resizable=*/false);
  };
  constexpr std::uint64_t kMemoryPerFileByte = 64, kBaseBytes = 16 << 20;
  const std::uint64_t budget = kMemoryPerFileByte * file->size() + kBaseBytes;
  return PickleReader(zip.at("data.pkl"), read_storage, budget).read();
}

/// \throws InvalidCheckpointError; c10::Error for a newer format
inline CheckpointContents read_checkpoint(const std::filesystem::path& path) {
  const auto file = std::make_shared<MappedFile>(path);
  const std::string& format = file->format();
  TORCH_CHECK(format.empty() || format == kCheckpointFormat, path.string(),
              " is a checkpoint of format ", format, ", and this version of mezzo reads format ",
              kCheckpointFormat, ": update mezzo, or move the file elsewhere");
  try {
    const c10::IValue root_dict = read_root_object(file);
    TORCH_CHECK(root_dict.isGenericDict(), "it contains ", describe_type(root_dict),
                " instead of a dict of objects by name");
    CheckpointContents contents;
    for (const auto& entry : root_dict.toGenericDict()) {
      TORCH_CHECK(entry.key().isString(), "it has a key that is ", describe_type(entry.key()));
      contents.values.insert(entry.key(), entry.value());
    }
    const c10::IValue metadata = get_item(root_dict, kMezzoKey);
    contents.has_mezzo_metadata = !format.empty() && metadata.isGenericDict();
    if (!contents.has_mezzo_metadata) return contents;
    (void)contents.values.erase(kMezzoKey);
    contents.step = get_item(metadata, "step").toInt();
    contents.per_rank_values = get_item(metadata, "per_rank");
    return contents;
  } catch (const InvalidCheckpointError&) {
    throw;
  } catch (...) {
    if (format.empty()) throw_not_a_checkpoint(current_exception_message());
    throw_corrupt(current_exception_message());
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
