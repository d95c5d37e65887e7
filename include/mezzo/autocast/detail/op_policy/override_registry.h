/// \file
/// The registry of the ops that mezzo has records of in this process, and of its kernels in front
/// of libtorch's. There is one for each version of mezzo. It is never destroyed: taking a kernel
/// out of the dispatcher while another thread calls the op crashes.
#pragma once

#include <mezzo/autocast/detail/in_force.h>
#include <mezzo/autocast/detail/op_policy/op_names.h>
#include <mezzo/autocast/detail/op_policy/override_kernel.h>
#include <mezzo/autocast/detail/op_policy/probe.h>
#include <mezzo/autocast/op_category.h>
#include <mezzo/base/version.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/macros/Export.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The words by which the dispatcher knows mezzo's kernels, followed by mezzo's namespace, which
/// says version and build. Other versions of mezzo read them in the dispatcher, the one place that
/// all of a process share.
inline constexpr std::string_view kOverrideBy = "override by mezzo::";
#define MEZZO_QUOTE(name) #name
#define MEZZO_QUOTE_NAME(name) MEZZO_QUOTE(name)
inline constexpr std::string_view kOwnVersion = MEZZO_QUOTE_NAME(MEZZO_ABI_NAMESPACE);
#undef MEZZO_QUOTE_NAME
#undef MEZZO_QUOTE

/// \throws c10::Error if another version of mezzo, or this one built otherwise, overrides the op:
///   neither knows the other's policies and caches, and one would be ignored
inline void check_no_other_mezzo_overrides(const c10::OperatorHandle& op) {
  const std::string kernels = op.dumpState();
  for (std::size_t at = kernels.find(kOverrideBy); at != std::string::npos;
       at = kernels.find(kOverrideBy, at + 1)) {
    const std::size_t begin = at + kOverrideBy.size();
    const std::string version = kernels.substr(begin, kernels.find(' ', begin) - begin);
    TORCH_CHECK(version == kOwnVersion, "install_op_overrides: ", full_name(op.operator_name()),
                " is overridden by mezzo ", version, " in this process, and this is mezzo ",
                kOwnVersion,
                "; build both libraries with one version of mezzo, alike with or without its CUDA "
                "kernels, or name other ops in one of the policies");
  }
}

class OverrideRegistry {
 public:
  /// Returns the op's record, and makes it first if there is none. Changes nothing in the
  /// dispatcher.
  const OpRecord& record(const c10::OperatorHandle& op) {
    const std::lock_guard lock(mutex_);
    return record_of(op);
  }

  /// Returns the op's record, or null if there is none yet.
  const OpRecord* find(const c10::OperatorHandle& op) {
    const std::lock_guard lock(mutex_);
    const auto found = slots_.find(full_name(op.operator_name()));
    return found == slots_.end() ? nullptr : &records_[found->second];
  }

  /// Returns the op's category without a policy, by libtorch or whoever registered the op.
  /// Remembers it where there is an autocast kernel: a probe takes some tens of microseconds.
  OpCategory registered(const c10::OperatorHandle& op, c10::DeviceType device) {
    const OpRecord* known = find(op);
    if (known == nullptr && !op.hasKernelForDispatchKey(autocast_key(device))) {
      return OpCategory::fallthrough;
    }
    return record(op).registered[policy_device_index(device)];
  }

  /// Lets policies give the op `category`: puts a kernel in front of it on every device where that
  /// is not already what libtorch does. check_no_other_mezzo_overrides comes before.
  /// \throws c10::Error if the op is gone
  void install(const OpRecord& op, OpCategory category) {
    const auto handle = find_op(op.name);
    TORCH_CHECK(handle.has_value(), "op: ", op.name,
                " is no longer registered; keep the library loaded that registered it");
    const std::lock_guard lock(mutex_);
    OpRecord& record = records_[op.slot];
    override_where(*handle, record,
                   [category](OpCategory registered) { return registered != category; });
    record.is_installed = true;
  }

  /// Lets the op ask weight caches, on every device where libtorch lowers it.
  void install_for_caches(const c10::OperatorHandle& op) {
    const std::lock_guard lock(mutex_);
    OpRecord& record = record_of(op);
    override_where(op, record,
                   [](OpCategory registered) { return registered == OpCategory::lower_precision; });
    record.asks_cache = true;
  }

 private:
  OpRecord& record_of(const c10::OperatorHandle& op) {
    std::string name = full_name(op.operator_name());
    if (const auto found = slots_.find(name); found != slots_.end()) {
      return records_[found->second];
    }
    OpRecord& record = records_.emplace_back();
    record.slot = records_.size() - 1;
    record.name = name;
    for (std::size_t i = 0; i < kPolicyDevices.size(); ++i) {
      record.registered[i] = registered_category(op, kPolicyDevices[i]);
    }
    slots_.emplace(std::move(name), record.slot);
    return record;
  }

  /// Puts an OverrideKernel in front of the op on each device where it has none and whose
  /// registered category is `wanted`.
  template <class Predicate>
  void override_where(const c10::OperatorHandle& op, OpRecord& record, Predicate wanted) {
    for (const auto device : kPolicyDevices) {
      const std::size_t i = policy_device_index(device);
      if (record.is_overridden[i] || !wanted(record.registered[i])) continue;
      auto kernel = c10::KernelFunction::makeFromBoxedFunctor(
          std::make_unique<OverrideKernel>(op, device, record));
      const SilencedWarnings silenced;  // the dispatcher tells the terminal of the first override
      handles_.push_back(c10::Dispatcher::singleton().registerImpl(
          op.operator_name(), autocast_key(device), std::move(kernel), std::nullopt, nullptr,
          c10::str(kOverrideBy, kOwnVersion, " for op policies and weight caches")));
      record.is_overridden[i] = true;
    }
  }

  std::mutex mutex_;
  std::unordered_map<std::string, OpSlot> slots_;
  std::deque<OpRecord> records_;
  std::vector<c10::RegistrationHandleRAII> handles_;
};

/// Returns this version's registry. Exported for the reason given at thread_policies.
C10_EXPORT inline OverrideRegistry& override_registry() {
  static OverrideRegistry& registry = *new OverrideRegistry;
  return registry;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
