#pragma once

#include <mezzo/base/version.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Where bytes go, in order; throws where they cannot.
using ByteSink = std::function<void(const void* data, std::size_t size)>;

/// Bytes that can be read from any place.
struct ByteSource {
  std::uint64_t size = 0;
  /// Fills `to` with `count` bytes from `offset` on, all of which lie within `size`, or throws.
  std::function<void(std::uint64_t offset, void* to, std::size_t count)> read;
};

/// `bytes` must outlive the source.
inline ByteSource source_of(const std::string& bytes) {
  return {bytes.size(), [&bytes](std::uint64_t offset, void* to, std::size_t count) {
            std::memcpy(to, bytes.data() + offset, count);
          }};
}

/// Numbers as they stand in a file: little-endian.
template <class Unsigned>
void append_number(std::string& to, Unsigned value) {
  for (std::size_t i = 0; i < sizeof(value); ++i) {
    to.push_back(static_cast<char>(static_cast<unsigned char>(value >> (8 * i))));
  }
}

template <class Unsigned>
Unsigned number_at(const char* bytes) {
  Unsigned value = 0;
  for (std::size_t i = 0; i < sizeof(value); ++i) {
    value |= static_cast<Unsigned>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  }
  return value;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
