/// \file
/// The lists as libtorch registered them, before any policy.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <mezzo/autocast/detail/op_policy/category.h>
#include <mezzo/autocast/detail/op_policy/op_names.h>
#include <mezzo/autocast/detail/op_policy/probe.h>
#include <mezzo/base/version.h>
#include <torch/version.h>

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR == 11
#include <mezzo/autocast/detail/op_policy/libtorch_2_11.h>
#define MEZZO_KNOWS_LIBTORCH_LISTS 1
#else
#define MEZZO_KNOWS_LIBTORCH_LISTS 0
#endif

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// What the table of this libtorch version says of the op, if there is a table and it lists the op.
inline std::optional<OpCategory> tabulated_category([[maybe_unused]] std::string_view name,
                                                    [[maybe_unused]] c10::DeviceType device) {
#if MEZZO_KNOWS_LIBTORCH_LISTS
  const auto find = [name](const auto& table) -> std::optional<OpCategory> {
    const auto* entry = std::find_if(table.begin(), table.end(),
                                     [name](const ListedOp& op) { return op.name == name; });
    return entry == table.end() ? std::nullopt : std::optional(entry->category);
  };
  return device == c10::DeviceType::CPU ? find(kCpuOpsOf2_11) : find(kCudaOpsOf2_11);
#else
  return std::nullopt;
#endif
}

#undef MEZZO_KNOWS_LIBTORCH_LISTS

/// The category of an op whose autocast kernel, if it has one, is not mezzo's.
inline OpCategory registered_category(const c10::OperatorHandle& op, c10::DeviceType device) {
  if (!op.hasKernelForDispatchKey(autocast_key(device))) {
    return OpCategory::fallthrough;
  }
  const auto tabulated = tabulated_category(full_name(op.operator_name()), device);
  return tabulated.has_value() ? *tabulated : Probe(op, device).category();
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
