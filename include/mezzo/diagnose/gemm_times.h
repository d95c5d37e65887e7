/// \file
/// Would this model gain from lower precision, on this machine? Times the model's own matrix
/// products in each dtype, as they are and padded to multiples of 8:
///
///     std::cout << mezzo::benchmark_gemms(model, batch);
///     std::cout << mezzo::benchmark_gemms([&](const Batch& b) { return model(b.ids); }, batch);
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/diagnose/detail/number_text.h>

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/util/StringUtil.h>

#include <compare>
#include <cstdint>
#include <iomanip>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// A product of `batch` pairs of matrices, m by k with k by n.
struct GemmShape {
  int64_t batch = 1;          ///< pairs of matrices
  int64_t m = 0;              ///< rows of the left matrix and of the product
  int64_t n = 0;              ///< columns of the right matrix and of the product
  int64_t k = 0;              ///< columns of the left matrix, rows of the right one
  bool a_transposed = false;  ///< whether the left matrix lies in memory column by column
  bool b_transposed = false;  ///< the right one, as the weight of a linear layer does

  /// The smallest shape that holds this one and whose m, n and k are multiples of 8, which is what
  /// tensor cores are fed with.
  GemmShape padded() const;

  /// "32 x (128 x 64 . 64 x 128)"; a T follows what is transposed.
  std::string to_string() const;

  /// Orders shapes by batch, m, n, k.
  // clang-tidy 14 takes the 0 that a defaulted comparison compares with for a pointer.
  auto operator<=>(const GemmShape&) const = default;  // NOLINT(modernize-use-nullptr)
};

/// One product's time in each dtype, in microseconds.
struct GemmMicroseconds {
  double float32 = 0;                         ///< in float32, without TF32
  std::optional<double> tf32 = std::nullopt;  ///< on CUDA; a GPU without it computes in float32
  double float16 = 0;                         ///< in float16
  double bfloat16 = 0;                        ///< in bfloat16
};

/// Equal products of a model.
struct GemmRow {
  GemmShape shape;                         ///< the sizes of each product
  int64_t calls = 0;                       ///< how often the model does it
  GemmMicroseconds as_is;                  ///< the time of one product of this shape
  std::optional<GemmMicroseconds> padded;  ///< none where m, n and k are multiples of 8
};

/// All products of a model, the costliest in float32 first.
struct GemmTimes {
  c10::Device device = c10::Device(c10::DeviceType::CPU);  ///< that was timed
  std::vector<GemmRow> rows;                               ///< a row for each shape
  int64_t convolutions = 0;  ///< how many the model ran, which are not timed
};

/// A table: a line a shape, one more where it was padded, their sums over all calls, and what is
/// not in them.
inline std::ostream& operator<<(std::ostream& stream, const GemmTimes& times);

/// How long the multiplications are timed.
struct GemmTimingOptions {
  /// How long each number is measured, in seconds: at least five rounds, of which the fastest
  /// counts. A product that takes ten times as long is timed once.
  double seconds = 0.05;
};

/// Runs `model->forward(sample)`, or else `model(sample)`, once and without gradients, and times
/// the matrix products that it came to: those of mm, addmm, bmm and baddbmm, and so of linear,
/// matmul, einsum and attention as far as they use these. Convolutions are counted and not timed.
/// Not seen are products inside a fused attention kernel, what a backward pass would add (each
/// product twice more, in other orders), and the casts and calls that outweigh the products of a
/// small model; compare_precisions times whole steps. Times are those of the bare product with
/// matrices that lie contiguous or transposed as the model's do: casts and padding are not in them.
///
/// Takes about a fifth of a second a shape, twice that where it is padded, more where the machine
/// emulates a dtype; ask on a quiet one. Waits for the device. While it runs, no other thread may
/// multiply matrices on it: that would be measured too, and TF32 is switched for the process
/// (MatmulPrecisionGuard). The autocast state of the caller holds for the model and not for the
/// timing. The model and the default random generators are left as one forward pass leaves them.
/// \throws c10::Error if the model came to no such product, to products on several devices or on
///   one that is neither CPU nor CUDA, if seconds is not positive, or inside of another
///   benchmark_gemms
template <class Model, class Sample>
GemmTimes benchmark_gemms(Model&& model, const Sample& sample,
                          const GemmTimingOptions& options = {});

namespace detail {

/// A line of the table.
inline std::string gemm_line(const std::string& calls, const std::string& shape,
                             const std::vector<std::string>& times) {
  std::vector<std::string> cells = {calls, "  " + shape};
  cells.insert(cells.end(), times.begin(), times.end());
  return table_line({6, -42, 12, 12, 12, 12}, cells);
}

/// Its numbers, to a tenth of a microsecond.
inline std::vector<std::string> gemm_cells(const GemmMicroseconds& times) {
  const auto tenths = [](std::optional<double> value) {
    std::ostringstream text;
    if (value) text << std::fixed << std::setprecision(1) << *value;
    return value ? text.str() : "-";
  };
  return {tenths(times.float32), tenths(times.tf32), tenths(times.float16), tenths(times.bfloat16)};
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
  using detail::gemm_cells;
  using detail::gemm_line;
  GemmMicroseconds as_is, padded;
  bool any_padded = false;
  stream << "matrix products on " << times.device << ", microseconds a call\n"
         << gemm_line("calls", "shape", {"float32", "tf32", "float16", "bfloat16"});
  for (const GemmRow& row : times.rows) {
    stream << gemm_line(std::to_string(row.calls), row.shape.to_string(), gemm_cells(row.as_is));
    detail::add_calls(as_is, row.as_is, row.calls);
    detail::add_calls(padded, row.padded.value_or(row.as_is), row.calls);
    if (!row.padded) continue;
    any_padded = true;
    stream << gemm_line("", "  padded: " + row.shape.padded().to_string(), gemm_cells(*row.padded));
  }
  stream << gemm_line("", "all calls", gemm_cells(as_is));
  if (any_padded) stream << gemm_line("", "all calls, padded", gemm_cells(padded));
  if (times.convolutions > 0) {
    stream << "not timed: " << times.convolutions << " convolution"
           << (times.convolutions == 1 ? "" : "s")
           << "; compare_precisions times whole steps, with their casts\n";
  }
  return stream;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/diagnose/detail/gemm_times_impl.h>  // IWYU pragma: export
