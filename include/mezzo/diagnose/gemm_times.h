/// \file
/// Would this model gain from lower precision, on this machine? Times the model's own matrix
/// products in each dtype, as they are and padded to multiples of 8:
///
///     std::cout << mezzo::benchmark_gemms(model, batch);
///     std::cout << mezzo::benchmark_gemms([&](const Batch& b) { return model(b.ids); }, batch);
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <mezzo/base/version.h>

#include <compare>
#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// A product of `batch` pairs of matrices, m by k with k by n.
struct GemmShape {
  int64_t batch = 1;
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  bool a_transposed = false;  ///< whether the left matrix lies in memory column by column
  bool b_transposed = false;  ///< the right one, as the weight of a linear layer does

  /// The smallest shape that holds this one and whose m, n and k are multiples of 8, which is what
  /// tensor cores are fed with.
  GemmShape padded() const;

  /// "32 x (128 x 64 . 64 x 128)"; a T follows what is transposed.
  std::string to_string() const;

  auto operator<=>(const GemmShape&) const = default;
};

/// One product's time in each dtype, in microseconds.
struct GemmMicroseconds {
  double float32 = 0;                         ///< in float32, without TF32
  std::optional<double> tf32 = std::nullopt;  ///< on CUDA; a GPU without it computes in float32
  double float16 = 0;
  double bfloat16 = 0;
};

/// Equal products of a model.
struct GemmRow {
  GemmShape shape;
  int64_t calls = 0;  ///< how often the model does it
  GemmMicroseconds as_is;
  std::optional<GemmMicroseconds> padded;  ///< none where m, n and k are multiples of 8
};

/// All products of a model, the costliest in float32 first.
struct GemmTimes {
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  std::vector<GemmRow> rows;
};

/// A table: a line a shape, one more where it was padded, and their sums over all calls.
inline std::ostream& operator<<(std::ostream& stream, const GemmTimes& times);

struct GemmTimingOptions {
  /// How long each number is measured, in seconds: at least five rounds, of which the fastest
  /// counts. A product that takes ten times as long is timed once.
  double seconds = 0.05;
};

/// Runs `model->forward(sample)`, or else `model(sample)`, once and without gradients, and times
/// the matrix products that it came to: those of mm, addmm, bmm and baddbmm, and so of linear,
/// matmul, einsum and attention as far as they use these. Convolutions, and products inside a fused
/// attention kernel, are not seen; nor is what a backward pass would add, which is each product
/// twice more in other orders. Times are those of the bare product with matrices that lie
/// contiguous or transposed as the model's do: casts and padding are not in them.
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

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/diagnose/detail/gemm_times_impl.h>
