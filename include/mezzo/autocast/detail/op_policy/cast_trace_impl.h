/// \file
/// The members of CastTrace.
#pragma once

#include <mezzo/autocast/cast_trace.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <iomanip>
#include <numeric>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline std::string join_dtypes(const std::vector<at::ScalarType>& dtypes) {
  std::string text;
  for (const auto dtype : dtypes) {
    text += (text.empty() ? "" : ", ") + std::string(c10::toString(dtype));
  }
  return text;
}

inline const char* to_text(CastDecider decider) {
  static constexpr std::array<const char*, 2> kNames = {"libtorch", "policy"};
  return kNames[static_cast<std::size_t>(decider)];
}

}  // namespace detail

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
