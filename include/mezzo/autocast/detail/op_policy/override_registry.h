/// \file
/// Which ops mezzo overrides in this process, for op policies and for weight caches. One registry a
/// process, never destroyed: taking a kernel out of the dispatcher while another thread calls the
/// op crashes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/macros/Export.h>
#include <mezzo/autocast/detail/op_policy/builtin_lists.h>
#include <mezzo/autocast/detail/op_policy/category.h>
#include <mezzo/autocast/detail/op_policy/op_names.h>
#include <mezzo/autocast/detail/op_policy/override_kernel.h>
#include <mezzo/autocast/detail/op_policy/policy_edits.h>
#include <mezzo/autocast/detail/op_policy/silence.h>
#include <mezzo/base/version.h>

#include <array>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

class OverrideRegistry {
 public:
  /// The op's slot, with overrides in place on every device where `category` is not already what
  /// libtorch does.
  OpSlot prepare(const c10::OperatorHandle& op, OpCategory category) {
    const std::lock_guard lock(mutex_);
    const OpSlot slot = slot_of(op);
    for (const auto device : kPolicyDevices) {
      Entry& entry = entries_[slot];
      const std::size_t i = policy_device_index(device);
      if (!entry.overridden[i] && entry.registered[i] != category) {
        override_kernel(op, device, slot, entry.registered[i]);
        entry.overridden[i] = true;
      }
    }
    return slot;
  }

  /// What libtorch, or whoever registered it, does with the op where no policy speaks.
  OpCategory registered(const c10::OperatorHandle& op, c10::DeviceType device) {
    const std::lock_guard lock(mutex_);
    const auto found = slots_.find(full_name(op.operator_name()));
    return found == slots_.end() ? registered_category(op, device)
                                 : entries_[found->second].registered[policy_device_index(device)];
  }

  /// The op's slot if some policy ever named it.
  std::optional<OpSlot> find(const std::string& name) {
    const std::lock_guard lock(mutex_);
    const auto found = slots_.find(name);
    return found == slots_.end() ? std::nullopt : std::optional(found->second);
  }

  /// Puts a kernel that consults a weight cache in front of the op's, once a process, where the op
  /// is in libtorch's list of those to lower. `make` is given device and slot, and takes over from
  /// the kernel that is there.
  template <class Make>
  void cache_weights_of(const c10::OperatorHandle& op, Make make) {
    const std::lock_guard lock(mutex_);
    const OpSlot slot = slot_of(op);
    for (const auto device : kPolicyDevices) {
      Entry& entry = entries_[slot];
      const std::size_t i = policy_device_index(device);
      if (!entry.caching[i] && entry.registered[i] == OpCategory::lower_precision) {
        put_in_front(op, device, make(device, slot), "mezzo::WeightCache");
        entry.caching[i] = true;
      }
    }
  }

  std::string name(OpSlot slot) {
    const std::lock_guard lock(mutex_);
    return entries_[slot].name;
  }

 private:
  struct Entry {
    std::string name;
    std::array<OpCategory, kPolicyDevices.size()> registered;
    std::array<bool, kPolicyDevices.size()> overridden;  // by policies
    std::array<bool, kPolicyDevices.size()> caching;
  };

  OpSlot slot_of(const c10::OperatorHandle& op) {
    const std::string name = full_name(op.operator_name());
    if (const auto found = slots_.find(name); found != slots_.end()) {
      return found->second;
    }
    const OpSlot slot = entries_.size();
    entries_.push_back(
        {name,
         {registered_category(op, kPolicyDevices[0]), registered_category(op, kPolicyDevices[1])},
         {},
         {}});
    slots_.emplace(name, slot);
    return slot;
  }

  void override_kernel(const c10::OperatorHandle& op, c10::DeviceType device, OpSlot slot,
                       OpCategory registered) {
    auto kernel = c10::KernelFunction::makeFromBoxedFunctor(
        std::make_unique<OverrideKernel>(op, device, slot, registered));
    put_in_front(op, device, std::move(kernel), "mezzo::OpPolicy");
  }

  void put_in_front(const c10::OperatorHandle& op, c10::DeviceType device,
                    c10::KernelFunction kernel, const char* who) {
    const SilencedWarnings silenced;  // the dispatcher tells the terminal of the first override
    handles_.push_back(c10::Dispatcher::singleton().registerImpl(
        op.operator_name(), autocast_key(device), std::move(kernel), std::nullopt, nullptr, who));
  }

  std::mutex mutex_;
  std::unordered_map<std::string, OpSlot> slots_;
  std::deque<Entry> entries_;
  std::vector<c10::RegistrationHandleRAII> handles_;
};

/// The process's registry; exported for the reason given at thread_policies.
C10_EXPORT inline OverrideRegistry& override_registry() {
  static OverrideRegistry& registry = *new OverrideRegistry;
  return registry;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
