/// \file
/// The times as a table.
#pragma once

#include <c10/util/StringUtil.h>
#include <mezzo/diagnose/gemm_times.h>

#include <cstdint>
#include <iomanip>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A line of the table.
inline std::string gemm_line(const std::string& calls, const std::string& shape,
                             const GemmMicroseconds& times) {
  std::ostringstream line;
  const auto number = [&line](std::optional<double> value) {
    line << std::setw(12);
    if (value) {
      line << std::fixed << std::setprecision(1) << *value;
    } else {
      line << "-";
    }
  };
  line << std::setw(6) << calls << "  " << std::left << std::setw(40) << shape << std::right;
  number(times.float32);
  number(times.tf32);
  number(times.float16);
  number(times.bfloat16);
  line << "\n";
  return line.str();
}

inline void add_calls(GemmMicroseconds& sum, const GemmMicroseconds& times, int64_t calls) {
  const auto count = static_cast<double>(calls);
  sum.float32 += count * times.float32;
  if (times.tf32) sum.tf32 = sum.tf32.value_or(0) + count * *times.tf32;
  sum.float16 += count * times.float16;
  sum.bfloat16 += count * times.bfloat16;
}

}  // namespace detail

inline std::string GemmShape::to_string() const {
  const std::string product =
      c10::str(m, " x ", k, a_transposed ? " T" : "", " . ", k, " x ", n, b_transposed ? " T" : "");
  return batch == 1 ? product : c10::str(batch, " x (", product, ")");
}

inline std::ostream& operator<<(std::ostream& stream, const GemmTimes& times) {
  GemmMicroseconds as_is, padded;
  bool any_padded = false;
  stream << "matrix products on " << times.device << ", microseconds a call\n"
         << " calls  " << std::left << std::setw(40) << "shape" << std::right << std::setw(12)
         << "float32" << std::setw(12) << "tf32" << std::setw(12) << "float16" << std::setw(12)
         << "bfloat16"
         << "\n";
  for (const GemmRow& row : times.rows) {
    stream << detail::gemm_line(std::to_string(row.calls), row.shape.to_string(), row.as_is);
    detail::add_calls(as_is, row.as_is, row.calls);
    detail::add_calls(padded, row.padded.value_or(row.as_is), row.calls);
    if (!row.padded) continue;
    any_padded = true;
    stream << detail::gemm_line("", "  padded: " + row.shape.padded().to_string(), *row.padded);
  }
  stream << detail::gemm_line("", "all calls", as_is);
  if (any_padded) stream << detail::gemm_line("", "all calls, padded", padded);
  return stream;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
