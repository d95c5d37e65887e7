/// \file
/// OverrideKernel, which mezzo puts in front of libtorch's autocast kernel of one op and device: it
/// looks up the thread's policy and weight cache, and where neither concerns the op it calls the
/// kernel that was there. And OverrideRegistry, which has the records of all ops and installs these
/// kernels. There is one registry for each version of mezzo. It is never destroyed: taking a kernel
/// out of the dispatcher while another thread calls the op crashes.
#pragma once

#include <mezzo/autocast/detail/eligible.h>
#include <mezzo/autocast/detail/in_force.h>
#include <mezzo/autocast/detail/libtorch_state.h>
#include <mezzo/autocast/detail/op_listener.h>
#include <mezzo/autocast/detail/op_policy/op_names.h>
#include <mezzo/autocast/detail/op_policy/probe.h>
#include <mezzo/autocast/op_category.h>
#include <mezzo/base/version.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/macros/Export.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns the widest dtype among the tensors that autocast may cast, or none if there is no such
/// tensor.
inline std::optional<at::ScalarType> widest_dtype(OpArguments arguments, c10::DeviceType device) {
  std::optional<at::ScalarType> widest;
  for_each_tensor(arguments, [&](const at::Tensor& tensor) {
    if (is_eligible(tensor, device)) {
      widest = widest.has_value() ? wider(*widest, tensor.scalar_type()) : tensor.scalar_type();
    }
  });
  return widest;
}

/// Returns the dtype that a category casts to, or none if it casts nothing.
inline std::optional<at::ScalarType> cast_target(OpCategory category, OpArguments arguments,
                                                 c10::DeviceType device) {
  switch (category) {
    case OpCategory::lower_precision:
      return at::autocast::get_autocast_dtype(device);
    case OpCategory::fp32:
      return at::ScalarType::Float;
    case OpCategory::promote:
      return widest_dtype(arguments, device);
    default:
      return std::nullopt;
  }
}

/// Casts the tensors in `argument`, by `cache` if it has an owner.
inline void cast_argument(c10::IValue& argument, at::ScalarType dtype, c10::DeviceType device,
                          ThreadCache& cache) {
  const auto cast = [&](const at::Tensor& tensor) {
    return cache.owner != nullptr && is_eligible(tensor, device) && tensor.scalar_type() != dtype
               ? cache.owner->lower(tensor, dtype, cache)
               : at::autocast::cached_cast(dtype, tensor, device);
  };
  if (argument.isTensor()) {
    const at::Tensor& tensor = argument.toTensor();
    if (tensor.defined() && tensor.scalar_type() != dtype) {
      argument = cast(tensor);
    }
  } else if (argument.isTensorList()) {
    auto tensors = argument.toTensorVector();
    std::transform(tensors.begin(), tensors.end(), tensors.begin(), cast);
    argument = std::move(tensors);
  } else if (argument.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const auto& tensor : argument.toOptionalTensorVector()) {
      tensors.push_back(tensor.has_value() ? std::optional(cast(*tensor)) : std::nullopt);
    }
    argument = std::move(tensors);
  }
}

/// Returns the index of the op's argument `ScalarType? dtype`, if it has one.
inline std::optional<std::size_t> optional_dtype_index(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "dtype" &&
        arguments[i].type()->kind() == c10::TypeKind::OptionalType) {
      return i;
    }
  }
  return std::nullopt;
}

/// Whether `longer` takes the arguments of `shorter`, in the same order, and a dtype at the end.
inline bool appends_dtype(const c10::FunctionSchema& shorter, const c10::FunctionSchema& longer) {
  const auto& ours = shorter.arguments();
  const auto& theirs = longer.arguments();
  if (theirs.size() != ours.size() + 1 || theirs.back().name() != "dtype") {
    return false;
  }
  return std::equal(ours.begin(), ours.end(), theirs.begin(), [](const auto& a, const auto& b) {
    return a.name() == b.name() && a.type()->isSubtypeOf(*b.type());
  });
}

/// Returns the overload that a fp32_append_dtype op is redirected to, if there is one.
inline std::optional<c10::OperatorHandle> overload_with_dtype(const c10::OperatorHandle& op) {
  for (auto& candidate : functional_overloads(op.operator_name().name)) {
    if (appends_dtype(op.schema(), candidate.schema())) {
      return candidate;
    }
  }
  return std::nullopt;
}

class OverrideKernel final : public c10::OperatorKernel {
 public:
  /// Takes over from whatever kernel `op` has now. `record` is the op's.
  OverrideKernel(const c10::OperatorHandle& op, c10::DeviceType device, const OpRecord& record)
      : record_(record),
        device_index_(policy_device_index(device)),
        device_(device),
        key_(autocast_key(device)),
        arity_(op.schema().arguments().size()),
        dtype_index_(optional_dtype_index(op.schema())),
        with_dtype_(overload_with_dtype(op)) {
    if (op.hasKernelForDispatchKey(key_)) {
      previous_.emplace(op.getComputedKernelForDispatchKey(key_));
    }
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
    const PolicyEdits* edits = thread_policies()[device_index_].get();
    const OpCategory registered = record_.registered[device_index_];
    const OpCategory category =
        edits == nullptr ? registered : edits->find(record_.slot).value_or(registered);
    if (category == registered && !casts_from_cache(category, keys)) {
      pass_on(op, keys, stack);
    } else if (category == OpCategory::fallthrough) {
      skip_autocast(op, keys, stack);
    } else {
      run(category, op, keys, stack);
    }
  }

 private:
  void pass_on(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) const {
    if (previous_.has_value()) {
      previous_->callBoxed(op, keys, stack);
    } else {
      skip_autocast(op, keys, stack);
    }
  }

  // Treats the op as one that is on no list: the ops that it is made of still meet autocast.
  void skip_autocast(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                     c10::Stack* stack) const {
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key_), stack);
  }

  /// Whether copies of weights replace casts: in a region with a WeightCache, for the ops that ask
  /// caches and for those that a policy allows. In a trace a copy would become a constant.
  bool casts_from_cache(OpCategory category, c10::DispatchKeySet keys) const {
    const bool asks =
        record_.asks_cache || record_.registered[device_index_] != OpCategory::lower_precision;
    return category == OpCategory::lower_precision && asks &&
           thread_caches()[device_index_].owner != nullptr && !keys.has(c10::DispatchKey::Tracer);
  }

  void run(OpCategory category, const c10::OperatorHandle& op, c10::DispatchKeySet keys,
           c10::Stack* stack) const {
    TORCH_CHECK(category != OpCategory::banned, full_name(op.operator_name()),
                " is banned under autocast by the op policy of this region; call it on float32 "
                "tensors where autocast is off, or lift the ban with OpPolicy::allow_banned");
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(key_);
    c10::IValue* arguments = stack->data() + (stack->size() - arity_);
    const OpArguments view(arguments, arity_);
    if (const auto dtype = cast_target(category, view, device_)) {
      ThreadCache none;
      ThreadCache& cache = casts_from_cache(category, keys) ? thread_caches()[device_index_] : none;
      std::for_each(arguments, arguments + arity_, [&](c10::IValue& argument) {
        cast_argument(argument, *dtype, device_, cache);
      });
    } else if (category == OpCategory::fp32_set_opt_dtype) {
      set_dtype(arguments);
    } else if (category == OpCategory::fp32_append_dtype) {
      stack->emplace_back(appended_dtype(arguments[0].toTensor()));
      with_dtype_->callBoxed(stack);
      return;
    }
    op.callBoxed(stack);
  }

  void set_dtype(c10::IValue* arguments) const {
    c10::IValue& dtype = arguments[*dtype_index_];
    if (dtype.isNone() && arguments[0].isTensor() &&
        is_eligible(arguments[0].toTensor(), device_)) {
      dtype = at::ScalarType::Float;
    }
  }

  at::ScalarType appended_dtype(const at::Tensor& first) const {
    return is_eligible(first, device_) ? at::ScalarType::Float : first.scalar_type();
  }

  const OpRecord& record_;
  std::size_t device_index_;
  c10::DeviceType device_;
  c10::DispatchKey key_;
  std::size_t arity_;
  std::optional<std::size_t> dtype_index_;
  std::optional<c10::OperatorHandle> with_dtype_;
  std::optional<c10::SafeKernelFunction> previous_;
};

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

/// Hidden, so that each library that holds mezzo has its own.
__attribute__((visibility("hidden"))) inline constexpr char kInThisLibrary = 0;

/// Keeps the library that holds this code loaded after its last dlclose: the dispatcher calls the
/// kernels for the life of the process. The program itself cannot be closed.
__attribute__((visibility("hidden"))) inline void keep_loaded() {
  Dl_info library;
  if (dladdr(&kInThisLibrary, &library) != 0) {
    dlopen(library.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
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
