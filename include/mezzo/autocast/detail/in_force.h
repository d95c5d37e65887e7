/// \file
/// The op policy that is in force in a thread, for guards and for the kernels in front of ops. The
/// hot path of an overridden op reads only this.
#pragma once

#include <mezzo/autocast/autocast_setting.h>
#include <mezzo/autocast/op_category.h>
#include <mezzo/base/version.h>

#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>
#include <c10/macros/Export.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The device types whose lists can be read and edited, in the order of per-device arrays.
inline constexpr std::array<c10::DeviceType, 2> kPolicyDevices = {c10::DeviceType::CPU,
                                                                  c10::DeviceType::CUDA};

inline constexpr bool is_policy_device(c10::DeviceType device) {
  return device == c10::DeviceType::CPU || device == c10::DeviceType::CUDA;
}

inline std::size_t policy_device_index(c10::DeviceType device) {
  TORCH_CHECK(is_policy_device(device), "device: mezzo knows no op lists for ", device,
              "; use cpu or cuda");
  return device == c10::DeviceType::CPU ? 0 : 1;
}

inline c10::DispatchKey autocast_key(c10::DeviceType device) {
  return policy_device_index(device) == 0 ? c10::DispatchKey::AutocastCPU
                                          : c10::DispatchKey::AutocastCUDA;
}

/// A thread-local T that is made at first use and never destroyed: a guard with static lifetime
/// uses it after the main thread has destroyed its thread_locals. Guards take out what they put in,
/// so nothing is left in it when a thread ends.
template <class T>
class NeverDestroyed {
 public:
  T& get() {
    if (value_ == nullptr) value_ = ::new (static_cast<void*>(memory_)) T();
    return *value_;
  }

 private:
  T* value_ = nullptr;
  alignas(T) std::byte memory_[sizeof(T)] = {};
};

/// An op's index in the OverrideRegistry.
using OpSlot = std::size_t;

/// An op as the OverrideRegistry knows it, for the life of the process. Arrays are indexed by
/// policy_device_index.
struct OpRecord {
  std::string name;  ///< with its overload
  OpSlot slot;
  /// The category that libtorch, or whoever registered the op's autocast kernel, gives it.
  std::array<OpCategory, kPolicyDevices.size()> registered;
  std::array<std::atomic<bool>, kPolicyDevices.size()> is_overridden{};  ///< has an OverrideKernel
  std::atomic<bool> is_installed = false;  ///< install_op_overrides was called for it

  /// Whether a policy that gives the op this category acts on the device.
  bool serves(OpCategory category, std::size_t device) const {
    return is_installed && (registered[device] == category || is_overridden[device]);
  }
  bool serves_everywhere(OpCategory category) const {
    for (std::size_t i = 0; i < kPolicyDevices.size(); ++i) {
      if (!serves(category, i)) return false;
    }
    return true;
  }
};

/// The edits of an OpPolicy, by op.
class PolicyEdits {
 public:
  struct Edit {
    const OpRecord* op = nullptr;  ///< null where the policy has no edit of the slot's op
    OpCategory category = OpCategory::unknown;
  };

  std::optional<OpCategory> find(OpSlot slot) const {
    const bool says = slot < by_slot_.size() && by_slot_[slot].op != nullptr;
    return says ? std::optional(by_slot_[slot].category) : std::nullopt;
  }

  void set(const OpRecord& op, OpCategory category) {
    if (op.slot >= by_slot_.size()) by_slot_.resize(op.slot + 1);
    by_slot_[op.slot] = {&op, category};
  }

  template <class Visit>
  void for_each(Visit visit) const {
    for (const Edit& edit : by_slot_) {
      if (edit.op != nullptr) visit(edit);
    }
  }

  /// Returns the edits of both; `inner` wins where both edit an op.
  static std::shared_ptr<const PolicyEdits> nest(const std::shared_ptr<const PolicyEdits>& outer,
                                                 const std::shared_ptr<const PolicyEdits>& inner) {
    if (outer == nullptr || inner == nullptr || outer == inner) {
      return inner != nullptr ? inner : outer;
    }
    auto both = std::make_shared<PolicyEdits>(*outer);
    inner->for_each([&both](const Edit& edit) { both->set(*edit.op, edit.category); });
    return both;
  }

 private:
  std::vector<Edit> by_slot_;
};

/// The edits in force, by policy_device_index. Copying the value hands a policy to another thread.
using ThreadPolicies = std::array<std::shared_ptr<const PolicyEdits>, kPolicyDevices.size()>;

/// Returns this thread's policies: one object for each thread and version of mezzo. The symbol is
/// exported even from units compiled with hidden visibility, so shared libraries agree on it.
C10_EXPORT inline ThreadPolicies& thread_policies() {
  static constinit thread_local NeverDestroyed<ThreadPolicies> policies;
  return policies.get();
}

/// Puts a policy in force for one device until the scope ends, on top of the one in force.
/// Allocates only where two policies nest.
class PolicyScope {
 public:
  PolicyScope(c10::DeviceType device, const PolicyRef& policy) noexcept
      : device_(device), active_(!policy.empty()) {
    if (active_) {
      auto& edits = thread_policies()[policy_device_index(device)];
      auto nested = PolicyEdits::nest(edits, policy.edits_);
      outer_ = std::exchange(edits, std::move(nested));
    }
  }
  ~PolicyScope() {
    if (active_) thread_policies()[policy_device_index(device_)] = std::move(outer_);
  }
  PolicyScope(const PolicyScope&) = delete;
  PolicyScope& operator=(const PolicyScope&) = delete;

  static void check_installed(c10::DeviceType device, const PolicyRef& policy) {
    if (policy.empty()) return;
    policy.edits_->for_each([device](const PolicyEdits::Edit& edit) {
      TORCH_CHECK(edit.op->serves(edit.category, policy_device_index(device)), "policy: it makes ",
                  edit.op->name, " ", to_string(edit.category),
                  ", and mezzo's override of that op is not installed in this process. Call "
                  "mezzo::install_op_overrides(policy) once, before other threads run ops.");
    });
  }

 private:
  c10::DeviceType device_;
  bool active_;
  std::shared_ptr<const PolicyEdits> outer_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
