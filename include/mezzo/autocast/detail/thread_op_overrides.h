/// \file
/// What autocast does in a thread: the op overrides that is in force, for guards and for the
/// kernels in front of ops, and which tensors are cast. The hot path of an overridden op reads only
/// this.
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

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The device types whose lists can be read and edited, in the order of per-device arrays.
inline constexpr std::array kAutocastDevices = {c10::DeviceType::CPU, c10::DeviceType::CUDA,
                                                c10::DeviceType::MPS};

inline std::size_t autocast_device_index(c10::DeviceType device) {
  const auto found = std::ranges::find(kAutocastDevices, device);
  TORCH_CHECK(found != kAutocastDevices.end(), "device: mezzo knows no op lists for ", device,
              "; use cpu, cuda or mps");
  return static_cast<std::size_t>(found - kAutocastDevices.begin());
}

inline c10::DispatchKey autocast_key(c10::DeviceType device) {
  constexpr std::array kKeys = {c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA,
                                c10::DispatchKey::AutocastMPS};
  return kKeys[autocast_device_index(device)];
}

/// An op as the OverrideRegistry knows it, for the life of the process.
struct RegisteredOp {
  std::string name;                        ///< with its overload
  std::atomic<bool> is_installed = false;  ///< install_op_overrides was called for it
  /// The cast policies that libtorch, or whoever registered the op's autocast kernels, gives it, by
  /// autocast_device_index, as far as somebody has asked for them.
  std::array<std::optional<CastPolicy>, kAutocastDevices.size()> registered{};
};

/// The edits of an OpOverrides.
struct OpOverrideMap {
  std::unordered_map<const RegisteredOp*, CastPolicy> cast_policies;

  std::optional<CastPolicy> find(const RegisteredOp& op) const {
    const auto found = cast_policies.find(&op);
    return found == cast_policies.end() ? std::nullopt : std::optional(found->second);
  }

  /// Returns the edits of both; `inner` wins where both edit an op.
  static std::shared_ptr<const OpOverrideMap> nest(
      const std::shared_ptr<const OpOverrideMap>& outer,
      const std::shared_ptr<const OpOverrideMap>& inner) {
    if (outer == nullptr || inner == nullptr || outer == inner) {
      return inner != nullptr ? inner : outer;
    }
    auto both = std::make_shared<OpOverrideMap>(*inner);
    both->cast_policies.insert(outer->cast_policies.begin(), outer->cast_policies.end());
    return both;
  }
};

/// The edits in force, by autocast_device_index. Copying the value hands a overrides to another
/// thread.
using ThreadOpOverrides = std::array<std::shared_ptr<const OpOverrideMap>, kAutocastDevices.size()>;

/// Returns this thread's policies: one object for each thread and version of mezzo. The symbol is
/// exported even from units compiled with hidden visibility, so shared libraries agree on it.
C10_EXPORT inline ThreadOpOverrides& thread_op_overrides() {
  static thread_local ThreadOpOverrides policies;
  return policies;
}

/// Whether autocast on `device` may cast this tensor.
inline bool is_eligible(const at::Tensor& tensor, c10::DeviceType device) {
  if (!tensor.defined() || !tensor.is_floating_point() || tensor.scalar_type() == at::kDouble) {
    return false;
  }
  if (device == c10::DeviceType::CUDA) return tensor.is_cuda() || tensor.is_xla();
  return tensor.device().type() == device;
}

/// The device whose autocast, enabled in this thread, may cast this tensor, if there is one.
inline std::optional<c10::DeviceType> eligible_autocast_device(const at::Tensor& tensor) {
  for (const auto device : kAutocastDevices) {
    if (is_eligible(tensor, device) && at::autocast::is_autocast_enabled(device)) {
      return device;
    }
  }
  return std::nullopt;
}

/// The dtype that holds every value of both; half and bfloat16 meet in float32.
inline at::ScalarType promote_type(std::optional<at::ScalarType> a, at::ScalarType b) {
  return !a.has_value() || *a == b ? b : at::ScalarType::Float;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
