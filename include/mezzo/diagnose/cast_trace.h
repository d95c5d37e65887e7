/// \file
/// CastTrace: in which dtype each op ran under autocast, and what the casts cost.
///
///     mezzo::CastTrace trace;      // from here on, this thread's ops are noted
///     step(batch);
///     std::cout << trace;          // a table, the costliest casts first
#pragma once

#include <mezzo/autocast/detail/in_force.h>
#include <mezzo/autocast/detail/libtorch_state.h>
#include <mezzo/autocast/detail/op_arguments.h>
#include <mezzo/autocast/detail/op_policy/op_names.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iomanip>
#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// One line of a trace: the sum of equal calls in one scope.
struct CastRecord {
  std::string scope;       ///< names of the RECORD_USER_SCOPEs around the call, joined by '/'
  std::string op;          ///< its full name, with its overload
  c10::DeviceType device;  ///< of the first tensor
  std::vector<at::ScalarType> inputs;  ///< dtypes of the tensors that the caller passed
  at::ScalarType runs_in;  ///< dtype of the first floating result; Undefined without one
  std::int64_t calls = 0;  ///< how many calls this record adds up
  std::int64_t casts = 0;  ///< made by autocast, not those that libtorch's cache saved
  std::int64_t bytes = 0;  ///< read and written by the casts
};

/// Notes, while it exists, the ops that the creating thread runs under autocast. Ops with an
/// autocast kernel, libtorch's or a policy's, are noted wherever they occur, other ops only where
/// the user called them, not inside another op; views are left out. libtorch's scopes,
/// `RECORD_USER_SCOPE("encoder")`, group the records.
///
/// Listens through at::RecordFunction: a few microseconds an op while it exists, and nothing at
/// all otherwise. Create, read and destroy it in one thread.
class CastTrace {
 public:
  /// Begins to listen.
  /// \throws c10::Error if the thread has a CastTrace already
  CastTrace() {
    TORCH_CHECK(active() == nullptr,
                "CastTrace: this thread has one already; let that one end before another is made");
    active() = this;
    callback_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&CastTrace::start, &CastTrace::end)
            .needsInputs(true)
            .needsOutputs(true)
            .scopes({at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE}));
  }
  ~CastTrace() {
    at::removeCallback(callback_);
    active() = nullptr;
  }
  CastTrace(const CastTrace&) = delete;
  CastTrace& operator=(const CastTrace&) = delete;

  /// Returns the records so far, most bytes first, then most calls.
  std::vector<CastRecord> records() const {
    std::vector<CastRecord> all;
    for (const auto& [key, record] : records_) all.push_back(record);
    std::stable_sort(all.begin(), all.end(), [](const CastRecord& a, const CastRecord& b) {
      return std::pair(a.bytes, a.calls) > std::pair(b.bytes, b.calls);
    });
    return all;
  }

  /// Returns the bytes that all casts so far read and wrote.
  std::int64_t total_bytes() const {
    std::int64_t sum = 0;
    for (const auto& [key, record] : records_) sum += record.bytes;
    return sum;
  }

 private:
  /// The thing that the start of an op opened, for its end to close.
  enum class Opened : std::uint8_t { nothing, scope, call, cast };

  struct Context final : at::ObserverContext {
    explicit Context(Opened by_op) : opened(by_op) {}
    Opened opened;
  };

  static CastTrace*& active() {
    static thread_local CastTrace* trace = nullptr;
    return trace;
  }
  static std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& function) {
    if (active() == nullptr) return nullptr;
    return std::make_unique<Context>(active()->entered(function));
  }
  static void end(const at::RecordFunction& function, at::ObserverContext* context) {
    if (active() == nullptr || context == nullptr) return;
    active()->left(function, static_cast<Context*>(context)->opened);
  }

  // A noted call that has not returned. An op with an autocast kernel calls itself with the cast
  // arguments: until then, every copy to another dtype is one of autocast's casts.
  struct OpenCall {
    std::string name;
    CastRecord record;
    bool is_casting;
  };

  Opened entered(const at::RecordFunction& function) {
    if (function.scope() == at::RecordScope::USER_SCOPE) {
      scopes_.emplace_back(function.name());
      return Opened::scope;
    }
    const auto name = function.operator_name();
    if (!name.has_value()) return Opened::nothing;
    const detail::OpArguments inputs = detail::recorded_inputs(function);
    if (!open_.empty() && open_.back().is_casting) {
      if (in_cast_ || name->name == "aten::to") return Opened::nothing;
      if (name->name == open_.back().name) {
        open_.back().is_casting = false;
        return Opened::nothing;
      }
      if (name->name == "aten::_to_copy") {
        note_cast(inputs);
        in_cast_ = true;
        return Opened::cast;
      }
    }
    return note_call(*name, inputs) ? Opened::call : Opened::nothing;
  }

  void left(const at::RecordFunction& function, Opened opened) {
    if (opened == Opened::scope) {
      scopes_.pop_back();
    } else if (opened == Opened::cast) {
      in_cast_ = false;
    } else if (opened == Opened::call) {
      close_call(detail::OpArguments(function.outputs().data(), function.outputs().size()));
    }
  }

  void note_cast(detail::OpArguments inputs) {
    const at::Tensor& source = inputs[0].toTensor();
    const auto target = inputs[1].isInt() ? inputs[1].toScalarType() : source.scalar_type();
    CastRecord& record = open_.back().record;
    record.casts += 1;
    record.bytes += source.numel() *
                    (source.element_size() + static_cast<std::int64_t>(c10::elementSize(target)));
  }

  bool note_call(const c10::OperatorName& name, detail::OpArguments inputs) {
    std::optional<c10::DeviceType> device;
    std::vector<at::ScalarType> dtypes;
    detail::for_each_tensor(inputs, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      if (!device) device = tensor.device().type();
      dtypes.push_back(tensor.scalar_type());
    });
    const bool is_lowered =
        device && detail::is_policy_device(*device) && at::autocast::is_autocast_enabled(*device);
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!is_lowered || !op) return false;
    const bool is_listed = op->hasKernelForDispatchKey(detail::autocast_key(*device));
    if (!is_listed && (!open_.empty() || detail::returns_view(op->schema()))) return false;
    std::string scope;
    for (const auto& each : scopes_) scope += (scope.empty() ? "" : "/") + each;
    open_.push_back({name.name,
                     {.scope = std::move(scope),
                      .op = detail::full_name(name),
                      .device = *device,
                      .inputs = std::move(dtypes),
                      .runs_in = at::ScalarType::Undefined,
                      .calls = 1},
                     is_listed});
    return true;
  }

  void close_call(detail::OpArguments results) {
    CastRecord closed = std::move(open_.back().record);
    open_.pop_back();
    detail::for_each_tensor(results, [&](const at::Tensor& tensor) {
      const bool is_first = closed.runs_in == at::ScalarType::Undefined;
      if (is_first && tensor.defined() && tensor.is_floating_point()) {
        closed.runs_in = tensor.scalar_type();
      }
    });
    const auto [place, is_new] = records_.try_emplace(
        Key(closed.scope, closed.op, closed.device, closed.inputs, closed.runs_in), closed);
    if (is_new) return;
    place->second.calls += closed.calls;
    place->second.casts += closed.casts;
    place->second.bytes += closed.bytes;
  }

  using Key = std::tuple<std::string, std::string, c10::DeviceType, std::vector<at::ScalarType>,
                         at::ScalarType>;
  std::map<Key, CastRecord> records_;
  std::vector<std::string> scopes_;
  std::vector<OpenCall> open_;
  bool in_cast_ = false;
  at::CallbackHandle callback_ = at::INVALID_CALLBACK_HANDLE;
};

/// Prints the records as a table with a total.
inline std::ostream& operator<<(std::ostream& stream, const CastTrace& trace) {
  stream << std::right << std::setw(12) << "cast bytes" << std::setw(8) << "casts" << std::setw(8)
         << "calls"
         << "  op (inputs) -> runs in, scope\n";
  for (const CastRecord& record : trace.records()) {
    stream << std::setw(12) << record.bytes << std::setw(8) << record.casts << std::setw(8)
           << record.calls << "  " << record.op << " (";
    for (std::size_t i = 0; i < record.inputs.size(); ++i) {
      stream << (i == 0 ? "" : ", ") << c10::toString(record.inputs[i]);
    }
    stream << ") -> " << c10::toString(record.runs_in) << (record.scope.empty() ? "" : ", ")
           << record.scope << "\n";
  }
  return stream << "total: " << trace.total_bytes() << " bytes in casts\n";
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
