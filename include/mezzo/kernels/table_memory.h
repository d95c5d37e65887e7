#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Bytes that kernels read and their arguments have no room for, on a device. What lies there is
/// used again as long as it is the same, as it is where gradients keep their memory.
class TableMemory {
 public:
  /// Where `bytes` are, for work that is put on the device's current stream before the next call
  /// of `begin_step`. Waits for nothing. `is_capturing`: that stream is being captured, into a
  /// graph that will read, and perhaps copy, the same memory again; then it stays as long as this.
  const void* on(at::Device device, const std::vector<std::byte>& bytes, bool is_capturing) {
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    Copy& copy = copy_of(stream, bytes);
    copy.last_use = step_;
    copy.is_captured = copy.is_captured || is_capturing;
    return copy.there.const_data_ptr();
  }

  /// Forgets what the last step had no use for; not while a stream is being captured.
  void begin_step(bool is_capturing) {
    if (!is_capturing) {
      const auto unused = [this](const Copy& copy) {
        return !copy.is_captured && copy.last_use != step_;
      };
      copies_.erase(std::remove_if(copies_.begin(), copies_.end(), unused), copies_.end());
    }
    ++step_;
  }

  std::size_t size() const noexcept { return copies_.size(); }

 private:
  struct Copy {
    c10::Stream stream;  // memory goes back to its stream: others must not read it
    at::Tensor staged;   // pinned, so that nothing waits for the copy
    at::Tensor there;
    int64_t last_use = 0;
    bool is_captured = false;
  };

  Copy& copy_of(const c10::Stream& stream, const std::vector<std::byte>& bytes) {
    for (Copy& copy : copies_) {
      const bool is_same =
          copy.stream == stream && static_cast<std::size_t>(copy.staged.numel()) == bytes.size() &&
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
    return copies_.emplace_back(Copy{stream, std::move(staged), std::move(there)});
  }

  std::vector<Copy> copies_;
  int64_t step_ = 0;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
