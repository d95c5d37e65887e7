/// \file
/// Op overrides of a thread, which OverrideKernel reads, and which tensors autocast casts.
#pragma once

#include <mezzo/autocast/autocast_options.h>
#include <mezzo/autocast/cast_policy.h>
#include <mezzo/base/detail/autocast_mode.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/ScalarType.h>
#include <c10/macros/Export.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// One value for each device type.
template <class T>
using PerDeviceType = std::array<T, c10::COMPILE_TIME_MAX_DEVICE_TYPES>;

/// \throws c10::Error if libtorch has no autocast for `device`
inline void check_autocast_device(c10::DeviceType device) {
  if (has_autocast(device)) return;
  std::string supported;
  for (const auto& [type, key] : autocast_devices()) {
    supported += (supported.empty() ? "" : ", ") + c10::DeviceTypeName(type, /*lower_case=*/true);
  }
  TORCH_CHECK(false, "User specified an unsupported autocast device_type '",
              c10::DeviceTypeName(device, /*lower_case=*/true),
              "'; this libtorch has autocast for ", supported,
              "; use the device that the model is on, or do without autocast");
}

/// Returns the index of `device` in a PerDeviceType. \throws c10::Error as check_autocast_device
inline std::size_t autocast_device_index(c10::DeviceType device) {
  check_autocast_device(device);
  return static_cast<std::size_t>(device);
}

/// An op in the OverrideRegistry. Never destroyed.
struct RegisteredOp {
  std::string name;                        ///< with its overload
  std::atomic<bool> is_installed = false;  ///< install_op_overrides was called for it
  /// The cast policies of the registered autocast kernels, libtorch's or another library's, by
  /// autocast_device_index. Empty until requested.
  PerDeviceType<std::optional<CastPolicy>> registered_policies{};
};

/// The entries of OpOverrides.
struct OpOverrideMap {
  std::unordered_map<const RegisteredOp*, CastPolicy> cast_policies;

  std::optional<CastPolicy> find(const RegisteredOp& op) const {
    const auto found = cast_policies.find(&op);
    return found == cast_policies.end() ? std::nullopt : std::optional(found->second);
  }

  /// Returns the entries of both; `inner` takes precedence.
  static OpOverridesHandle merge(const OpOverridesHandle& outer, const OpOverridesHandle& inner) {
    if (outer == nullptr || inner == nullptr || outer == inner) {
      return inner != nullptr ? inner : outer;
    }
    auto merged = std::make_shared<OpOverrideMap>(*inner);
    merged->cast_policies.insert(outer->cast_policies.begin(), outer->cast_policies.end());
    return merged;
  }
};

/// The active overrides of a thread, by autocast_device_index. A copy can be passed to another
/// thread.
using ThreadOpOverrides = PerDeviceType<OpOverridesHandle>;

/// Returns this thread's overrides: one object per thread and version of mezzo. Exported also from
/// translation units with hidden visibility, so that shared libraries share it.
C10_EXPORT inline ThreadOpOverrides& thread_op_overrides() {
  static thread_local ThreadOpOverrides overrides;
  return overrides;
}

/// Returns whether autocast on `device` may cast this tensor: at::autocast::is_eligible.
inline bool is_eligible(const at::Tensor& tensor, c10::DeviceType device) {
  if (!tensor.defined() || !tensor.is_floating_point() || tensor.scalar_type() == at::kDouble) {
    return false;
  }
  if (device == c10::DeviceType::CUDA) return tensor.is_cuda() || tensor.is_xla();
  return tensor.device().type() == device;
}

/// Returns the device whose autocast is enabled in this thread and may cast this tensor.
inline std::optional<c10::DeviceType> eligible_autocast_device(const at::Tensor& tensor) {
  for (const auto& [device, key] : autocast_devices()) {
    if (is_eligible(tensor, device) && at::autocast::is_autocast_enabled(device)) return device;
  }
  return std::nullopt;
}

/// Returns the widest of two dtypes; float32 for float16 and bfloat16.
inline at::ScalarType promote_type(std::optional<at::ScalarType> a, at::ScalarType b) {
  return !a.has_value() || *a == b ? b : at::ScalarType::Float;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
