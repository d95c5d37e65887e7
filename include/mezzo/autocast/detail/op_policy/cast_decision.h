/// \file
/// What autocast and the thread's policy do with a call; explain and CastTrace ask it.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>
#include <mezzo/autocast/detail/libtorch_state.h>
#include <mezzo/autocast/detail/op_policy/override_kernel.h>
#include <mezzo/autocast/detail/op_policy/override_registry.h>
#include <mezzo/base/version.h>

#include <optional>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

struct DecidedCategory {
  OpCategory category;
  bool by_policy;
};

inline DecidedCategory decided_category(const c10::OperatorHandle& op, c10::DeviceType device) {
  const auto& edits = thread_policies()[policy_device_index(device)];
  if (edits != nullptr) {
    const auto slot = override_registry().find(full_name(op.operator_name()));
    if (const auto edit = slot ? edits->find(*slot) : std::nullopt) {
      return {*edit, true};
    }
  }
  return {override_registry().registered(op, device), false};
}

inline std::vector<at::ScalarType> tensor_dtypes(c10::ArrayRef<const c10::IValue> arguments) {
  std::vector<at::ScalarType> dtypes;
  for_each_tensor(arguments, [&](const at::Tensor& tensor) {
    if (tensor.defined()) {
      dtypes.push_back(tensor.scalar_type());
    }
  });
  return dtypes;
}

/// The device of the first tensor that has one.
inline std::optional<c10::DeviceType> first_device(c10::ArrayRef<const c10::IValue> arguments) {
  std::optional<c10::DeviceType> device;
  for_each_tensor(arguments, [&](const at::Tensor& tensor) {
    if (!device.has_value() && tensor.defined()) {
      device = tensor.device().type();
    }
  });
  return device;
}

/// Whether a category's dtype argument takes effect: the first tensor decides.
inline bool first_is_eligible(c10::ArrayRef<const c10::IValue> arguments, c10::DeviceType device) {
  return !arguments.empty() && arguments[0].isTensor() &&
         is_eligible(arguments[0].toTensor(), device);
}

/// The dtype that the op computes in once its category has been applied; Undefined without tensors.
inline at::ScalarType dtype_after_casts(OpCategory category,
                                        c10::ArrayRef<const c10::IValue> arguments,
                                        c10::DeviceType device) {
  const bool sets_dtype =
      category == OpCategory::fp32_set_opt_dtype || category == OpCategory::fp32_append_dtype;
  if (sets_dtype && first_is_eligible(arguments, device)) {
    return at::ScalarType::Float;
  }
  const auto target = cast_target(category, arguments, device);
  auto dtype = at::ScalarType::Undefined;
  for_each_tensor(arguments, [&](const at::Tensor& tensor) {
    if (!tensor.defined()) {
      return;
    }
    const bool cast = target.has_value() && is_eligible(tensor, device);
    const auto own = cast ? *target : tensor.scalar_type();
    dtype = dtype == at::ScalarType::Undefined ? own : c10::promoteTypes(dtype, own);
  });
  return dtype;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
