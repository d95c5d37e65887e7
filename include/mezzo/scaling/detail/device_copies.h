#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A tensor and its copies on other devices, made when first asked for and dropped when the
/// original changes.
class DeviceCopies {
 public:
  DeviceCopies() = default;
  explicit DeviceCopies(at::Tensor original) : original_(std::move(original)) {}

  bool defined() const noexcept { return original_.defined(); }
  const at::Tensor& original() const noexcept { return original_; }

  /// Call it whenever the original's value has changed.
  void drop_copies() noexcept { copies_.clear(); }

  const at::Tensor& on(at::Device device) {
    if (device == original_.device()) return original_;
    for (const at::Tensor& copy : copies_) {
      if (copy.device() == device) return copy;
    }
    const bool non_blocking = !device.is_cpu();  // the host reads at once, the device in order
    return copies_.emplace_back(
        original_.to(device, original_.scalar_type(), non_blocking, /*copy=*/true));
  }

 private:
  at::Tensor original_;
  std::vector<at::Tensor> copies_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
