#pragma once

#include <mezzo/version.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// How many steps were applied to a parameter. Of a parameter on the CPU the host knows; elsewhere
/// the device decides whether a step is applied, and counts.
class StepCount {
 public:
  /// Waits for the device, where there is one.
  int64_t value() const { return on_device_.defined() ? on_device_.item<int64_t>() : value_; }

  void set(int64_t value) {
    value_ = value;
    on_device_ = at::Tensor();
  }

  /// From here on an int64 of one element on the device counts, which holds the value already.
  void move_to(at::Tensor on_device) { on_device_ = std::move(on_device); }
  const at::Tensor& on_device() const noexcept { return on_device_; }

 private:
  int64_t value_ = 0;
  at::Tensor on_device_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
