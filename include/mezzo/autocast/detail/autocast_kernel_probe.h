/// \file
/// AutocastKernelProbe: determines the cast policy of a registered autocast kernel by calling it.
#pragma once

#include <mezzo/autocast/autocast_options.h>
#include <mezzo/autocast/cast_policy.h>
#include <mezzo/autocast/detail/op_arguments.h>
#include <mezzo/autocast/detail/thread_op_overrides.h>
#include <mezzo/base/detail/autocast_mode.h>
#include <mezzo/base/version.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/record_function.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Guard that suppresses this thread's warnings.
class SuppressWarningsGuard {
 public:
  SuppressWarningsGuard() : guard_(&handler_) {}

 private:
  struct DiscardingHandler final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };

  DiscardingHandler handler_;
  c10::WarningUtils::WarningHandlerGuard guard_;
};

/// A tensor with a dtype and a device. Autocast kernels read no more before they cast or
/// redispatch. Any access to shape or memory throws, so no op runs and no GPU is needed.
class ShapelessTensorImpl final : public c10::TensorImpl {
 public:
  ShapelessTensorImpl(c10::DeviceType device, at::ScalarType dtype)
      : TensorImpl(c10::DispatchKeySet(), c10::scalarTypeToTypeMeta(dtype),
                   c10::Device(device, device == c10::DeviceType::CPU ? c10::DeviceIndex{-1}
                                                                      : c10::DeviceIndex{0})) {
    set_custom_sizes_strides(SizesStridesPolicy::CustomSizes);
    set_storage_access_should_throw();
  }

 protected:
  c10::IntArrayRef sizes_custom() const override { throw_no_shape(); }
  c10::IntArrayRef strides_custom() const override { throw_no_shape(); }
  c10::SymIntArrayRef sym_sizes_custom() const override { throw_no_shape(); }
  c10::SymIntArrayRef sym_strides_custom() const override { throw_no_shape(); }
  c10::SymInt sym_numel_custom() const override { throw_no_shape(); }
  int64_t size_custom(int64_t) const override { throw_no_shape(); }
  int64_t dim_custom() const override { throw_no_shape(); }
  int64_t numel_custom() const override { throw_no_shape(); }

 private:
  [[noreturn]] static void throw_no_shape() {
    TORCH_CHECK(false, "a tensor of AutocastKernelProbe has no shape");
  }
};

/// Returns a value of this type, with tensors from `make_tensor()`; none for a type that no op with
/// an autocast kernel has.
template <class MakeTensor>
std::optional<c10::IValue> make_probe_value(const c10::Type& type, MakeTensor& make_tensor) {
  switch (type.kind()) {
    case c10::TypeKind::TensorType:
      return make_tensor();
    case c10::TypeKind::ListType: {
      const c10::TypePtr& element = type.castRaw<c10::ListType>()->getElementType();
      if (element->kind() == c10::TypeKind::OptionalType) {
        return c10::List<std::optional<at::Tensor>>({make_tensor()});
      }
      c10::impl::GenericList list(element->kind() == c10::TypeKind::SymIntType
                                      ? c10::TypePtr(c10::IntType::get())
                                      : element);
      for (int i = 0; i < (element->kind() == c10::TypeKind::TensorType ? 2 : 1); ++i) {
        const auto value = make_probe_value(*element, make_tensor);
        if (!value) return std::nullopt;
        list.push_back(*value);
      }
      return list;
    }
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
    case c10::TypeKind::NumberType:
      return 1;
    case c10::TypeKind::FloatType:
      return 1.0;
    case c10::TypeKind::BoolType:
      return false;
    case c10::TypeKind::StringType:  // a Dimname is a string with a namespace
      return "dimname::probe";
    case c10::TypeKind::OptionalType:
      return c10::IValue();
    default:
      return std::nullopt;
  }
}

/// An op that an autocast kernel called: a cast, or the op itself.
struct RecordedOp {
  std::string name;
  std::string overload;
  std::vector<c10::IValue> inputs;

  bool is_cast_to(at::ScalarType dtype) const {
    return (name == "aten::to" || name == "aten::_to_copy") && inputs.size() > 1 &&
           inputs[1].isInt() && inputs[1].toScalarType() == dtype;
  }
};

/// Records the first op that this thread calls. Other thread-local callbacks, such as a profiler's,
/// are not called meanwhile.
class FirstOpRecorder {
 public:
  FirstOpRecorder() : prev_recorder_(std::exchange(active_recorder(), this)) {
    at::set_record_function_tls_({});
    at::addThreadLocalCallback(at::RecordFunctionCallback(&FirstOpRecorder::start)
                                   .needsInputs(true)
                                   .scopes({at::RecordScope::FUNCTION}));
  }
  ~FirstOpRecorder() {
    at::set_record_function_tls_(prev_callbacks_);
    active_recorder() = prev_recorder_;
  }
  FirstOpRecorder(const FirstOpRecorder&) = delete;
  FirstOpRecorder& operator=(const FirstOpRecorder&) = delete;

  const std::optional<RecordedOp>& op() const { return op_; }

 private:
  static FirstOpRecorder*& active_recorder() {
    static thread_local FirstOpRecorder* active = nullptr;
    return active;
  }

  static std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& function) {
    if (active_recorder() != nullptr && !active_recorder()->op_.has_value()) {
      const auto inputs = get_recorded_inputs(function);
      active_recorder()->op_ = RecordedOp{function.name(), function.overload_name(),
                                          std::vector<c10::IValue>(inputs.begin(), inputs.end())};
    }
    return nullptr;
  }

  FirstOpRecorder* prev_recorder_;
  at::RecordFunctionTLS prev_callbacks_ = at::get_record_function_tls_();
  std::optional<RecordedOp> op_;
};

/// Probes the autocast kernel of one op and device. Clears the thread's overrides meanwhile, so
/// that an OverrideKernel in front calls that kernel.
class AutocastKernelProbe {
 public:
  AutocastKernelProbe(const c10::OperatorHandle& op, c10::DeviceType device)
      : op_(op), device_(device), prev_dtype_(at::autocast::get_autocast_dtype(device)) {
    at::autocast::set_autocast_dtype(device, lower_precision_dtype_);
  }
  ~AutocastKernelProbe() {
    at::autocast::set_autocast_dtype(device_, prev_dtype_);
    thread_op_overrides() = std::move(prev_op_overrides_);
  }
  AutocastKernelProbe(const AutocastKernelProbe&) = delete;
  AutocastKernelProbe& operator=(const AutocastKernelProbe&) = delete;

  CastPolicy cast_policy() {
    const auto all_float = run(at::kFloat, at::kFloat);
    if (all_float.has_value() && all_float->is_cast_to(lower_precision_dtype_)) {
      return CastPolicy::lower_precision_fp;
    }
    const auto all_lower = run(lower_precision_dtype_, lower_precision_dtype_);
    if (all_lower.has_value() && all_lower->is_cast_to(at::kFloat)) {
      return CastPolicy::fp32;
    }
    if (all_lower.has_value() && all_lower->name == op_.operator_name().name &&
        has_float_dtype_argument(*all_lower)) {
      return all_lower->overload == op_.operator_name().overload_name
                 ? CastPolicy::fp32_set_opt_dtype
                 : CastPolicy::fp32_append_dtype;
    }
    const auto mixed = run(lower_precision_dtype_, at::kFloat);
    if (mixed.has_value() && mixed->is_cast_to(at::kFloat)) {
      return CastPolicy::promote;
    }
    const bool throws_always = num_throws_ == 3 && !all_float && !all_lower && !mixed;
    return throws_always ? CastPolicy::banned : CastPolicy::unknown;
  }

 private:
  /// Calls the kernel with a first tensor of dtype `first`, and others of `rest`.
  std::optional<RecordedOp> run(at::ScalarType first, at::ScalarType rest) {
    auto make_tensor = [&, next = first]() mutable {
      const auto dtype = std::exchange(next, rest);
      return at::Tensor::wrap_tensor_impl(c10::make_intrusive<ShapelessTensorImpl>(device_, dtype));
    };
    std::vector<c10::IValue> arguments;
    for (const auto& argument : op_.schema().arguments()) {
      const auto value = make_probe_value(*argument.type(), make_tensor);
      if (!value) return std::nullopt;
      arguments.push_back(*value);
    }
    const SuppressWarningsGuard no_warnings;  // an op may warn before it reads a tensor
    FirstOpRecorder recorder;
    try {
      op_.callBoxedForDispatchKey(autocast_key(device_), arguments);
    } catch (const std::exception&) {  // expected: the tensors have no shape
      ++num_throws_;
    }
    return recorder.op();
  }

  // make_probe_value sets no optional dtype.
  static bool has_float_dtype_argument(const RecordedOp& op) {
    return std::ranges::any_of(op.inputs, [](const c10::IValue& input) {
      return input.isInt() && input.toInt() == static_cast<int64_t>(at::kFloat);
    });
  }

  const c10::OperatorHandle& op_;
  c10::DeviceType device_;
  at::ScalarType lower_precision_dtype_ = default_autocast_dtype(device_);
  at::ScalarType prev_dtype_;
  ThreadOpOverrides prev_op_overrides_ = std::exchange(thread_op_overrides(), {});
  int num_throws_ = 0;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
