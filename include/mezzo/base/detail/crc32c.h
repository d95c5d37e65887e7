/// \file
/// CRC-32C, the checksum of checkpoints and TensorBoard event files.
#pragma once

#include <mezzo/base/version.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Slicing-by-8 tables: [k][byte] is the CRC of `byte` followed by k zero bytes.
inline constexpr auto kCrc32cTables = [] {
  std::array<std::array<std::uint32_t, 256>, 8> tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78U : 0U);
    tables[0][byte] = crc;
  }
  for (std::size_t k = 1; k < tables.size(); ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t previous = tables[k - 1][byte];
      tables[k][byte] = (previous >> 8) ^ tables[0][previous & 0xFF];
    }
  }
  return tables;
}();

/// Returns the CRC-32C (Castagnoli) of `data` appended to bytes whose CRC is `crc`.
inline std::uint32_t crc32c(const void* data, std::size_t size, std::uint32_t crc = 0) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  const auto& tables = kCrc32cTables;
  crc = ~crc;
  for (; size >= 8; size -= 8, bytes += 8) {
    crc = tables[7][bytes[0] ^ (crc & 0xFF)] ^ tables[6][bytes[1] ^ ((crc >> 8) & 0xFF)] ^
          tables[5][bytes[2] ^ ((crc >> 16) & 0xFF)] ^ tables[4][bytes[3] ^ (crc >> 24)] ^
          tables[3][bytes[4]] ^ tables[2][bytes[5]] ^ tables[1][bytes[6]] ^ tables[0][bytes[7]];
  }
  for (; size > 0; --size, ++bytes) crc = (crc >> 8) ^ tables[0][(crc ^ *bytes) & 0xFF];
  return ~crc;
}

/// Formats `crc` as eight hexadecimal digits.
inline std::string crc_to_hex(std::uint32_t crc) {
  std::string text;
  for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[(crc >> shift) & 15];
  return text;
}

inline std::string crc32c_hex(const void* data, std::size_t size) {
  return crc_to_hex(crc32c(data, size));
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
