#pragma once

#include <mezzo/base/detail/capture.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Tables that are too large for a kernel's arguments, in device memory. A table is copied only if
/// its bytes have changed since the last step; they stay equal while gradients keep their memory.
///
/// `capture` is the number of the CUDA graph capture that the device's current stream is part of,
/// or 0. A copy recorded by a capture runs only when that graph is replayed, so no other work may
/// use its result. Replays read and write the same memory again; memory that a capture used is
/// therefore kept until the destructor.
class TableMemory {
 public:
  /// Returns the device address of a copy of `bytes`, valid for work that is put on the device's
  /// current stream before the next `begin_step`. Does not wait.
  const void* on(at::Device device, const std::vector<std::byte>& bytes, uint64_t capture) {
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    Copy& copy = copy_of(stream, bytes, capture);
    copy.is_used = true;
    copy.is_captured = copy.is_captured || capture != 0;
    return copy.there.const_data_ptr();
  }

  /// Call this before a step on `device`. Frees tables that the last step there did not use, except
  /// those of captures.
  void begin_step(at::Device device, uint64_t capture) {
    if (capture != 0) return;
    std::erase_if(copies_, [device](const Copy& copy) {
      return copy.stream.device() == device && !copy.is_used && !copy.is_captured;
    });
    for (Copy& copy : copies_) {
      if (copy.stream.device() == device) copy.is_used = false;
    }
  }

  std::size_t size() const noexcept { return copies_.size(); }

 private:
  struct Copy {
    c10::Stream stream;  // memory goes back to its stream: others must not read it
    at::Tensor staged;   // pinned, so that nothing waits for the copy
    at::Tensor there;
    uint64_t capture = 0;  // number of the capture that recorded the copy
    bool is_used = false;  // in the last step on the device, or the present one
    bool is_captured = false;
  };

  Copy& copy_of(const c10::Stream& stream, const std::vector<std::byte>& bytes, uint64_t capture) {
    for (Copy& copy : copies_) {
      const bool is_there = copy.capture == 0 || copy.capture == capture;
      const bool is_same =
          copy.stream == stream && is_there &&
          static_cast<std::size_t>(copy.staged.numel()) == bytes.size() &&
          std::memcmp(copy.staged.const_data_ptr(), bytes.data(), bytes.size()) == 0;
      if (is_same) return copy;
    }
    const at::Device device = stream.device();
    const auto size = static_cast<int64_t>(bytes.size());
    at::Tensor staged = empty_on_host({size}, at::kByte, device);
    std::memcpy(staged.mutable_data_ptr(), bytes.data(), bytes.size());
    at::Tensor there = at::empty({size}, at::TensorOptions().dtype(at::kByte).device(device));
    there.copy_(staged, /*non_blocking=*/true);
    return copies_.emplace_back(Copy{stream, std::move(staged), std::move(there), capture});
  }

  std::vector<Copy> copies_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
