/// \file
/// From a model's products to their times, and these as a table.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/rand.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/matmul_precision.h>
#include <mezzo/diagnose/gemm_times.h>
#include <torch/cuda.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <iomanip>
#include <map>
#include <mutex>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

class GemmStopwatch {
 public:
  GemmStopwatch(c10::Device device, double seconds)
      : device_(device), seconds_(seconds), generator_(own_generator(device)) {}

  GemmMicroseconds time(const GemmShape& shape) const {
    GemmMicroseconds times;
    {
      const MatmulPrecisionGuard exact({.float32 = at::Float32MatmulPrecision::HIGHEST});
      times.float32 = time(shape, at::kFloat);
    }
    if (device_.is_cuda()) {
      const MatmulPrecisionGuard tf32({.float32 = at::Float32MatmulPrecision::HIGH});
      times.tf32 = time(shape, at::kFloat);
    }
    times.float16 = time(shape, at::kHalf);
    times.bfloat16 = time(shape, at::kBFloat16);
    return times;
  }

 private:
  static constexpr int kRounds = 5;  // at least

  /// The fastest of some rounds, each as many calls as fit, in microseconds a call: what else the
  /// machine does only ever adds. No wait between the calls of a round, as in a model; and no
  /// autocast, which does not touch ops that write to `out`.
  double time(const GemmShape& shape, at::ScalarType dtype) const {
    const at::Tensor a = matrix(shape.batch, shape.m, shape.k, shape.a_transposed, dtype);
    const at::Tensor b = matrix(shape.batch, shape.k, shape.n, shape.b_transposed, dtype);
    at::Tensor product = at::empty({shape.batch, shape.m, shape.n}, a.options());
    if (shape.batch == 1) {  // one batch of one is another kernel on some machines
      return time_calls([&, left = a[0], right = b[0], out = product[0]]() mutable {
        at::mm_out(out, left, right);
      });
    }
    return time_calls([&] { at::bmm_out(product, a, b); });
  }

  template <class Call>
  double time_calls(Call call) const {
    seconds_of(call, 1);  // whatever is set up at first use
    double fastest = seconds_of(call, 1);
    if (fastest > 10 * seconds_) return fastest * 1e6;
    double spent = 0;
    for (int round = 0; round < kRounds || spent < seconds_; ++round) {
      const auto calls = static_cast<int64_t>(std::clamp(seconds_ / kRounds / fastest, 1.0, 1e5));
      const double seconds = seconds_of(call, calls);
      spent += seconds;
      fastest = std::min(fastest, seconds / static_cast<double>(calls));
    }
    return fastest * 1e6;
  }

  template <class Call>
  double seconds_of(Call& call, int64_t calls) const {
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < calls; ++i) call();
    if (device_.is_cuda()) torch::cuda::synchronize(device_.index());
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  at::Tensor matrix(int64_t batch, int64_t rows, int64_t columns, bool transposed,
                    at::ScalarType dtype) const {
    const auto options = at::TensorOptions().device(device_).dtype(at::kFloat);
    return transposed
               ? at::rand({batch, columns, rows}, generator_, options).to(dtype).transpose(1, 2)
               : at::rand({batch, rows, columns}, generator_, options).to(dtype);
  }

  /// The default generator is the model's: what follows a timing draws what it would without one.
  static at::Generator own_generator(c10::Device device) {
    at::Generator shared = at::globalContext().defaultGenerator(device);
    const std::scoped_lock lock(shared.mutex());
    return shared.clone();
  }

  c10::Device device_;
  double seconds_;
  at::Generator generator_;
};

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
              "benchmark_gemms: the model came to no product by mm, addmm, bmm or baddbmm");
  const c10::Device device = gemms.front().device;
  for (const RecordedGemm& gemm : gemms) {
    TORCH_CHECK(gemm.device == device, "benchmark_gemms: the model multiplies on ", device,
                " and on ", gemm.device, "; time its parts one by one");
  }
  TORCH_CHECK(device.is_cpu() || device.is_cuda(), "benchmark_gemms: the model multiplies on ",
              device, "; it can be timed on cpu and cuda");
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
GemmTimes benchmark_gemms(Model&& model, const Sample& sample, const GemmTimingOptions& options) {
  TORCH_CHECK(options.seconds > 0 && !detail::nonfinite_bits(options.seconds),
              "benchmark_gemms: seconds is ", options.seconds,
              "; it should be positive and finite");
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
