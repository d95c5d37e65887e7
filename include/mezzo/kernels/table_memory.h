#pragma once

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

/// Bytes that kernels read and their arguments have no room for, on a device. What lies there is
/// used again as long as it is the same, as it is where gradients keep their memory.
///
/// `capture` is the number of the capture into a graph that the device's current stream is part of;
/// 0: of none. A copy that a capture recorded is made when its graph is replayed, and only there:
/// nobody else may rely on it. Graphs read and copy the same memory at each replay; so what a
/// capture used stays as long as this.
class TableMemory {
 public:
  /// Where `bytes` are, for work that is put on the device's current stream before the next call
  /// of `begin_step`. Waits for nothing.
  const void* on(at::Device device, const std::vector<std::byte>& bytes, uint64_t capture) {
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    Copy& copy = copy_of(stream, bytes, capture);
    copy.is_used = true;
    copy.is_captured = copy.is_captured || capture != 0;
    return copy.there.const_data_ptr();
  }

  /// Before a step on `device`: forgets what the last one there had no use for, unless captured.
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
    uint64_t capture = 0;  // that recorded the copy, and did not make it
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
    const auto on_host = at::TensorOptions().dtype(at::kByte).device(at::kCPU);
    at::Tensor staged = at::empty({size}, on_host.pinned_memory(!device.is_cpu()));
    std::memcpy(staged.mutable_data_ptr(), bytes.data(), bytes.size());
    at::Tensor there = at::empty({size}, at::TensorOptions().dtype(at::kByte).device(device));
    there.copy_(staged, /*non_blocking=*/true);
    return copies_.emplace_back(Copy{stream, std::move(staged), std::move(there), capture});
  }

  std::vector<Copy> copies_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
