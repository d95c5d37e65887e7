#pragma once

#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/byte_stream.h>

#include <c10/core/Device.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// One object of the user's in a checkpoint.
class CheckpointPart {
 public:
  CheckpointPart() = default;
  CheckpointPart(const CheckpointPart&) = delete;
  CheckpointPart& operator=(const CheckpointPart&) = delete;
  virtual ~CheckpointPart() = default;

  /// Files have it too; a part takes only what its own kind wrote.
  virtual const char* kind() const = 0;

  /// What is the object's for good and has to be the file's as well, a line each: of a module the
  /// names, dtypes and shapes of what it holds.
  virtual std::string layout() const { return {}; }

  virtual void write(const ByteSink& sink) const = 0;

  /// Throws where `write` would refuse before it needs other ranks: with this first, ranks that
  /// write together know that none will stay away.
  virtual void check_savable() const {}

  /// The part of `write` that may need other ranks (a ShardedOptimizer's); what comes back is the
  /// rest. Takes no memory for what need not be gathered.
  virtual std::function<void(const ByteSink& sink)> collect() const {
    return [this](const ByteSink& sink) { write(sink); };
  }

  /// A short text for the value, where ranks that have it in common can be compared by that.
  virtual std::string value_in_common() const { return {}; }

  /// What each rank had of its own is given to another number of ranks: `source` is what rank 0
  /// had, `salt` a text that no two ranks share. Nothing to call means that the object is left as
  /// it is.
  virtual std::function<void()> decode_for_other_ranks(const ByteSource& source,
                                                       const std::string& salt) const {
    (void)source, (void)salt;
    return nullptr;
  }

  /// Reads all that there is to read and leaves the object alone; what comes back changes it.
  /// Tensors come to `device`, or to where they were.
  virtual std::function<void()> decode(const ByteSource& source,
                                       std::optional<c10::Device> device) const = 0;

  /// The object as it is now; what comes back makes it so again.
  virtual std::function<void()> snapshot() const {
    std::string bytes;
    write([&bytes](const void* data, std::size_t size) {
      bytes.append(static_cast<const char*>(data), size);
    });
    return [this, bytes = std::move(bytes)] { decode(source_of(bytes), std::nullopt)(); };
  }
};

struct NamedPart {
  std::string name;
  std::shared_ptr<const CheckpointPart> part;
  bool is_per_rank = false;  ///< each rank has its own
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
