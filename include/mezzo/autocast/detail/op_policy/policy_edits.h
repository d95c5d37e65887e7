/// \file
/// What a policy consists of, and which one this thread runs under. The hot path of an overridden
/// op reads only this.
#pragma once

#include <c10/macros/Export.h>
#include <mezzo/autocast/detail/never_destroyed.h>
#include <mezzo/autocast/detail/op_policy/category.h>
#include <mezzo/base/version.h>

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// An op's index among those that some policy ever named; see OverrideRegistry.
using OpSlot = std::size_t;

/// Category by slot; none where the policy says nothing.
class PolicyEdits {
 public:
  std::optional<OpCategory> find(OpSlot slot) const {
    return slot < by_slot_.size() ? by_slot_[slot] : std::nullopt;
  }

  void set(OpSlot slot, OpCategory category) {
    if (slot >= by_slot_.size()) {
      by_slot_.resize(slot + 1);
    }
    by_slot_[slot] = category;
  }

  std::size_t slots() const { return by_slot_.size(); }

  /// `inner`, and where it is silent `outer`.
  static std::shared_ptr<const PolicyEdits> nest(const std::shared_ptr<const PolicyEdits>& outer,
                                                 const std::shared_ptr<const PolicyEdits>& inner) {
    if (outer == nullptr || inner == nullptr || outer == inner) {
      return inner != nullptr ? inner : outer;
    }
    auto both = std::make_shared<PolicyEdits>(*outer);
    for (OpSlot slot = 0; slot < inner->slots(); ++slot) {
      if (const auto category = inner->find(slot)) {
        both->set(slot, *category);
      }
    }
    return both;
  }

 private:
  std::vector<std::optional<OpCategory>> by_slot_;
};

/// The edits in force, by policy_device_index. A value: copying it hands a policy to another
/// thread.
using ThreadPolicies = std::array<std::shared_ptr<const PolicyEdits>, kPolicyDevices.size()>;

/// This thread's. One a thread and process: the symbol is exported even from units compiled with
/// hidden visibility, so shared libraries agree on it.
C10_EXPORT inline ThreadPolicies& thread_policies() {
  static constinit thread_local NeverDestroyed<ThreadPolicies> policies;
  return policies.get();
}

}  // namespace detail

/// An OpPolicy as guards take it: it shares the policy's edits. An OpPolicy converts to it, so that
/// mezzo/autocast/autocast.h need not include op_policy.h, which takes four seconds to compile.
class PolicyRef {
 public:
  /// No policy: what surrounds the guard holds.
  PolicyRef() = default;
  explicit PolicyRef(std::shared_ptr<const detail::PolicyEdits> edits) noexcept
      : edits_(std::move(edits)) {}

  const std::shared_ptr<const detail::PolicyEdits>& edits() const noexcept { return edits_; }

 private:
  std::shared_ptr<const detail::PolicyEdits> edits_;
};

namespace detail {

/// Puts a policy in force for one device until the scope ends, on top of what is. Allocates only
/// where two policies nest.
class PolicyScope {
 public:
  PolicyScope(c10::DeviceType device, const PolicyRef& policy) noexcept
      : device_(device), active_(policy.edits() != nullptr) {
    if (active_) {
      auto& edits = thread_policies()[policy_device_index(device)];
      auto nested = PolicyEdits::nest(edits, policy.edits());
      outer_ = std::exchange(edits, std::move(nested));
    }
  }
  ~PolicyScope() {
    if (active_) {
      thread_policies()[policy_device_index(device_)] = std::move(outer_);
    }
  }
  PolicyScope(const PolicyScope&) = delete;
  PolicyScope& operator=(const PolicyScope&) = delete;

 private:
  c10::DeviceType device_;
  bool active_;
  std::shared_ptr<const PolicyEdits> outer_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
