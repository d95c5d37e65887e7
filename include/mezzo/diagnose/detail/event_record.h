/// \file
/// The few bytes of protocol buffers and TFRecord framing that a TensorBoard event file of scalars
/// is made of (tensorflow/core/util/event.proto, framework/summary.proto, lib/io/record_writer.cc).
#pragma once

#include <mezzo/base/version.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Table of CRC-32C (Castagnoli), reflected.
constexpr std::array<std::uint32_t, 256> crc32c_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1U) ^ ((crc & 1U) != 0 ? 0x82F63B78U : 0U);
    table[byte] = crc;
  }
  return table;
}

inline std::uint32_t crc32c(std::string_view bytes) {
  static constexpr auto kTable = crc32c_table();
  std::uint32_t crc = ~0U;
  for (const char c : bytes) {
    crc = (crc >> 8U) ^ kTable[(crc ^ static_cast<unsigned char>(c)) & 0xFFU];
  }
  return ~crc;
}

/// Little-endian, whatever the machine.
template <class Unsigned>
std::string fixed_bytes(Unsigned value) {
  std::string bytes;
  for (std::size_t i = 0; i < sizeof(value); ++i) {
    bytes += static_cast<char>(static_cast<unsigned char>(value >> (8 * i)));
  }
  return bytes;
}

inline std::string varint(std::uint64_t value) {
  std::string bytes;
  for (; value >= 0x80U; value >>= 7U) bytes += static_cast<char>(0x80U | (value & 0x7FU));
  return bytes + static_cast<char>(value);
}

enum class WireType : std::uint8_t { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };

inline std::string field_key(std::uint32_t number, WireType type) {
  return varint((number << 3U) | static_cast<std::uint32_t>(type));
}

inline std::string bytes_field(std::uint32_t number, std::string_view bytes) {
  return field_key(number, WireType::bytes) + varint(bytes.size()) + std::string(bytes);
}

/// The sum that stands in a file, so that sums of data that holds sums are not weak.
inline std::string masked_crc(std::string_view bytes) {
  return fixed_bytes(std::rotr(crc32c(bytes), 15) + 0xA282EAD8U);
}

/// `message` as a TFRecord.
inline std::string framed(std::string_view message) {
  const std::string length = fixed_bytes(static_cast<std::uint64_t>(message.size()));
  return length + masked_crc(length) + std::string(message) + masked_crc(message);
}

inline std::string event_wall_time(double seconds) {
  return field_key(1, WireType::fixed64) + fixed_bytes(std::bit_cast<std::uint64_t>(seconds));
}

/// The record that every event file begins with.
inline std::string event_file_header(double wall_time) {
  return framed(event_wall_time(wall_time) + bytes_field(3, "brain.Event:2"));
}

/// The scalars of one step.
class EventSummary {
 public:
  void add(std::string_view tag, float value) {
    values_ += bytes_field(1, bytes_field(1, tag) + field_key(2, WireType::fixed32) +
                                  fixed_bytes(std::bit_cast<std::uint32_t>(value)));
  }

  std::string record(double wall_time, std::int64_t step) const {
    return framed(event_wall_time(wall_time) + field_key(2, WireType::varint) +
                  varint(static_cast<std::uint64_t>(step)) + bytes_field(5, values_));
  }

 private:
  std::string values_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
