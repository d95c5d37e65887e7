#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <bit>
#include <cstdint>
#include <optional>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A tensor of one element on its way to the host. The copy overwrites a NaN that no arithmetic
/// makes, so its arrival shows without a question to the device.
class LateNumber {
 public:
  explicit LateNumber(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    TORCH_CHECK(tensor.numel() == 1, "Telemetry::record: loss has ", tensor.numel(),
                " elements; give its mean or sum");
    const at::Tensor number = tensor.detach().reshape({}).to(at::kFloat);
    if (number.is_cpu()) {
      value_ = number.item<float>();
      return;
    }
    const c10::InferenceMode no_inference(false);
    device_ = number.device();
    host_ = at::empty({}, at::TensorOptions(at::kFloat).pinned_memory(true));
    *host_.mutable_data_ptr<float>() = std::bit_cast<float>(kNotThere);
    host_.copy_(number, /*non_blocking=*/true);
  }

  bool ready() {
    if (!host_.defined()) return true;
    const std::atomic_ref<std::uint32_t> bits(*static_cast<std::uint32_t*>(host_.data_ptr()));
    return bits.load(std::memory_order_acquire) != kNotThere;
  }

  /// None of an undefined tensor. May wait for the device.
  std::optional<double> value() {
    if (host_.defined()) {
      if (!ready())
        c10::impl::VirtualGuardImpl(device_->type()).synchronizeDevice(device_->index());
      value_ = *host_.const_data_ptr<float>();
      host_ = at::Tensor();
    }
    return value_;
  }

 private:
  static constexpr std::uint32_t kNotThere = 0x7FC5EED5U;

  at::Tensor host_;
  std::optional<at::Device> device_;
  std::optional<double> value_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
