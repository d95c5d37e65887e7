#pragma once

#include <mezzo/base/detail/crc32c.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/checkpoint_directory.h>
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

// A checkpoint is a file of Python's torch.save:
//
//   {"model": {"0.weight": tensor, ...}, "epoch": 7, ...,
//    "mezzo": {"format": 2, "step": 3400, "ranks": {"position": [3, 5]}}}
//
// "ranks" has the values of all ranks of objects that differ between ranks; outside of it is rank
// 0's.
//
// The zip's comment ends with the CRC-32C of all bytes before those digits. libtorch's reader does
// not check the CRC-32 that a zip has for each of its files, and those do not cover the bytes
// between the files. The CRC protects against damage, not against forgery. Nothing in the file is
// used before the CRC has been checked. A file that Python wrote has no comment and no CRC.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline constexpr const char* kCheckpointFormat = "2";
inline constexpr std::string_view kCommentBegin = "mezzo checkpoint, format ";
inline constexpr std::string_view kCommentEnd = ", CRC-32C of all before: ";
inline constexpr std::size_t kCrcDigits = 8;
inline constexpr const char* kMezzoKey = "mezzo";

/// Thrown for a file from which no checkpoint can be read. `what()` is the rest of a sentence that
/// begins with the file's name.
class InvalidCheckpointError : public std::runtime_error {
 public:
  InvalidCheckpointError(const std::string& words, const char* advice)
      : std::runtime_error(words), advice_(advice) {}
  /// Returns what to do about a file that was named.
  const char* advice() const noexcept { return advice_; }

 private:
  const char* advice_;
};

[[noreturn]] inline void throw_corrupt(const std::string& why) {
  throw InvalidCheckpointError("is corrupt (" + why + ")", "load the checkpoint before it");
}
[[noreturn]] inline void throw_cannot_open(const std::string& why) {
  throw InvalidCheckpointError("cannot be opened (" + why + ")",
                               "name a checkpoint, or give its directory to a CheckpointManager");
}
[[noreturn]] inline void throw_not_a_checkpoint(const std::string& why) {
  throw InvalidCheckpointError(
      "is not a checkpoint (" + why + ")",
      "read a file by torch::save in C++ with torch::load(model, path), and "
      "let Python save a state_dict()");
}

// --- Writing -----------------------------------------------------------------------------------

/// Writes a zip to `file`, whose bytes end with their CRC-32C.
///
/// No exception may pass through libtorch's zip code: its destructor would go on writing after one,
/// and a second exception would end the process. The error of a failed write is therefore kept,
/// later writes are dropped, and the error is thrown after libtorch has returned.
inline void write_zip(AtomicFile& file, const c10::IValue& root_dict) {
  std::string pickle;  // without tags, which torch.load(weights_only=True) refuses
  torch::jit::Pickler pickler(
      [&pickle](const char* bytes, std::size_t size) { pickle.append(bytes, size); }, nullptr,
      nullptr, nullptr, nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(root_dict);
  pickler.stop();
  std::exception_ptr failure;
  bool is_ending = false;
  std::string end;
  const auto take = [&](const void* data, std::size_t size) {
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
    caffe2::serialize::PyTorchStreamWriter zip(take);
    torch::jit::writeArchiveAndTensors("data", pickle.data(), pickle.size(), pickler.tensorData(),
                                       zip);
    is_ending = true;  // what follows is given a comment
    zip.writeEndOfFile();
  }
  if (failure) std::rethrow_exception(failure);
  std::string comment;
  comment.append(kCommentBegin).append(kCheckpointFormat).append(kCommentEnd);
  TORCH_INTERNAL_ASSERT(end.ends_with(std::string_view("\0\0", 2)), "the zip has a comment");
  end[end.size() - 2] = static_cast<char>(comment.size() + kCrcDigits);
  end += comment;
  file.write(end.data(), end.size());
  const std::string digits = crc_to_hex(file.crc());
  file.write(digits.data(), digits.size());
}

// --- Reading -----------------------------------------------------------------------------------

/// A file in memory: its pages are read when they are needed, and again if there is no room for
/// them. A file that is renamed or removed stays as it is.
class MappedFile {
 public:
  /// Checks the CRC of a file that has one.
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
  /// Returns the format in the comment; empty for a file of Python's.
  const std::string& format() const noexcept { return format_; }
  /// Returns the size of the comment at the end; 0 for a file of Python's.
  std::size_t comment_size() const noexcept { return comment_size_; }

 private:
  void read_all(std::uint64_t offset, void* to, std::size_t count) const {
    auto* bytes = static_cast<char*>(to);
    while (count > 0) {
      const std::ptrdiff_t got = file_.read(bytes, count, offset);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) throw_corrupt("it cannot be read: " + errno_message(errno));
      if (got == 0) throw_corrupt("it became shorter while it was read");
      bytes += got, offset += static_cast<std::uint64_t>(got);
      count -= static_cast<std::size_t>(got);
    }
  }

  /// Reads the comment, and checks the CRC. A corrupt checkpoint still begins as a zip file, or
  /// ends with mezzo's comment. The zips of torch.save have no comment: their last record, of 22
  /// bytes, is the end of the file. In a checkpoint that has lost its last bytes, that record still
  /// holds the length of the comment.
  void check_comment() {
    constexpr std::size_t kTail = 100, kEndOfZip = 22;  // kTail holds all of the comment
    std::string begin(std::min<std::size_t>(size_, 4), '\0');
    std::string tail(std::min(size_, kTail), '\0');
    read_all(0, begin.data(), begin.size());
    read_all(size_ - tail.size(), tail.data(), tail.size());
    const std::size_t comment = tail.rfind(kCommentBegin);
    const bool is_zip = begin == "PK\x03\x04";
    if (comment == std::string::npos) {
      if (!is_zip && size_ >= 4) throw_not_a_checkpoint("it is not a zip file");
      const std::string_view end =
          std::string_view(tail).substr(tail.size() - std::min(tail.size(), kEndOfZip));
      if (end.starts_with("PK\x05\x06") && end.ends_with(std::string_view("\0\0", 2))) return;
      throw_corrupt("it does not end as a checkpoint does");
    }
    check_crc();
    const std::size_t digits = comment + kCommentBegin.size(), end = tail.rfind(kCommentEnd);
    if (end == std::string::npos || end < digits) throw_corrupt("its comment is cut off");
    format_ = tail.substr(digits, end - digits);
    comment_size_ = tail.size() - comment;
  }

  void check_crc() const {
    const std::size_t end = size_ - kCrcDigits;
    std::vector<char> block(std::min<std::size_t>(end, std::size_t{1} << 18));
    std::uint32_t crc = 0;
    for (std::size_t offset = 0; offset < end;) {
      const std::size_t count = std::min(block.size(), end - offset);
      read_all(offset, block.data(), count);
      crc = crc32c(block.data(), count, crc);
      offset += count;
    }
    std::string digits(kCrcDigits, '\0');
    read_all(end, digits.data(), digits.size());
    if (digits != crc_to_hex(crc)) {
      throw_corrupt(
          "its checksum does not fit its bytes, some of which are others than were written, or "
          "missing");
    }
  }

  FileDescriptor file_;
  std::size_t size_ = 0, comment_size_ = 0;
  std::string format_;
  char* memory_ = nullptr;
};

/// What a file holds. Tensors are views of the file.
struct CheckpointContents {
  std::int64_t step = 0;
  PythonDict values = make_dict();  ///< by name
  c10::IValue ranks{};              ///< by name, a list of values by rank; None for one process
  bool is_training_state = false;   ///< false for Python's files and for bare state_dicts
};

/// Reads the values of a file; tensors refer to its memory, on the CPU.
inline c10::IValue read_values(const std::shared_ptr<MappedFile>& file) {
  const ZipDirectory zip(file->bytes(), file->comment_size());
  if (zip.has("constants.pkl")) {
    throw_not_a_checkpoint("torch::save wrote it, and torch::load reads it");
  }
  TORCH_CHECK(!zip.has("byteorder") || zip.at("byteorder") == "little",
              "its numbers begin with their highest byte; save it on a little-endian machine");
  std::map<std::string, c10::Storage> storages;  // by key, so that views share a storage
  std::size_t copied = 0;
  const auto record = [&](const std::string& key) {
    const auto [storage, is_new] = storages.try_emplace(key);
    if (!is_new) return storage->second;
    const std::string_view bytes = zip.at("data/" + key);
    constexpr std::uintptr_t kAlignment = 16;  // in bytes; torch.save aligns records to 64
    c10::DataPtr memory;
    if (reinterpret_cast<std::uintptr_t>(bytes.data()) % kAlignment == 0) {
      // Loading only reads these tensors, and the pages of the file are mapped privately.
      memory = c10::InefficientStdFunctionContext::makeDataPtr(
          const_cast<char*>(bytes.data()), [file](void*) {}, at::kCPU);
    } else {
      copied += bytes.size();
      check_format(copied <= file->size(), "its zip has records that overlap");
      memory = c10::GetCPUAllocator()->allocate(bytes.size());
      std::copy(bytes.begin(), bytes.end(), static_cast<char*>(memory.get()));
    }
    return storage->second = c10::Storage(c10::Storage::use_byte_size_t(), bytes.size(),
                                          std::move(memory), nullptr, /*resizable=*/false);
  };
  constexpr std::uint64_t kMemoryPerFileByte = 64,
                          kSmall = 16 << 20;  // times the file's size, and bytes
  return PickleReader(zip.at("data.pkl"), record, kMemoryPerFileByte * file->size() + kSmall)
      .read();
}

/// \throws InvalidCheckpointError, or c10::Error for a file of a newer format
inline CheckpointContents read_checkpoint(const std::filesystem::path& path) {
  const auto file = std::make_shared<MappedFile>(path);
  const std::string& format = file->format();
  TORCH_CHECK(format.empty() || format == kCheckpointFormat, path.string(),
              " is a checkpoint of format ", format, ", and this version of mezzo reads format ",
              kCheckpointFormat, ": update mezzo, or move the file elsewhere");
  try {
    const c10::IValue root_dict = read_values(file);
    TORCH_CHECK(root_dict.isGenericDict(), "it holds ", describe_type(root_dict),
                ", and should hold a dict of objects by name");
    CheckpointContents read;
    for (const auto& entry : root_dict.toGenericDict()) {
      TORCH_CHECK(entry.key().isString(), "it has a name that is ", describe_type(entry.key()));
      read.values.insert(entry.key(), entry.value());
    }
    const c10::IValue own = get_item(root_dict, kMezzoKey);
    read.is_training_state = !format.empty() && own.isGenericDict();
    if (!read.is_training_state) return read;
    (void)read.values.erase(kMezzoKey);
    read.step = get_item(own, "step").toInt();
    read.ranks = get_item(own, "ranks");
    return read;
  } catch (const InvalidCheckpointError&) {
    throw;
  } catch (...) {
    if (format.empty()) throw_not_a_checkpoint(current_exception_message());
    throw_corrupt(current_exception_message());
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
