/// \file
/// TensorBoardWriter: writes step metrics to a TensorBoard event file.
#pragma once

#include <mezzo/base/detail/crc32c.h>
#include <mezzo/base/detail/platform.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnostics/detail/flushed_file.h>
#include <mezzo/diagnostics/step_metrics.h>

#include <c10/util/Exception.h>

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <ios>
#include <string>
#include <string_view>
#include <system_error>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

namespace detail {

// The parts of protocol buffers and TFRecord that an event file of scalars consists of
// (tensorflow/core/util/event.proto, framework/summary.proto, lib/io/record_writer.cc).

/// Encodes a fixed32 or fixed64 in little-endian order.
template <class Unsigned>
std::string encode_fixed(Unsigned value) {
  std::string bytes;
  for (std::size_t i = 0; i < sizeof(value); ++i) {
    bytes += static_cast<char>(static_cast<unsigned char>(value >> (8 * i)));
  }
  return bytes;
}

inline std::string encode_varint(std::uint64_t value) {
  std::string bytes;
  for (; value >= 0x80U; value >>= 7U) bytes += static_cast<char>(0x80U | (value & 0x7FU));
  return bytes + static_cast<char>(value);
}

/// Encodes a length-delimited field. Literal keys below are `number << 3 | wire_type`, with wire
/// types 0 (varint), 1 (fixed64) and 5 (fixed32).
inline std::string encode_bytes_field(std::uint64_t number, std::string_view bytes) {
  return encode_varint(number << 3U | 2U) + encode_varint(bytes.size()) + std::string(bytes);
}

}  // namespace detail

/// A MetricsLogger callback that writes a TensorBoard event file, with a curve for each scalar that
/// is set, in float32: `tensorboard --logdir directory`.
class TensorBoardWriter {
 public:
  /// Creates `directory` if needed, and a new event file in it.
  /// \throws c10::Error if the file cannot be written
  explicit TensorBoardWriter(const std::string& directory)
      : file_(make_path(directory), std::ios::trunc | std::ios::binary) {
    write_event(detail::wall_time_now(), detail::encode_bytes_field(3, "brain.Event:2"));
  }

  /// Writes the scalars of a step; called by MetricsLogger.
  void operator()(const StepMetrics& metrics) {
    std::string values;
    for (const auto& [name, value] : metrics.scalars()) {
      if (!value) continue;
      const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(*value));
      values += detail::encode_bytes_field(
          1, detail::encode_bytes_field(1, name) + "\x15" + detail::encode_fixed(bits));
    }
    write_event(metrics.wall_time,
                "\x10" + detail::encode_varint(static_cast<std::uint64_t>(metrics.step)) +
                    detail::encode_bytes_field(5, values));
  }

 private:
  /// Writes an Event as a TFRecord: its length and its bytes, each with a masked CRC.
  void write_event(double wall_time, const std::string& fields) {
    using detail::encode_fixed;
    const std::string event =
        "\x09" + encode_fixed(std::bit_cast<std::uint64_t>(wall_time)) + fields;
    std::string record;
    for (const std::string& part : {encode_fixed(std::uint64_t{event.size()}), event}) {
      const std::uint32_t crc = detail::crc32c(part.data(), part.size());
      record += part + encode_fixed(std::rotr(crc, 15) + 0xA282EAD8U);
    }
    file_.write(record);
  }

  /// Returns a path that is unique in the process; TensorBoard merges all files of a directory.
  static std::string make_path(const std::string& directory) {
    static std::atomic<int> files = 0;
    std::error_code error;
    std::filesystem::create_directories(directory, error);
    TORCH_CHECK(!error, "Cannot create directory ", directory, ": ", error.message());
    const auto seconds = static_cast<std::int64_t>(detail::wall_time_now());
    return directory + "/events.out.tfevents." + std::to_string(seconds) + ".mezzo." +
           std::to_string(detail::process_id()) + "." + std::to_string(files++);
  }

  detail::FlushedFile file_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
