/// \file
/// CastTrace: in which dtype each op ran under autocast, and what the casts cost.
///
///     mezzo::CastTrace trace(*model);   // from here on, this thread's ops are noted
///     step(batch);
///     std::cout << trace;               // a table, the costliest casts first
#pragma once

#include <mezzo/autocast/detail/in_force.h>
#include <mezzo/autocast/detail/op_policy/op_names.h>
#include <mezzo/base/named_tensors.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/detail/number_text.h>
#include <mezzo/diagnose/detail/op_observer.h>
#include <mezzo/diagnose/names.h>

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// One line of a trace: the sum of equal calls in one module.
struct CastRecord {
  std::string module;      ///< whose parameters the op reads, or that of the op before; or empty
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
/// the user called them, not inside another op; views are left out.
///
/// Listens through at::RecordFunction: a few microseconds an op while it exists, and nothing at
/// all otherwise. Create, read and destroy it in one thread.
class CastTrace final : private detail::OpObserver {
 public:
  /// Begins to listen. Records have no module.
  CastTrace() : CastTrace(NamedTensors()) {}
  /// Begins to listen. Keeps the parameters, not the model.
  explicit CastTrace(const torch::nn::Module& model) : CastTrace(name_parameters(model)) {}
  ~CastTrace() override { stop(); }

  /// Returns the records so far, most bytes first, then most calls.
  std::vector<CastRecord> records() const {
    const auto locked = lock();
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
    for (const CastRecord& record : records()) sum += record.bytes;
    return sum;
  }

 private:
  // A noted call that has not returned. An op with an autocast kernel calls itself with the cast
  // arguments: until then, every copy to another dtype is one of autocast's casts.
  struct OpenCall {
    CastRecord record;
    std::string name;
    int depth;
    bool is_casting;
  };

  explicit CastTrace(NamedTensors parameters) : OpObserver(std::move(parameters)) { start(); }

  void entered(detail::ObservedOp& op) override {
    if (!open_.empty() && open_.back().is_casting) {
      if (op.name() == "aten::to") return;
      if (op.name() == open_.back().name) {
        open_.back().is_casting = false;
        return;
      }
      if (op.name() == "aten::_to_copy") {
        const at::Tensor& source = op.inputs[0].toTensor();
        const auto target =
            op.inputs[1].isInt() ? op.inputs[1].toScalarType() : source.scalar_type();
        const auto width = source.element_size() + c10::elementSize(target);
        open_.back().record.casts += 1;
        open_.back().record.bytes += source.numel() * static_cast<std::int64_t>(width);
        return;
      }
    }
    std::optional<c10::DeviceType> device;
    std::vector<at::ScalarType> dtypes;
    for (const at::Tensor& tensor : detail::tensors_in(detail::arguments_in(op.inputs))) {
      if (!tensor.defined()) continue;
      if (!device) device = tensor.device().type();
      dtypes.push_back(tensor.scalar_type());
    }
    const bool is_lowered =
        device && detail::is_policy_device(*device) && at::autocast::is_autocast_enabled(*device);
    if (!is_lowered) return;
    const bool is_listed = op.handle.hasKernelForDispatchKey(detail::autocast_key(*device));
    if (!is_listed && (!open_.empty() || detail::returns_view(op.handle.schema()))) return;
    open_.push_back({.record = {.module = op.module,
                                .op = detail::full_name(op.handle.operator_name()),
                                .device = *device,
                                .inputs = std::move(dtypes),
                                .runs_in = at::ScalarType::Undefined,
                                .calls = 1},
                     .name = op.name(),
                     .depth = op.depth,
                     .is_casting = is_listed});
  }

  void left(const detail::ObservedOp& op, detail::OpArguments returned) override {
    if (open_.empty() || open_.back().depth != op.depth) return;
    CastRecord closed = std::move(open_.back().record);
    open_.pop_back();
    for (const at::Tensor& tensor : detail::tensors_in(returned)) {
      if (closed.runs_in != at::ScalarType::Undefined) break;
      if (tensor.defined() && tensor.is_floating_point()) closed.runs_in = tensor.scalar_type();
    }
    const auto [place, is_new] = records_.try_emplace(
        Key(closed.module, closed.op, closed.device, closed.inputs, closed.runs_in), closed);
    if (is_new) return;
    place->second.calls += closed.calls;
    place->second.casts += closed.casts;
    place->second.bytes += closed.bytes;
  }

  using Key = std::tuple<std::string, std::string, c10::DeviceType, std::vector<at::ScalarType>,
                         at::ScalarType>;
  std::map<Key, CastRecord> records_;
  std::vector<OpenCall> open_;
};

/// Prints the records as a table with a total.
inline std::ostream& operator<<(std::ostream& stream, const CastTrace& trace) {
  const std::vector<int> widths = {12, 8, 8, 0};
  std::string text = detail::table_line(
      widths, {"cast bytes", "casts", "calls", "  op (inputs) -> runs in, module"});
  for (const CastRecord& record : trace.records()) {
    std::string op = "  " + record.op + " (";
    for (const at::ScalarType dtype : record.inputs) {
      op += std::string(op.ends_with('(') ? "" : ", ") + c10::toString(dtype);
    }
    op += std::string(") -> ") + c10::toString(record.runs_in);
    if (!record.module.empty()) op += ", " + record.module;
    text += detail::table_line(widths, {std::to_string(record.bytes), std::to_string(record.casts),
                                        std::to_string(record.calls), op});
  }
  return stream << text + "total: " + std::to_string(trace.total_bytes()) + " bytes in casts\n";
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
