/// \file
/// Which op policy and which weight cache a thread's regions have in force: all that guards, and
/// the kernels in front of ops, need to know of either. The hot path of an overridden op reads only
/// this.
#pragma once

#include <mezzo/autocast/autocast_setting.h>
#include <mezzo/autocast/op_category.h>
#include <mezzo/base/version.h>

#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/ScalarType.h>
#include <c10/macros/Export.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace at {
class Tensor;
}

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

/// A thread-local T that is made at first use and never destroyed. The main thread destroys its
/// thread_locals before static objects: a guard with static lifetime reads and writes this one
/// afterwards. What guards put in they take out, so nothing is left in it when a thread ends.
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

/// What the OverrideRegistry knows of an op; it lives as long as the process.
struct OpRecord {
  std::string name;  ///< with its overload
  OpSlot slot;
  /// What libtorch, or whoever registered the op's autocast kernel, does with it. Arrays are by
  /// policy_device_index.
  std::array<OpCategory, kPolicyDevices.size()> registered;
  std::array<std::atomic<bool>, kPolicyDevices.size()> is_overridden{};  ///< for policies
  std::array<std::atomic<bool>, kPolicyDevices.size()> asks_cache{};     ///< for weight caches
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

/// What a policy consists of.
class PolicyEdits {
 public:
  struct Edit {
    const OpRecord* op = nullptr;  ///< none where the policy says nothing of the slot
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

  /// `inner`, and where it is silent `outer`.
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

/// The edits in force, by policy_device_index. A value: copying it hands a policy to another
/// thread.
using ThreadPolicies = std::array<std::shared_ptr<const PolicyEdits>, kPolicyDevices.size()>;

/// This thread's. One a thread, process and version of mezzo: the symbol is exported even from
/// units compiled with hidden visibility, so shared libraries agree on it.
C10_EXPORT inline ThreadPolicies& thread_policies() {
  static constinit thread_local NeverDestroyed<ThreadPolicies> policies;
  return policies.get();
}

/// Puts a policy in force for one device until the scope ends, on top of what is. Allocates only
/// where two policies nest.
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

/// What an op's argument is, as far as the op alone can tell.
enum class ArgumentRole : std::uint8_t {
  other,         ///< an activation: nothing to keep
  left_factor,   ///< of mm: an activation, or a weight if it requires grad
  right_factor,  ///< of mm: a weight, or an activation if it requires no grad
  weight,
};

/// Where casts of weights come from.
class WeightCasts {
 public:
  /// `tensor` in `dtype`, a held copy or a new one, with autograd's edge to `tensor`. The caller
  /// has excluded autocast, and `tensor` has another floating dtype. `since`: what `enter` gave.
  virtual at::Tensor lower(const at::Tensor& tensor, at::ScalarType dtype, ArgumentRole role,
                           std::uint64_t since) = 0;

  /// A thread begins to read from here in a region, and ends.
  virtual std::uint64_t enter() noexcept = 0;
  virtual void leave() noexcept = 0;

 protected:
  ~WeightCasts() = default;
};

/// What the handles of one WeightCache share. A function pointer where a virtual function would do:
/// g++ takes every class that it knows for the possible target of a virtual call, and would compile
/// the weight cache into each unit that has a region.
class CacheOwner {
 public:
  std::shared_ptr<WeightCasts> casts_of_this_thread() { return casts_of_this_thread_(*this); }

 protected:
  using CastsOfThisThread = std::shared_ptr<WeightCasts> (*)(CacheOwner&);

  explicit CacheOwner(CastsOfThisThread casts) : casts_of_this_thread_(casts) {}
  ~CacheOwner() = default;  // by who made it: a shared_ptr knows how

 private:
  CastsOfThisThread casts_of_this_thread_;
};

/// The cache in force for one device; none as a rule.
struct ThreadCache {
  std::shared_ptr<CacheOwner> owner;
  std::shared_ptr<WeightCasts> casts;
  std::uint64_t since = 0;
};

/// By policy_device_index.
using ThreadCaches = std::array<ThreadCache, kPolicyDevices.size()>;

/// This thread's; exported for the reason given at thread_policies, as the next two are.
C10_EXPORT inline ThreadCaches& thread_caches() {
  static constinit thread_local NeverDestroyed<ThreadCaches> caches;
  return caches.get();
}

/// Copies that this thread was given in place of a cast, ever; CastTrace takes differences.
C10_EXPORT inline std::int64_t& cache_hits() {
  static thread_local std::int64_t hits = 0;
  return hits;
}

/// Whether the ops that ask weight caches have their kernels in this process.
C10_EXPORT inline std::atomic<bool>& cache_ops_are_installed() {
  static constinit std::atomic<bool> are_installed = false;
  return are_installed;
}

/// Puts the cache of `owner`, or none, in the place of `current`.
inline void change_cache(ThreadCache& current, std::shared_ptr<CacheOwner> owner) noexcept {
  if (current.owner == owner) return;
  ThreadCache next;
  if (owner != nullptr) {
    next.casts = owner->casts_of_this_thread();
    next.since = next.casts->enter();
    next.owner = std::move(owner);
  }
  const ThreadCache left = std::exchange(current, std::move(next));
  if (left.casts != nullptr) left.casts->leave();
}

/// Puts a cache in force for one device until the scope ends, or, where casts are not to be kept,
/// none.
class CacheScope {
 public:
  CacheScope(c10::DeviceType device, const AutocastCache& cache) noexcept
      : device_(device),
        active_(is_policy_device(device) &&
                (!cache.weight_cache().empty() || !cache.enabled().value_or(true))) {
    if (active_) {
      outer_ = current().owner;
      change_cache(current(), cache.weight_cache().owner_);
    }
  }
  ~CacheScope() {
    if (active_) change_cache(current(), std::move(outer_));
  }
  CacheScope(const CacheScope&) = delete;
  CacheScope& operator=(const CacheScope&) = delete;

  static void check_installed(const AutocastCache& cache) {
    TORCH_CHECK(cache.weight_cache().empty() || cache_ops_are_installed(),
                "cache: the ops that would ask this WeightCache are not overridden in this "
                "process. Call mezzo::install_op_overrides(cache) once, before other threads run "
                "ops.");
  }

  /// Whether casts come from a WeightCache on any device, by this scope or one around it.
  static bool in_force() noexcept {
    const ThreadCaches& caches = thread_caches();
    return std::any_of(caches.begin(), caches.end(),
                       [](const ThreadCache& cache) { return cache.casts != nullptr; });
  }

 private:
  ThreadCache& current() const { return thread_caches()[policy_device_index(device_)]; }

  c10::DeviceType device_;
  bool active_;
  std::shared_ptr<CacheOwner> outer_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
