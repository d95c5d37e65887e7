/// \file
/// OpPolicy's members.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <mezzo/autocast/op_policy.h>

#include <algorithm>
#include <set>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline void check_category(const c10::OperatorHandle& op, OpCategory category) {
  const auto name = full_name(op.operator_name());
  TORCH_CHECK(category != OpCategory::unknown,
              "category: unknown says nothing; name a category for ", name);
  TORCH_CHECK(category != OpCategory::fp32_set_opt_dtype || optional_dtype_index(op.schema()),
              "category: ", name,
              " has no optional dtype argument for fp32_set_opt_dtype to set; use "
              "fp32");
  TORCH_CHECK(category != OpCategory::fp32_append_dtype || overload_with_dtype(op),
              "category: ", name,
              " has no overload with a dtype for fp32_append_dtype to call; use "
              "fp32");
}

}  // namespace detail

inline OpPolicy OpPolicy::set(std::string_view op, OpCategory category) const {
  auto edits = empty() ? std::make_shared<detail::PolicyEdits>()
                       : std::make_shared<detail::PolicyEdits>(*edits_);
  const auto ops = detail::find_ops(op);
  for (const auto& overload : ops) {  // all or nothing: check before the first override
    detail::check_category(overload, category);
  }
  for (const auto& overload : ops) {
    edits->set(detail::override_registry().prepare(overload, category), category);
  }
  return OpPolicy(std::move(edits));
}

inline OpPolicy OpPolicy::allow(std::string_view op) const {
  return set(op, OpCategory::lower_precision);
}

inline OpPolicy OpPolicy::deny(std::string_view op) const { return set(op, OpCategory::fp32); }

inline OpPolicy OpPolicy::promote(std::string_view op) const {
  return set(op, OpCategory::promote);
}

inline OpPolicy OpPolicy::ignore(std::string_view op) const {
  return set(op, OpCategory::fallthrough);
}

inline OpPolicy OpPolicy::allow_banned(std::string_view op) const {
  bool banned = false;
  for (const auto& overload : detail::find_ops(op)) {
    for (const auto device : detail::kPolicyDevices) {
      banned |= category(detail::full_name(overload.operator_name()), device) == OpCategory::banned;
    }
  }
  TORCH_CHECK(banned, "op: ", detail::qualified(op),
              " is banned on no device; to run it in float32 use deny");
  return set(op, OpCategory::fp32);
}

inline OpPolicy OpPolicy::with(const OpPolicy& other) const {
  return OpPolicy(detail::PolicyEdits::nest(edits_, other.edits_));
}

inline OpCategory OpPolicy::category(std::string_view op, c10::DeviceType device) const {
  const auto handle = detail::find_ops(op).front();
  const auto slot = detail::override_registry().find(detail::full_name(handle.operator_name()));
  const auto edit = slot && !empty() ? edits_->find(*slot) : std::nullopt;
  return edit.has_value() ? *edit : detail::override_registry().registered(handle, device);
}

inline std::vector<OpEntry> OpPolicy::edits() const {
  std::vector<OpEntry> entries;
  for (detail::OpSlot slot = 0; !empty() && slot < edits_->slots(); ++slot) {
    if (const auto category = edits_->find(slot)) {
      entries.push_back({detail::override_registry().name(slot), *category});
    }
  }
  std::sort(entries.begin(), entries.end(),
            [](const OpEntry& a, const OpEntry& b) { return a.name < b.name; });
  return entries;
}

inline OpPolicy OpPolicy::like(c10::DeviceType device) {
  const OpList wanted = autocast_op_lists(device);
  std::set<std::string> names;
  for (const auto each : detail::kPolicyDevices) {
    const OpList list = autocast_op_lists(each);
    for (const auto& entry : list.entries()) {
      names.insert(entry.name);
    }
  }
  OpPolicy policy;
  for (const auto& name : names) {
    const auto category = wanted.category(name);
    const bool differs = std::any_of(
        detail::kPolicyDevices.begin(), detail::kPolicyDevices.end(),
        [&](c10::DeviceType each) { return OpPolicy().category(name, each) != category; });
    if (differs && category != OpCategory::unknown) {
      policy = policy.set(name, category);
    }
  }
  return policy;
}

inline OpPolicy OpPolicy::cuda_like() { return like(c10::DeviceType::CUDA); }

inline OpPolicy OpPolicy::cpu_like() { return like(c10::DeviceType::CPU); }

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
