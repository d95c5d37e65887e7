#pragma once

#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/byte_stream.h>

#include <c10/core/Device.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>

// libtorch's archives to and from streams. No exception passes through libtorch's zip code, and a
// write that fails does not look so to it: its destructor goes on writing, and a second failure
// there ends the process. A failure is kept, the rest dropped, and the failure thrown when all is
// over.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline void write_archive(torch::serialize::OutputArchive& archive, const ByteSink& sink) {
  std::exception_ptr failure;
  const auto write = [&](const void* data, std::size_t size) -> std::size_t {
    try {
      if (!failure) sink(data, size);
    } catch (...) {
      failure = std::current_exception();
    }
    return size;
  };
  try {
    archive.save_to(write);
  } catch (...) {
    if (!failure) throw;
  }
  if (failure) std::rethrow_exception(failure);
}

inline void read_archive(torch::serialize::InputArchive& archive, const ByteSource& source,
                         std::optional<c10::Device> device) {
  std::exception_ptr failure;
  const auto read = [&](std::uint64_t offset, void* to, std::size_t count) -> std::size_t {
    if (failure || offset >= source.size) return 0;
    try {
      const auto there =
          static_cast<std::size_t>(std::min<std::uint64_t>(count, source.size - offset));
      source.read(offset, to, there);
      return there;
    } catch (...) {
      failure = std::current_exception();
      return 0;
    }
  };
  try {
    archive.load_from(
        read, [&] { return static_cast<std::size_t>(source.size); }, device);
  } catch (...) {
    if (!failure) throw;
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
