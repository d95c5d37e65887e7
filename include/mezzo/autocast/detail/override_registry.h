/// \file
/// The dispatcher's operators by the names that a user writes. OverrideKernel, which mezzo puts in
/// front of libtorch's autocast kernel of one op and device: it looks up the thread's overrides,
/// and where that is silent it calls the kernel that was there. And OverrideRegistry, which has the
/// records of all ops and installs these kernels. There is one registry for each version of mezzo.
/// It is never destroyed: taking a kernel out of the dispatcher while another thread calls the op
/// crashes.
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

inline std::string to_full_name(const c10::OperatorName& name) { return c10::toString(name); }

/// Returns the name with its namespace: "aten::linear" for "linear".
inline std::string qualify_name(std::string_view name) {
  const bool has_namespace = name.find("::") != std::string_view::npos;
  return has_namespace ? std::string(name) : "aten::" + std::string(name);
}

/// Returns the operator of a full name, "aten::mm" or "aten::softmax.int", if it is registered.
inline std::optional<c10::OperatorHandle> find_op(const std::string& name) {
  const auto dot = name.find('.', name.find("::"));
  const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchema({name.substr(0, dot), overload});
}

/// Whether the op returns its results as new tensors. Autocast leaves ops that write into their
/// arguments alone: a cast argument would be another tensor than the caller's.
inline bool is_functional(const c10::OperatorHandle& op) { return !op.schema().is_mutable(); }

/// Whether the schema says that a result shares memory with an argument.
inline bool has_view_result(const c10::FunctionSchema& schema) {
  const auto& returns = schema.returns();
  return std::any_of(returns.begin(), returns.end(),
                     [](const auto& result) { return result.alias_info() != nullptr; });
}

/// Returns the operators that a name stands for: one when it has an overload, else all of its
/// overloads.
/// \throws c10::Error for a name that nobody registered, and for an op that writes into its
///   arguments
inline std::vector<c10::OperatorHandle> find_ops(std::string_view written) {
  const std::string name = qualify_name(written);
  std::vector<c10::OperatorHandle> ops;
  bool exists = false;
  for (const auto& op_name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (op_name.name != name && to_full_name(op_name) != name) continue;
    exists = true;
    const auto op = c10::Dispatcher::singleton().findSchema(op_name);
    if (op.has_value() && is_functional(*op)) ops.push_back(*op);
  }
  std::sort(ops.begin(), ops.end(), [](const auto& a, const auto& b) {
    return a.operator_name().overload_name < b.operator_name().overload_name;
  });
  TORCH_CHECK(exists, "op: no operator \"", name,
              "\" is registered; name it as mezzo::autocast_op_list(device) prints it, and load "
              "its library first if it is another's");
  TORCH_CHECK(!ops.empty(), "op: ", name,
              " writes into its arguments; autocast acts on functional ops only: name the op "
              "without the underscore, and not its out overload");
  return ops;
}

/// Returns the dtype that a cast overrides casts to, or none if it casts nothing.
inline std::optional<at::ScalarType> get_cast_dtype(CastPolicy cast_policy, OpArguments arguments,
                                                    c10::DeviceType device) {
  switch (cast_policy) {
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

/// Replaces each tensor of an argument or result, those in lists included, by `map(tensor)`.
template <class Map>
void replace_tensors(c10::IValue& value, const Map& map) {
  if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
    value = map_ivalue(value, map);
  }
}

/// Returns `result`, or a copy if it shares memory with one of `arguments`. An op such as dropout
/// returns its argument as it is, which behind a cast would be the cast copy: what is written
/// through it would be lost, or change the copy of a weight that libtorch's cache holds.
inline at::Tensor clone_if_alias(const at::Tensor& result,
                                 const std::vector<at::Tensor>& arguments) {
  const bool is_alias =
      result.defined() && result.has_storage() &&
      std::any_of(arguments.begin(), arguments.end(), [&](const at::Tensor& argument) {
        return argument.has_storage() && argument.is_alias_of(result);
      });
  return is_alias ? result.clone() : result;
}

class OverrideKernel final : public c10::OperatorKernel {
 public:
  /// Takes over from whatever kernel `op` has now. `record` is the op's.
  OverrideKernel(const c10::OperatorHandle& op, c10::DeviceType device, const RegisteredOp& record)
      : record_(record), device_(device), key_(autocast_key(device)) {
    if (op.hasKernelForDispatchKey(key_)) {
      previous_.emplace(op.getComputedKernelForDispatchKey(key_));
    }
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
    const OpOverrideMap* edits = thread_op_overrides()[autocast_device_index(device_)].get();
    const auto cast_policy = edits == nullptr ? std::nullopt : edits->find(record_);
    if (!cast_policy && previous_) {
      previous_->callBoxed(op, keys, stack);
    } else if (cast_policy.value_or(CastPolicy::fallthrough) == CastPolicy::fallthrough) {
      // The ops that this op is made of still meet autocast.
      op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key_), stack);
    } else {
      run(*cast_policy, op, stack);
    }
  }

 private:
  void run(CastPolicy cast_policy, const c10::OperatorHandle& op, c10::Stack* stack) const {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(key_);
    const std::size_t arity = op.schema().arguments().size();
    c10::IValue* arguments = stack->data() + (stack->size() - arity);
    const auto dtype = get_cast_dtype(cast_policy, OpArguments(arguments, arity), device_);
    if (dtype) {
      const auto cast = [&](const at::Tensor& tensor) {
        return at::autocast::cached_cast(*dtype, tensor, device_);
      };
      std::for_each(arguments, arguments + arity,
                    [&](c10::IValue& argument) { replace_tensors(argument, cast); });
    }
    std::vector<at::Tensor> given;
    for_each_tensor(OpArguments(arguments, arity), [&](const at::Tensor& tensor) {
      if (tensor.defined()) given.push_back(tensor);
    });
    op.callBoxed(stack);
    const auto results = static_cast<std::ptrdiff_t>(op.schema().returns().size());
    std::for_each(stack->end() - results, stack->end(), [&](c10::IValue& result) {
      replace_tensors(result, [&](const at::Tensor& one) { return clone_if_alias(one, given); });
    });
  }

  const RegisteredOp& record_;
  c10::DeviceType device_;
  c10::DispatchKey key_;
  std::optional<c10::SafeKernelFunction> previous_;
};

/// Hidden, so that each library that holds mezzo has its own.
MEZZO_HIDDEN inline constexpr char kLibraryAnchor = 0;
/// Hidden for the same reason. The dispatcher calls the kernels for the life of the process.
MEZZO_HIDDEN inline void pin_this_library() { pin_library(&kLibraryAnchor); }

class OverrideRegistry {
 public:
  /// Returns the op's record, and makes it first if there is none. Changes nothing in the
  /// dispatcher.
  const RegisteredOp& record(const c10::OperatorHandle& op) {
    const std::lock_guard lock(mutex_);
    return find_or_create(op);
  }

  /// Returns the op's cast overrides without a overrides, by libtorch or whoever registered the op.
  /// The first call probes the op's kernel, which takes some tens of microseconds.
  CastPolicy registered(const c10::OperatorHandle& op, c10::DeviceType device) {
    const std::lock_guard lock(mutex_);
    auto& cast_policy = find_or_create(op).registered[autocast_device_index(device)];
    if (!cast_policy) {
      if (!op.hasKernelForDispatchKey(autocast_key(device))) return CastPolicy::fallthrough;
      cast_policy = AutocastKernelProbe(op, device).cast_policy();
    }
    return *cast_policy;
  }

  /// Puts a kernel in front of the op on each device, once.
  /// \throws c10::Error if the op is gone
  void install(const RegisteredOp& op) {
    const auto handle = find_op(op.name);
    TORCH_CHECK(handle.has_value(), "op: ", op.name,
                " is no longer registered; keep the library loaded that registered it");
    const std::lock_guard lock(mutex_);
    RegisteredOp& record = find_or_create(*handle);
    if (record.is_installed) return;
    for (const auto device : kAutocastDevices) {
      if (!handle->hasKernelForDispatchKey(autocast_key(device))) {  // a probe would find mezzo's
        record.registered[autocast_device_index(device)] = CastPolicy::fallthrough;
      }
      auto kernel = c10::KernelFunction::makeFromBoxedFunctor(
          std::make_unique<OverrideKernel>(*handle, device, record));
      const SuppressWarningsGuard
          no_warnings;  // the dispatcher tells the terminal of the first override
      handles_.push_back(c10::Dispatcher::singleton().registerImpl(
          handle->operator_name(), autocast_key(device), std::move(kernel), std::nullopt, nullptr,
          "override by mezzo for op overrides"));
    }
    record.is_installed = true;
  }

 private:
  RegisteredOp& find_or_create(const c10::OperatorHandle& op) {
    const auto [entry, is_new] = records_.try_emplace(to_full_name(op.operator_name()));
    if (is_new) entry->second.name = entry->first;
    return entry->second;
  }

  std::mutex mutex_;
  std::map<std::string, RegisteredOp> records_;  // whose addresses the kernels have
  std::vector<c10::RegistrationHandleRAII> handles_;
};

/// Returns this version's registry. Exported for the reason given at thread_op_overrides.
C10_EXPORT inline OverrideRegistry& override_registry() {
  static OverrideRegistry& registry = *new OverrideRegistry;
  return registry;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
