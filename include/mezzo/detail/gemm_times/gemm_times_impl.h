/// \file
/// From a model's products to their times and a table.
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <mezzo/detail/gemm_times/stopwatch.h>
#include <mezzo/gemm_times.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iomanip>
#include <map>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline GemmShape shape_of(const RecordedGemm& gemm) {
  const auto& [a, b, device] = gemm;
  const bool batched = a.sizes.size() == 3;
  return {.batch = batched ? a.sizes[0] : 1,
          .m = a.sizes[batched ? 1 : 0],
          .n = b.sizes[batched ? 2 : 1],
          .k = a.sizes[batched ? 2 : 1],
          .a_transposed = a.transposed,
          .b_transposed = b.transposed};
}

inline std::vector<GemmRow> rows_of(const std::vector<RecordedGemm>& gemms) {
  std::map<GemmShape, int64_t> calls;
  for (const RecordedGemm& gemm : gemms) ++calls[shape_of(gemm)];
  std::vector<GemmRow> rows;
  for (const auto& [shape, count] : calls) {
    rows.push_back({.shape = shape, .calls = count, .as_is = {}, .padded = std::nullopt});
  }
  return rows;
}

inline c10::Device device_of(const std::vector<RecordedGemm>& gemms) {
  TORCH_CHECK(!gemms.empty(),
              "time_gemms: the model came to no product by mm, addmm, bmm or baddbmm");
  const c10::Device device = gemms.front().device;
  for (const RecordedGemm& gemm : gemms) {
    TORCH_CHECK(gemm.device == device, "time_gemms: the model multiplies on ", device, " and on ",
                gemm.device, "; time its parts one by one");
  }
  TORCH_CHECK(device.is_cpu() || device.is_cuda(), "time_gemms: the model multiplies on ", device,
              "; it can be timed on cpu and cuda");
  return device;
}

inline GemmTimes timed(const std::vector<RecordedGemm>& gemms, const GemmTimingOptions& options) {
  const at::NoGradGuard no_grad;
  GemmTimes times{.device = device_of(gemms), .rows = rows_of(gemms)};
  const GemmStopwatch stopwatch(times.device, options.seconds);
  for (GemmRow& row : times.rows) {
    row.as_is = stopwatch.time(row.shape);
    if (row.shape.padded() != row.shape) row.padded = stopwatch.time(row.shape.padded());
  }
  std::stable_sort(times.rows.begin(), times.rows.end(), [](const GemmRow& a, const GemmRow& b) {
    return a.as_is.float32 * static_cast<double>(a.calls) >
           b.as_is.float32 * static_cast<double>(b.calls);
  });
  return times;
}

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

inline GemmShape GemmShape::padded() const {
  const auto up = [](int64_t size) { return (size + 7) / 8 * 8; };
  GemmShape shape = *this;
  shape.m = up(m);
  shape.n = up(n);
  shape.k = up(k);
  return shape;
}

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

template <class Model, class Sample>
GemmTimes time_gemms(Model&& model, const Sample& sample, const GemmTimingOptions& options) {
  TORCH_CHECK(options.seconds > 0 && std::isfinite(options.seconds), "time_gemms: seconds is ",
              options.seconds, "; it should be positive and finite");
  std::vector<detail::RecordedGemm> gemms;
  {
    const at::NoGradGuard no_grad;
    const detail::GemmRecorder recorder;
    if constexpr (requires { model->forward(sample); }) {
      model->forward(sample);
    } else {
      model(sample);
    }
    gemms = recorder.gemms();
  }
  return detail::timed(gemms, options);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
