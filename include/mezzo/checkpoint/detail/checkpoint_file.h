#pragma once

#include <mezzo/base/detail/crc32c.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/atomic_file.h>
#include <mezzo/checkpoint/detail/checkpoint_part.h>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// A checkpoint is the zip that torch.save writes, and Python's torch.load(weights_only=True) reads:
//
//   archive/data/...   one file for each tensor storage: its bytes, uncompressed
//   archive/data.pkl   a pickled dict {"step": 3400, "state": {"model": {...}, "epoch": 7, ...}}
//   archive/index.pkl  a CheckpointIndex with the position of each object in data.pkl, so that one
//                      object can be read without the tensors of the others
//   archive/version and archive/.data/serialization_id, as libtorch writes them
//
// The zip's comment ends with the CRC-32C of all bytes before those digits. libtorch's reader does
// not check the CRC-32 that a zip has for each of its files, and those do not cover the bytes
// between the files. The CRC protects against damage, not against forgery. Nothing in the file is
// used before the CRC has been checked.
//
// An object that differs between N ranks is stored as N objects: "position" of 2 ranks becomes
// "position", owned by rank 0 of 2, and "position, rank 1". With one rank it is an ordinary object.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline constexpr const char* kCheckpointFormat = "1";
inline constexpr std::string_view kCommentBegin = "mezzo checkpoint, format ";
inline constexpr std::string_view kCommentEnd = ", CRC-32C of all before: ";
inline constexpr std::size_t kCrcDigits = 8;

/// Thrown for a file from which no checkpoint can be read. `what()` is the reason.
class UnusableCheckpoint : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  /// Returns the rest of a sentence that begins with the file's name.
  virtual std::string words() const = 0;
};

/// Thrown for a checkpoint whose bytes differ from those that were written.
class DamagedCheckpoint final : public UnusableCheckpoint {
 public:
  using UnusableCheckpoint::UnusableCheckpoint;
  std::string words() const override { return std::string("is damaged (") + what() + ")"; }
};

/// Thrown for a path that the system does not open, or that is not a regular file.
class UnopenedCheckpoint final : public UnusableCheckpoint {
 public:
  using UnusableCheckpoint::UnusableCheckpoint;
  std::string words() const override { return std::string("cannot be opened (") + what() + ")"; }
};

/// Thrown for a file that mezzo has not written.
class ForeignCheckpoint final : public UnusableCheckpoint {
 public:
  using UnusableCheckpoint::UnusableCheckpoint;
  std::string words() const override {
    return std::string("is not a checkpoint of mezzo's (") + what() + ")";
  }
};

/// One of the ranks that read or write together. `ranks` is 0 for a process without ranks.
struct RankOf {
  std::int64_t rank = 0;
  std::int64_t ranks = 0;

  bool operator==(const RankOf&) const = default;
};

inline std::string name_of_rank(const std::string& name, std::int64_t rank) {
  return rank == 0 ? name : name + ", rank " + std::to_string(rank);
}

struct CheckpointEntry {
  std::string name;
  std::string kind;
  RankOf owner{0, 1};
  std::string layout{};
  std::string identity{};            ///< CheckpointPart::identity; older files have none
  std::vector<std::string> types{};  ///< SavedValue::types
  std::uint64_t begin = 0;           ///< in data.pkl
  std::uint64_t size = 0;
};

struct CheckpointIndex {
  std::int64_t step = 0;
  std::vector<CheckpointEntry> entries{};

  const CheckpointEntry* find(const std::string& name) const {
    for (const CheckpointEntry& entry : entries) {
      if (entry.name == name) return &entry;
    }
    return nullptr;
  }
};

/// The bytes of one storage, which may be on a device or another rank. `read` calls `take` once,
/// with all bytes.
struct PickledStorage {
  using Take = std::function<void(const void* data, std::size_t size)>;
  std::string key;
  std::uint64_t size = 0;
  std::function<void(const Take& take)> read;
};

/// Pickle instructions that leave one object on the stack, and the storages that they refer to.
struct PickledValue {
  std::string instructions{};
  std::vector<std::string> types{};
  std::vector<PickledStorage> storages{};
};

/// Pickles a value. Holds the tensors, not copies of them. `key_prefix` must be unique to the
/// object.
inline PickledValue pickled(const SavedValue& saved, const std::string& key_prefix) {
  PickledValue object;
  object.types = saved.types;
  std::vector<std::string> keys;
  torch::jit::Pickler pickler(
      [&object](const char* bytes, std::size_t size) { object.instructions.append(bytes, size); },
      nullptr, nullptr, nullptr,
      [&](const at::Tensor&) {
        return keys.emplace_back(key_prefix + std::to_string(keys.size()));
      },
      /*tag_aggregates=*/false);
  pickler.pushIValue(saved.value);
  pickler.stop();
  object.instructions.pop_back();  // the last one, STOP
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const at::Tensor tensor = pickler.tensorData()[i];
    object.storages.push_back(
        {keys[i], tensor.storage().nbytes(), [tensor](const PickledStorage::Take& take) {
           const auto bytes = torch::jit::getWriteableTensorData(tensor);
           take(bytes.data(), bytes.sizeInBytes());
         }});
  }
  return object;
}

/// Returns the tensor to be written: a view is copied, so that only its own elements are saved.
inline at::Tensor savable(const at::Tensor& tensor) {
  const at::Tensor detached = tensor.detach();
  const bool is_whole =
      detached.layout() != at::kStrided || detached.storage().nbytes() == detached.nbytes();
  return is_whole ? detached : detached.clone();
}

/// Returns the CRC-32C of all bytes that a file would have of `saved`. Reads tensors of devices.
inline std::string crc_of(const SavedValue& saved) {
  const PickledValue object = pickled(saved, "");
  std::uint32_t crc = crc32c(object.instructions.data(), object.instructions.size());
  for (const PickledStorage& storage : object.storages) {
    storage.read([&crc](const void* data, std::size_t size) { crc = crc32c(data, size, crc); });
  }
  return "with the CRC-32C " + crc_text(crc);
}

/// Returns the prefix for storages of the state's object number `part` on `rank`.
inline std::string key_prefix(std::size_t part, std::int64_t rank) {
  return std::to_string(part) + '.' + std::to_string(rank) + '.';
}

/// Returns `instructions` as a complete pickle.
inline std::string whole_pickle(std::string_view instructions) {
  return "\x80\x02" + std::string(instructions) + '.';
}

inline std::string index_bytes(const CheckpointIndex& index) {
  c10::impl::GenericList entries(c10::AnyType::get());
  for (const CheckpointEntry& entry : index.entries) {
    c10::impl::GenericList types(c10::AnyType::get());
    for (const std::string& type : entry.types) types.push_back(type);
    entries.push_back(c10::ivalue::Tuple::create(std::vector<c10::IValue>{
        entry.name, entry.kind, entry.owner.rank, entry.owner.ranks, entry.layout, types,
        static_cast<std::int64_t>(entry.begin), static_cast<std::int64_t>(entry.size),
        entry.identity}));  // last: versions that do not know it read what stands before it
  }
  const SavedValue all{c10::ivalue::Tuple::create(std::vector<c10::IValue>{index.step, entries})};
  return whole_pickle(pickled(all, "").instructions);
}

/// Parses index.pkl. \param data_size  the size of data.pkl. \throws DamagedCheckpoint
inline CheckpointIndex parse_index(const std::string& bytes, std::uint64_t data_size) {
  CheckpointIndex index;
  try {
    const c10::IValue all = torch::jit::unpickle(bytes.data(), bytes.size());
    const auto& parts = all.toTupleRef().elements();
    index.step = parts.at(0).toInt();
    for (const c10::IValue& one : parts.at(1).toListRef()) {
      const auto& fields = one.toTupleRef().elements();
      CheckpointEntry entry{fields.at(0).toStringRef(),
                            fields.at(1).toStringRef(),
                            {fields.at(2).toInt(), fields.at(3).toInt()},
                            fields.at(4).toStringRef()};
      for (const c10::IValue& type : fields.at(5).toListRef()) {
        entry.types.push_back(type.toStringRef());
      }
      entry.begin = static_cast<std::uint64_t>(fields.at(6).toInt());
      entry.size = static_cast<std::uint64_t>(fields.at(7).toInt());
      if (fields.size() > 8) entry.identity = fields[8].toStringRef();
      index.entries.push_back(std::move(entry));
    }
  } catch (const std::exception&) {
    throw DamagedCheckpoint("its index cannot be read: " + message_of_current_exception());
  }
  std::set<std::string> names;
  for (const CheckpointEntry& entry : index.entries) {
    if (!names.insert(entry.name).second) {
      throw DamagedCheckpoint("it has \"" + entry.name + "\" twice");
    }
    if (entry.begin > data_size || entry.size > data_size - entry.begin) {
      throw DamagedCheckpoint("\"" + entry.name + "\" reaches beyond the end of data.pkl");
    }
  }
  return index;
}

/// Writes a checkpoint's bytes to `file`, which must outlive it.
///
/// No exception may pass through libtorch's zip code: its destructor would go on writing after one,
/// and a second exception would end the process. The error of a failed write is therefore kept,
/// later writes are dropped, and the error is thrown after libtorch has returned.
class CheckpointZip {
 public:
  CheckpointZip(AtomicFile& file, std::int64_t step)
      : file_(file), index_{step, {}}, zip_([this](const void* data, std::size_t size) {
          return take(data, size);
        }) {
    data_ = "\x80\x02}(" + text("step") + pickled({c10::IValue(step)}, "").instructions +
            text("state") + "}(";
  }

  void add(CheckpointEntry entry, const PickledValue& object) {
    TORCH_CHECK(index_.find(entry.name) == nullptr, "the name \"", entry.name,
                "\" is given twice; give each object one of its own");
    for (const PickledStorage& storage : object.storages) {
      storage.read([&](const void* data, std::size_t size) {
        write_record("data/" + storage.key, data, size);
      });
    }
    data_ += text(entry.name);
    entry.types = object.types;
    entry.begin = data_.size();
    entry.size = object.instructions.size();
    data_ += object.instructions;
    index_.entries.push_back(std::move(entry));
  }

  void finish(std::string_view format = kCheckpointFormat) {
    data_ += "uu.";
    write_record("data.pkl", data_.data(), data_.size());
    const std::string index = index_bytes(index_);
    write_record("index.pkl", index.data(), index.size());
    is_ending_ = true;
    zip_.writeEndOfFile();
    std::string comment;
    comment.append(kCommentBegin).append(format).append(kCommentEnd);
    const std::size_t comment_size = comment.size() + kCrcDigits;
    TORCH_INTERNAL_ASSERT(end_.ends_with(std::string_view("\0\0", 2)), "the zip has a comment");
    end_[end_.size() - 2] = static_cast<char>(comment_size);
    end_ += comment;
    file_.write(end_.data(), end_.size());
    const std::string digits = crc_text(file_.crc());
    file_.write(digits.data(), digits.size());
  }

 private:
  /// Returns the pickle instruction that pushes a string.
  static std::string text(const std::string& value) {
    std::string instruction = "X";
    for (int shift = 0; shift < 32; shift += 8) {
      instruction += static_cast<char>((value.size() >> shift) & 0xFF);
    }
    return instruction + value;
  }

  void write_record(const std::string& name, const void* data, std::size_t size) {
    zip_.writeRecord(name, size == 0 ? "" : data, size);
    if (failure_) std::rethrow_exception(failure_);
  }

  std::size_t take(const void* data, std::size_t size) {
    try {
      if (is_ending_) {
        end_.append(static_cast<const char*>(data), size);
      } else if (!failure_) {
        file_.write(data, size);
      }
    } catch (...) {
      failure_ = std::current_exception();
    }
    return size;
  }

  AtomicFile& file_;
  CheckpointIndex index_;
  std::string data_;  ///< data.pkl
  bool is_ending_ = false;
  std::string end_;  ///< what libtorch writes at the end, which is given a comment
  std::exception_ptr failure_;
  caffe2::serialize::PyTorchStreamWriter zip_;  // last: it writes when it is destroyed
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
