// ATen ops of the emulated GPUs: CPU kernels, run from the queue.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "emulated_gpu.h"
#include "emulated_gpu_queue.h"

namespace emulated_gpu {
namespace {

using Stack = torch::jit::Stack;

/// Returns a non-owning CPU tensor of the same memory.
at::Tensor alias_of(const at::Tensor& tensor) {
  const auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  void* const data = const_cast<void*>(tensor.const_data_ptr());
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(data, tensor.sizes(), tensor.strides(), options);
}

void run_on_cpu(const c10::OperatorHandle& op, Stack& stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.callBoxed(&stack);
}

/// Calls `change` for each tensor argument of a call.
template <class Change>
void for_each_tensor(c10::IValue& value, const Change& change) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = change(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor.has_value() && tensor->defined() ? std::optional(change(*tensor))
                                                             : std::nullopt);
    }
    value = list;
  } else if (value.isDevice()) {
    value = c10::Device(c10::kCPU);
  }
}

/// A call with CPU arguments. Host scalars and indices are copied when the call is made.
Stack to_cpu_arguments(const c10::OperatorHandle& op, Stack arguments,
                       std::optional<c10::Device>& device) {
  for (c10::IValue& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (!tensor.is_privateuseone()) {
        const std::string& name = op.schema().name();
        if (tensor.dim() > 0 && name.find("aten::index") == name.npos) {
          throw CudaUsageError(name + " of tensors on the device and on the host");
        }
        return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : tensor.clone();
      }
      if (device.has_value() && *device != tensor.device() && tensor.dim() != 0) {
        throw CudaUsageError("an op of tensors on two devices");
      }
      device = tensor.device();
      return alias_of(tensor);
    });
  }
  return arguments;
}

/// Returns the metadata of the results of `op`, if it does not depend on values.
Stack infer_results(const c10::OperatorHandle& op, Stack arguments) {
  for (c10::IValue& argument : arguments) {
    for_each_tensor(argument, [](const at::Tensor& tensor) {
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
      return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options()).zero_();
    });
  }
  run_on_cpu(op, arguments);
  return arguments;
}

at::Tensor empty_like_on(const at::Tensor& shape, c10::Device device) {
  return at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(device));
}

/// Resizes empty tensors that `op` writes, such as `out=` arguments, to the shape of the result.
void resize_outputs(const c10::OperatorHandle& op, const Stack& arguments, const Stack& call,
                    c10::Device device) {
  std::vector<at::Tensor> empty;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto* const alias = op.schema().arguments()[i].alias_info();
    const bool is_written = alias != nullptr && alias->isWrite() && arguments[i].isTensor();
    if (is_written && arguments[i].toTensor().numel() == 0)
      empty.push_back(arguments[i].toTensor());
  }
  if (empty.empty()) return;
  auto output = empty.begin();
  for (const c10::IValue& shape : infer_results(op, call)) {
    if (output == empty.end() || shape.toTensor().numel() == 0) continue;
    const at::Tensor memory = empty_like_on(shape.toTensor(), device);
    (output++)->set_(memory.storage(), 0, memory.sizes(), memory.strides());
  }
}

/// Fallback for all ops without a kernel of the device.
void boxed_fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const std::size_t count = schema.arguments().size();
  const auto end = stack->end();
  Stack arguments(end - static_cast<std::ptrdiff_t>(count), end);
  torch::jit::drop(*stack, count);
  std::optional<c10::Device> device;
  Stack call = to_cpu_arguments(op, arguments, device);
  TORCH_CHECK(device.has_value(), schema.name(), " has no argument on an emulated GPU");
  const c10::Stream stream = current_stream(*device);
  bool returns_scalars = false;
  bool is_in_place = false;
  for (const auto& result : schema.returns()) {
    is_in_place = is_in_place || (result.alias_info() != nullptr && result.alias_info()->isWrite());
    returns_scalars = returns_scalars || !(result.type()->isSubtypeOf(*c10::TensorType::get()) ||
                                           result.type()->isSubtypeOf(*c10::ListType::ofTensors()));
  }
  if (returns_scalars) {
    wait_for(stream);
    const std::lock_guard lock(mutex());
    Stack now = call;
    run_on_cpu(op, now);
    for (c10::IValue& value : now) stack->push_back(std::move(value));
    return;
  }
  if (is_in_place) {
    resize_outputs(op, arguments, call, *device);
    call = to_cpu_arguments(op, arguments, device);
  }
  Stack fresh;
  std::vector<at::Tensor> results;
  if (!is_in_place && !schema.returns().empty()) {
    if (op.hasTag(at::Tag::dynamic_output_shape)) {  // CUDA synchronizes for these ops too
      wait_for(stream);
      fresh = call;
      run_on_cpu(op, fresh);
    } else {
      fresh = infer_results(op, call);
    }
    for (c10::IValue& value : fresh) {
      for_each_tensor(value, [&](const at::Tensor& shape) {
        at::Tensor tensor = empty_like_on(shape, *device);
        results.push_back(alias_of(tensor));
        return tensor;
      });
    }
  }
  enqueue(
      stream,
      [op, call, results] {
        Stack now = call;
        run_on_cpu(op, now);
        auto result = results.begin();
        if (result == results.end()) return;
        for (c10::IValue& value : now) {
          for_each_tensor(value,
                          [&](const at::Tensor& tensor) { return (result++)->copy_(tensor); });
        }
      },
      Kind::op);
  if (!is_in_place) {
    for (c10::IValue& value : fresh) stack->push_back(std::move(value));
    return;
  }
  for (std::size_t i = 0; i < count; ++i) {
    const auto* const alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) stack->push_back(arguments[i]);
  }
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
                 std::optional<bool> /*pin*/, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(emulated_gpu::device()));
  return at::detail::empty_generic(sizes, device_memory(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                         std::optional<at::Device> device, std::optional<bool> /*pin*/) {
  const c10::DeviceGuard guard(device.value_or(emulated_gpu::device()));
  return at::detail::empty_strided_generic(sizes, strides, device_memory(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(at::kFloat));
}

void copy_now(const at::Tensor& to, const at::Tensor& from) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  at::Tensor target = to;
  target.copy_(from);
}

void copy_from_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const c10::Stream stream = current_stream(to.device());
  const bool is_late = is_pinned(from.const_data_ptr());
  if (!is_late && capture_id_of(stream) != 0)
    throw CudaUsageError("a copy of pageable memory in a capture");
  const at::Tensor source = is_late ? alias_of(from) : from.clone();
  std::vector<const void*> pinned;
  if (is_late) pinned.push_back(from.const_data_ptr());
  enqueue(
      stream, [source, target = alias_of(to)] { copy_now(target, source); }, Kind::copy_from_host,
      pinned);
  if (!non_blocking) wait_for(stream);
}

void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const c10::Stream stream = current_stream(from.device());
  const bool is_late = non_blocking && is_pinned(to.const_data_ptr());
  if (!is_late && capture_id_of(stream) != 0)
    throw CudaUsageError("a copy to pageable memory in a capture");
  const auto copy = [source = alias_of(from), target = alias_of(to)] { copy_now(target, source); };
  std::vector<const void*> pinned;
  if (is_late) pinned.push_back(to.const_data_ptr());
  enqueue(stream, copy, Kind::copy_to_host, pinned);
  if (!is_late) wait_for(stream);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  if (from.is_cpu()) {
    copy_from_host(from.expand_as(to), to, non_blocking);
  } else if (to.is_cpu()) {
    copy_to_host(from.expand_as(to), to, non_blocking);
  } else {
    const c10::Stream stream = current_stream(from.device());
    const c10::Stream other = current_stream(to.device());
    if (stream != other) add_dependency(other, stream);
    enqueue(
        stream,
        [source = alias_of(from.expand_as(to)), target = alias_of(to)] {
          copy_now(target, source);
        },
        Kind::op);
    if (stream != other) add_dependency(stream, other);
  }
  return to;
}

void record_stream(at::Tensor& tensor, at::Stream stream) {
  record_use(tensor.storage().data_ptr(), stream);
}

/// Permits moving a module to the device in place.
bool has_compatible_type(const at::Tensor& self, const at::Tensor& from) {
  return self.layout() == at::kStrided && from.layout() == at::kStrided;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&boxed_fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  library.impl("record_stream", &record_stream);
  library.impl("_has_compatible_shallow_copy_type", &has_compatible_type);
}

}  // namespace
}  // namespace emulated_gpu
