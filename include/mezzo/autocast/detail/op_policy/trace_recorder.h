/// \file
/// TraceRecorder, which adds up over a thread's ops what autocast and the thread's policy do with
/// them.
#pragma once

#include <mezzo/autocast/detail/eligible.h>
#include <mezzo/autocast/detail/in_force.h>
#include <mezzo/autocast/detail/libtorch_state.h>
#include <mezzo/autocast/detail/op_listener.h>
#include <mezzo/autocast/detail/op_policy/op_names.h>
#include <mezzo/autocast/detail/op_policy/op_overrides.h>
#include <mezzo/autocast/op_category.h>
#include <mezzo/base/version.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

struct DecidedCategory {
  OpCategory category;
  bool by_policy;
};

inline DecidedCategory decided_category(const c10::OperatorHandle& op, c10::DeviceType device) {
  const auto& edits = thread_policies()[policy_device_index(device)];
  if (edits != nullptr) {
    const OpRecord* known = override_registry().find(op);
    if (const auto edit = known != nullptr ? edits->find(*known) : std::nullopt) {
      return {*edit, true};
    }
  }
  return {override_registry().registered(op, device), false};
}

inline std::vector<at::ScalarType> tensor_dtypes(OpArguments arguments) {
  std::vector<at::ScalarType> dtypes;
  for_each_tensor(arguments, [&](const at::Tensor& tensor) {
    if (tensor.defined()) {
      dtypes.push_back(tensor.scalar_type());
    }
  });
  return dtypes;
}

/// Returns the device of the first tensor that has one.
inline std::optional<c10::DeviceType> first_device(OpArguments arguments) {
  std::optional<c10::DeviceType> device;
  for_each_tensor(arguments, [&](const at::Tensor& tensor) {
    if (!device.has_value() && tensor.defined()) {
      device = tensor.device().type();
    }
  });
  return device;
}

/// Whether a category's dtype argument takes effect: the first tensor decides.
inline bool first_is_eligible(OpArguments arguments, c10::DeviceType device) {
  return !arguments.empty() && arguments[0].isTensor() &&
         is_eligible(arguments[0].toTensor(), device);
}

/// Returns the dtype that the op computes in once its category has been applied; Undefined without
/// tensors.
inline at::ScalarType dtype_after_casts(OpCategory category, OpArguments arguments,
                                        c10::DeviceType device) {
  const bool sets_dtype =
      category == OpCategory::fp32_set_opt_dtype || category == OpCategory::fp32_append_dtype;
  if (sets_dtype && first_is_eligible(arguments, device)) {
    return at::ScalarType::Float;
  }
  const auto target = cast_target(category, arguments, device);
  auto dtype = at::ScalarType::Undefined;
  for_each_tensor(arguments, [&](const at::Tensor& tensor) {
    if (!tensor.defined()) {
      return;
    }
    const bool cast = target.has_value() && is_eligible(tensor, device);
    const auto own = cast ? *target : tensor.scalar_type();
    dtype = dtype == at::ScalarType::Undefined ? own : c10::promoteTypes(dtype, own);
  });
  return dtype;
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

/// The key of a line in a trace: calls that are equal in all of it are added up.
struct TracedCall {
  std::string scope;
  std::string op;
  c10::DeviceType device;
  DecidedCategory decided;
  std::vector<at::ScalarType> inputs;
  at::ScalarType runs_in;

  friend bool operator<(const TracedCall& a, const TracedCall& b) { return a.key() < b.key(); }

 private:
  std::tuple<const std::string&, const std::string&, c10::DeviceType, OpCategory, bool,
             const std::vector<at::ScalarType>&, at::ScalarType>
  key() const {
    return {scope, op, device, decided.category, decided.by_policy, inputs, runs_in};
  }
};

struct TracedCost {
  std::int64_t calls = 0;
  std::int64_t casts = 0;
  std::int64_t bytes = 0;
};

/// The thing that the start of an op opened, for its end to close.
enum class OpenedByOp : std::uint8_t { nothing, scope, call, cast };

class TraceRecorder : public OpListener<TraceRecorder, OpenedByOp> {
 public:
  TraceRecorder() : OpListener({at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE}) {
    TORCH_CHECK(!is_nested(),
                "CastTrace: this thread has one already; let that one end before another is made");
  }

  const std::map<TracedCall, TracedCost>& calls() const { return calls_; }

 private:
  // A noted call that has not returned. Between its start and the inner call of the same op, which
  // sees the cast arguments, every copy to another dtype is one of autocast's casts.
  struct OpenCall {
    std::string name;
    TracedCall call;
    TracedCost cost;
    bool casting;
  };

  friend OpListener;

  OpenedByOp entered(const at::RecordFunction& function) {
    if (function.scope() == at::RecordScope::USER_SCOPE) {
      scopes_.emplace_back(function.name());
      return OpenedByOp::scope;
    }
    const auto name = function.operator_name();
    if (!name.has_value()) {
      return OpenedByOp::nothing;
    }
    if (const auto inside = note_inside_open_call(*name, recorded_inputs(function))) {
      return *inside;
    }
    return note_call(*name, recorded_inputs(function)) ? OpenedByOp::call : OpenedByOp::nothing;
  }

  void left(OpenedByOp opened) {
    if (opened == OpenedByOp::scope && !scopes_.empty()) {
      scopes_.pop_back();
    } else if (opened == OpenedByOp::call && !open_.empty()) {
      close_call();
    } else if (opened == OpenedByOp::cast) {
      in_cast_ = false;
    }
  }

  /// Handles a cast of the innermost open call, and the op itself behind its casts. Returns none
  /// for any other op.
  std::optional<OpenedByOp> note_inside_open_call(const c10::OperatorName& name,
                                                  OpArguments inputs) {
    if (open_.empty() || !open_.back().casting) {
      return std::nullopt;
    }
    if (in_cast_) {
      return OpenedByOp::nothing;  // what a cast is made of
    }
    if (name.name == open_.back().name) {
      open_.back().casting = false;
      return OpenedByOp::nothing;
    }
    if (name.name != "aten::_to_copy" || inputs.empty() || !inputs[0].isTensor()) {
      return name.name == "aten::to" ? std::optional(OpenedByOp::nothing) : std::nullopt;
    }
    note_cast(inputs);
    in_cast_ = true;
    return OpenedByOp::cast;
  }

  void note_cast(OpArguments inputs) {
    const at::Tensor& source = inputs[0].toTensor();
    const bool given = inputs.size() > 1 && inputs[1].isInt();
    const auto target = given ? inputs[1].toScalarType() : source.scalar_type();
    const auto written = static_cast<std::int64_t>(c10::elementSize(target));
    open_.back().cost.casts += 1;
    open_.back().cost.bytes += source.numel() * (source.element_size() + written);
  }

  bool note_call(const c10::OperatorName& name, OpArguments inputs) {
    const auto device = first_device(inputs);
    if (!device.has_value() || !is_policy_device(*device) ||
        !at::autocast::is_autocast_enabled(*device)) {
      return false;
    }
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op.has_value()) {
      return false;
    }
    const auto decided = decided_category(*op, *device);
    const bool listed = decided.by_policy || decided.category != OpCategory::fallthrough;
    if (!listed && (!open_.empty() || returns_view(op->schema()))) {
      return false;
    }
    TracedCall call{
        scope(), full_name(name),       *device,
        decided, tensor_dtypes(inputs), runs_in(*op, decided.category, inputs, *device)};
    if (decided.category == OpCategory::lower_precision) note_product(call.runs_in);
    open_.push_back(
        {name.name, std::move(call), {.calls = 1}, decided.category != OpCategory::fallthrough});
    return true;
  }

  /// Gives the open unlisted ops the dtype of a product that they are made of.
  void note_product(at::ScalarType dtype) {
    for (OpenCall& around : open_) {
      if (around.call.decided.category == OpCategory::fallthrough) around.call.runs_in = dtype;
    }
  }

  void close_call() {
    OpenCall closed = std::move(open_.back());
    open_.pop_back();
    TracedCost& cost = calls_[std::move(closed.call)];
    cost.calls += closed.cost.calls;
    cost.casts += closed.cost.casts;
    cost.bytes += closed.cost.bytes;
  }

  // A dtype that the caller asked for wins over the category's.
  static at::ScalarType runs_in(const c10::OperatorHandle& op, OpCategory category,
                                OpArguments inputs, c10::DeviceType device) {
    const auto dtype = optional_dtype_index(op.schema());
    const bool given = dtype.has_value() && *dtype < inputs.size() && inputs[*dtype].isInt();
    return given ? inputs[*dtype].toScalarType() : dtype_after_casts(category, inputs, device);
  }

  std::string scope() const {
    std::string path;
    for (const auto& name : scopes_) {
      path += (path.empty() ? "" : "/") + name;
    }
    return path;
  }

  std::map<TracedCall, TracedCost> calls_;
  std::vector<std::string> scopes_;
  std::vector<OpenCall> open_;
  bool in_cast_ = false;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
