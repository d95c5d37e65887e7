/// \file
/// Lookup of operators by name; OverrideKernel, which mezzo registers in front of libtorch's
/// autocast kernel of an op and device; and OverrideRegistry, which installs these kernels.
#pragma once

#include <mezzo/autocast/cast_policy.h>
#include <mezzo/autocast/detail/autocast_kernel_probe.h>
#include <mezzo/autocast/detail/op_arguments.h>
#include <mezzo/autocast/detail/thread_op_overrides.h>
#include <mezzo/base/detail/autocast_mode.h>
#include <mezzo/base/detail/for_each_tensor.h>
#include <mezzo/base/detail/platform.h>
#include <mezzo/base/version.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/macros/Export.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns the operator named "aten::mm" or "aten::softmax.int", if it is registered.
inline std::optional<c10::OperatorHandle> find_op(const std::string& name) {
  const auto dot = name.find('.', name.find("::"));
  const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchema({name.substr(0, dot), overload});
}

/// Returns whether the schema declares that a result shares memory with an argument.
inline bool has_view_result(const c10::FunctionSchema& schema) {
  return std::ranges::any_of(schema.returns(),
                             [](const auto& result) { return result.alias_info() != nullptr; });
}

/// Returns the operator of a name with an overload, or all overloads of a name without one. Leaves
/// out ops that write into their arguments: a cast argument would be another tensor.
/// \throws c10::Error for a name that is not registered or has no functional op
inline std::vector<c10::OperatorHandle> find_ops(std::string_view name_or_overload) {
  const bool has_namespace = name_or_overload.find("::") != std::string_view::npos;
  const std::string name = (has_namespace ? "" : "aten::") + std::string(name_or_overload);
  std::vector<c10::OperatorHandle> ops;
  bool is_registered = false;
  for (const auto& op_name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (op_name.name != name && c10::toString(op_name) != name) continue;
    is_registered = true;
    const auto op = c10::Dispatcher::singleton().findSchema(op_name);
    if (op.has_value() && !op->schema().is_mutable()) ops.push_back(*op);
  }
  std::ranges::sort(ops, {}, [](const auto& op) { return op.operator_name().overload_name; });
  TORCH_CHECK(is_registered, "op: no operator \"", name,
              "\" is registered; mezzo::autocast_op_list(device) prints names; load another "
              "library's ops first");
  TORCH_CHECK(!ops.empty(), "op: ", name,
              " writes into its arguments, which autocast ignores; name the functional op, without "
              "the underscore or the out overload");
  return ops;
}

/// Returns the dtype that an op's inputs are cast to, or none if they are not cast.
inline std::optional<at::ScalarType> get_cast_dtype(CastPolicy policy, OpArguments arguments,
                                                    c10::DeviceType device) {
  switch (policy) {
    case CastPolicy::lower_precision_fp:
      return at::autocast::get_autocast_dtype(device);
    case CastPolicy::fp32:
      return at::ScalarType::Float;
    case CastPolicy::promote: {
      std::optional<at::ScalarType> promoted;
      for_each_tensor(arguments, [&](const at::Tensor& tensor) {
        if (is_eligible(tensor, device)) promoted = promote_type(promoted, tensor.scalar_type());
      });
      return promoted;
    }
    default:
      return std::nullopt;
  }
}

/// Replaces each tensor of an argument or result, also in lists, by `map(tensor)`.
template <class Map>
void replace_tensors(c10::IValue& value, const Map& map) {
  if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
    value = map_ivalue(value, map);
  }
}

/// Returns `result`, or a copy if it shares memory with an argument. An op such as dropout may
/// return its argument, here the cast copy: writes through it would be lost, or would change the
/// copy of a weight in libtorch's cache.
inline at::Tensor clone_if_alias(const at::Tensor& result,
                                 const std::vector<at::Tensor>& arguments) {
  const bool is_alias = result.defined() && result.has_storage() &&
                        std::ranges::any_of(arguments, [&](const at::Tensor& argument) {
                          return argument.has_storage() && argument.is_alias_of(result);
                        });
  return is_alias ? result.clone() : result;
}

/// Looks up the thread's overrides of an op; without any, calls the kernel that it replaced.
class OverrideKernel final : public c10::OperatorKernel {
 public:
  OverrideKernel(const c10::OperatorHandle& op, c10::DeviceType device,
                 const RegisteredOp& registered_op)
      : registered_op_(registered_op), device_(device), key_(autocast_key(device)) {
    if (op.hasKernelForDispatchKey(key_)) {
      previous_kernel_.emplace(op.getComputedKernelForDispatchKey(key_));
    }
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
    const OpOverrideMap* overrides = thread_op_overrides()[autocast_device_index(device_)].get();
    const auto policy = overrides == nullptr ? std::nullopt : overrides->find(registered_op_);
    if (!policy && previous_kernel_) {
      previous_kernel_->callBoxed(op, keys, stack);
    } else if (policy.value_or(CastPolicy::fallthrough) == CastPolicy::fallthrough) {
      // Without excluding the key: the ops that this op calls are still cast.
      op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key_), stack);
    } else {
      call_with_casts(*policy, op, stack);
    }
  }

 private:
  void call_with_casts(CastPolicy policy, const c10::OperatorHandle& op, c10::Stack* stack) const {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(key_);
    const std::size_t num_arguments = op.schema().arguments().size();
    c10::IValue* arguments = stack->data() + (stack->size() - num_arguments);
    const auto dtype = get_cast_dtype(policy, OpArguments(arguments, num_arguments), device_);
    if (dtype) {
      const auto cast = [&](const at::Tensor& tensor) {
        return at::autocast::cached_cast(*dtype, tensor, device_);
      };
      std::for_each(arguments, arguments + num_arguments,
                    [&](c10::IValue& argument) { replace_tensors(argument, cast); });
    }
    std::vector<at::Tensor> inputs;
    for_each_tensor(OpArguments(arguments, num_arguments), [&](const at::Tensor& tensor) {
      if (tensor.defined()) inputs.push_back(tensor);
    });
    op.callBoxed(stack);
    const auto num_results = static_cast<std::ptrdiff_t>(op.schema().returns().size());
    std::for_each(stack->end() - num_results, stack->end(), [&](c10::IValue& value) {
      replace_tensors(value,
                      [&](const at::Tensor& result) { return clone_if_alias(result, inputs); });
    });
  }

  const RegisteredOp& registered_op_;
  c10::DeviceType device_;
  c10::DispatchKey key_;
  std::optional<c10::SafeKernelFunction> previous_kernel_;
};

/// An address in this library: each library that includes mezzo has its own, since it is hidden.
MEZZO_HIDDEN inline constexpr char kLibraryAnchor = 0;
/// Keeps this library loaded: the dispatcher calls its kernels until the process ends.
MEZZO_HIDDEN inline void pin_this_library() { pin_library(&kLibraryAnchor); }

/// The ops that overrides name, and their installed kernels. Thread-safe. Never destroyed, and
/// kernels are never removed: removing one while another thread calls the op crashes.
class OverrideRegistry {
 public:
  /// Returns the entry of an op, created at the first call. Does not change the dispatcher.
  const RegisteredOp& get_op(const c10::OperatorHandle& op) {
    const std::lock_guard lock(mutex_);
    return find_or_create(op);
  }

  /// Returns the cast policy of the op's registered kernel. The first call probes the kernel, which
  /// takes tens of microseconds.
  CastPolicy get_registered_policy(const c10::OperatorHandle& op, c10::DeviceType device) {
    const std::lock_guard lock(mutex_);
    auto& policy = find_or_create(op).registered_policies[autocast_device_index(device)];
    if (!policy) {
      if (!op.hasKernelForDispatchKey(autocast_key(device))) return CastPolicy::fallthrough;
      policy = AutocastKernelProbe(op, device).cast_policy();
    }
    return *policy;
  }

  /// Registers a kernel for the op on each device, unless it was installed before.
  /// \throws c10::Error if the op is no longer registered
  void install(const RegisteredOp& op) {
    const auto handle = find_op(op.name);
    TORCH_CHECK(handle.has_value(), "op: ", op.name,
                " is no longer registered; keep the library that registered it loaded");
    const std::lock_guard lock(mutex_);
    RegisteredOp& registered_op = find_or_create(*handle);
    if (registered_op.is_installed) return;
    for (const auto& [device, key] : autocast_devices()) {
      if (!handle->hasKernelForDispatchKey(key)) {  // a probe would find mezzo's
        registered_op.registered_policies[autocast_device_index(device)] = CastPolicy::fallthrough;
      }
      auto kernel = c10::KernelFunction::makeFromBoxedFunctor(
          std::make_unique<OverrideKernel>(*handle, device, registered_op));
      const SuppressWarningsGuard no_warnings;  // the dispatcher warns about the first override
      handles_.push_back(c10::Dispatcher::singleton().registerImpl(
          handle->operator_name(), key, std::move(kernel), std::nullopt, nullptr,
          "override by mezzo::install_op_overrides"));
    }
    registered_op.is_installed = true;
  }

 private:
  RegisteredOp& find_or_create(const c10::OperatorHandle& op) {
    const auto [entry, is_new] = ops_.try_emplace(c10::toString(op.operator_name()));
    if (is_new) entry->second.name = entry->first;
    return entry->second;
  }

  std::mutex mutex_;
  std::map<std::string, RegisteredOp> ops_;  // kernels hold references to its values
  std::vector<c10::RegistrationHandleRAII> handles_;
};

/// Returns this version's registry. Exported for the reason given at thread_op_overrides.
C10_EXPORT inline OverrideRegistry& override_registry() {
  static OverrideRegistry& registry = *new OverrideRegistry;
  return registry;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
