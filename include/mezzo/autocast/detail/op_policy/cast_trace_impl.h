/// \file
/// The members of CastTrace, and explain.
#pragma once

#include <mezzo/autocast/cast_trace.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <iomanip>
#include <numeric>
#include <optional>
#include <sstream>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Scores how likely a bare name means this overload: one that takes this many tensors, that
/// autocast knows, and that names no dimension by a string scores highest.
inline int overload_fit(const c10::OperatorHandle& op, std::size_t tensors,
                        c10::DeviceType device) {
  std::size_t takes = 0;
  bool has_string = false;
  for (const auto& argument : op.schema().arguments()) {
    takes += argument.type()->kind() == c10::TypeKind::TensorType ? 1 : 0;
    has_string |= argument.type()->annotation_str().find("str") != std::string::npos;
  }
  const bool listed = decided_category(op, device).category != OpCategory::fallthrough;
  return (takes == tensors ? 4 : 0) + (listed ? 2 : 0) + (has_string ? 0 : 1);
}

inline c10::OperatorHandle op_to_explain(std::string_view name, std::size_t tensors,
                                         c10::DeviceType device) {
  const auto ops = find_ops(name);
  return *std::max_element(ops.begin(), ops.end(), [&](const auto& a, const auto& b) {
    return overload_fit(a, tensors, device) < overload_fit(b, tensors, device);
  });
}

inline std::string join_dtypes(const std::vector<at::ScalarType>& dtypes) {
  std::string text;
  for (const auto dtype : dtypes) {
    text += (text.empty() ? "" : ", ") + std::string(c10::toString(dtype));
  }
  return text;
}

/// Returns the listed product that decides for an op that is not listed itself, if there is one. A
/// product with one factor, or with a number, does not count.
inline std::optional<c10::OperatorHandle> product_that_decides(
    const c10::OperatorHandle& op, OpCategory category, const std::vector<at::Tensor>& inputs) {
  const bool has_factors =
      inputs.size() > 1 && std::all_of(inputs.begin(), inputs.end(), [](const at::Tensor& input) {
        return input.defined() && input.dim() > 0;
      });
  return category == OpCategory::fallthrough && has_factors ? product_within(op.operator_name())
                                                            : std::nullopt;
}

inline std::string reason_for(const CastExplanation& call, OpCategory by_libtorch,
                              const std::optional<c10::OperatorHandle>& product) {
  std::ostringstream text;
  text << call.op << '(' << join_dtypes(call.inputs) << ") on "
       << c10::DeviceTypeName(call.device, /*lower_case=*/true) << " runs in "
       << c10::toString(call.runs_in) << ": ";
  if (call.decider == CastDecider::nobody) {
    text << "autocast is off for this device in this thread";
  } else if (call.decider == CastDecider::policy) {
    text << "the policy in force makes it " << to_string(call.category) << ", libtorch has it as "
         << to_string(by_libtorch);
  } else if (call.category == OpCategory::fallthrough && product.has_value()) {
    text << "autocast does not list it; it is made of " << full_name(product->operator_name())
         << ", which is " << to_string(decided_category(*product, call.device).category);
  } else if (call.category == OpCategory::fallthrough) {
    text << "autocast does not list it, so it takes its inputs as they come";
  } else {
    text << "libtorch lists it as " << to_string(call.category);
  }
  return text.str();
}

inline const char* to_text(CastDecider decider) {
  static constexpr std::array<const char*, 3> kNames = {"nobody", "libtorch", "policy"};
  return kNames[static_cast<std::size_t>(decider)];
}

}  // namespace detail

MEZZO_INLINE CastExplanation explain(std::string_view op, const std::vector<at::Tensor>& inputs) {
  const std::vector<c10::IValue> values(inputs.begin(), inputs.end());
  const detail::OpArguments arguments(values.data(), values.size());
  const auto device = detail::first_device(arguments).value_or(c10::DeviceType::CPU);
  const auto handle = detail::op_to_explain(op, inputs.size(), device);
  const bool enabled = at::autocast::is_autocast_enabled(device);
  const auto decided = detail::decided_category(handle, device);
  const auto category = enabled ? decided.category : OpCategory::fallthrough;
  const auto product =
      enabled ? detail::product_that_decides(handle, category, inputs) : std::nullopt;
  const auto applied =
      product.has_value() ? detail::decided_category(*product, device).category : category;
  CastExplanation call{.op = detail::full_name(handle.operator_name()),
                       .device = device,
                       .decider = !enabled            ? CastDecider::nobody
                                  : decided.by_policy ? CastDecider::policy
                                                      : CastDecider::libtorch,
                       .category = category,
                       .inputs = detail::tensor_dtypes(arguments),
                       .runs_in = detail::dtype_after_casts(applied, arguments, device),
                       .reason = {}};
  call.reason =
      detail::reason_for(call, detail::override_registry().registered(handle, device), product);
  return call;
}

MEZZO_INLINE std::ostream& operator<<(std::ostream& stream, const CastExplanation& explanation) {
  return stream << explanation.reason;
}

MEZZO_INLINE CastTrace::CastTrace() = default;

MEZZO_INLINE std::vector<CastRecord> CastTrace::records() const {
  std::vector<CastRecord> records;
  for (const auto& [call, cost] : recorder_.calls()) {
    records.push_back({call.scope, call.op, call.device,
                       call.decided.by_policy ? CastDecider::policy : CastDecider::libtorch,
                       call.decided.category, call.inputs, call.runs_in, cost.calls, cost.casts,
                       cost.bytes});
  }
  std::stable_sort(records.begin(), records.end(), [](const CastRecord& a, const CastRecord& b) {
    return std::pair(a.bytes, a.calls) > std::pair(b.bytes, b.calls);
  });
  return records;
}

MEZZO_INLINE std::int64_t CastTrace::total_bytes() const {
  const auto& calls = recorder_.calls();
  return std::accumulate(
      calls.begin(), calls.end(), std::int64_t{0},
      [](std::int64_t sum, const auto& call) { return sum + call.second.bytes; });
}

MEZZO_INLINE std::ostream& operator<<(std::ostream& stream, const CastTrace& trace) {
  const auto records = trace.records();
  std::vector<std::array<std::string, 9>> rows = {
      {"cast bytes", "casts", "calls", "op", "inputs", "runs in", "category", "by", "scope"}};
  for (const auto& record : records) {
    rows.push_back({std::to_string(record.bytes), std::to_string(record.casts),
                    std::to_string(record.calls), record.op, detail::join_dtypes(record.inputs),
                    c10::toString(record.runs_in), std::string(to_string(record.category)),
                    detail::to_text(record.decider), record.scope});
  }
  std::array<std::size_t, 9> widths{};
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      widths[i] = std::max(widths[i], row[i].size());
    }
  }
  constexpr std::size_t kNumbers = 3;
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      stream << (i < kNumbers ? std::right : std::left) << std::setw(static_cast<int>(widths[i]))
             << row[i] << (i + 1 < row.size() ? "  " : "\n");
    }
  }
  return stream << "total: " << trace.total_bytes() << " bytes in casts\n";
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
