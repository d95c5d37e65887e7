#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/float_format.h>

#include <c10/macros/Macros.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

// Partial statistics of gradients and their merging, on host and device.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Elements per partial result on the CPU. Fixed, so that sums do not depend on the number of
/// threads.
inline constexpr int64_t kGradStatsChunkElements = 65536;

/// Statistics of a range of gradients as they are stored. Maxima are the bits of magnitudes, which
/// sort like the values, NaN above inf. float64 has its own maximum, since the overflow of a
/// product depends on the dtype in which it is computed.
struct PartialGradStats {
  double norm_sq = 0;
  uint64_t max_double = 0;
  uint32_t max_float = 0;  ///< of float32, float16 and bfloat16, as float32

  C10_HOST_DEVICE void merge(const PartialGradStats& other) {
    norm_sq += other.norm_sq;
    max_double = other.max_double > max_double ? other.max_double : max_double;
    max_float = other.max_float > max_float ? other.max_float : max_float;
  }
};

static_assert(std::is_trivially_copyable_v<PartialGradStats>, "written by kernels");

/// Statistics of gradients times `inv_scale`. Multiplication is monotonic: a product is inf or NaN
/// if and only if that of the largest magnitude is (or 0 * inv_scale, if inv_scale is inf or NaN).
struct FinalGradStats {
  double norm_sq;
  double max_abs;
  bool found_inf;

  C10_HOST_DEVICE FinalGradStats(const PartialGradStats& partial, float inv_scale) {
    const double factor = static_cast<double>(inv_scale);
    double max_double = 0;
    float max_float = 0;
    reinterpret_bits(partial.max_double, max_double);
    reinterpret_bits(partial.max_float, max_float);
    norm_sq = partial.norm_sq * factor * factor;
    const uint64_t double_bits = magnitude_bits(max_double * factor);
    const uint64_t float_bits = magnitude_bits(static_cast<double>(max_float * inv_scale));
    const uint64_t max_bits = double_bits > float_bits ? double_bits : float_bits;
    reinterpret_bits(max_bits, max_abs);
    found_inf = max_bits >= kInfinity;
    // The square of a product that overflows in float32 may be finite in float64.
    if (found_inf && magnitude_bits(norm_sq) < kInfinity) norm_sq = max_abs;
  }

 private:
  static constexpr uint64_t kInfinity = FloatFormat<double>::kExponent;  // NaN is above

  C10_HOST_DEVICE static uint64_t magnitude_bits(double value) {
    uint64_t bits = 0;
    reinterpret_bits(value, bits);
    return bits & (kInfinity | (kInfinity - 1));
  }
};

/// max_bits = max(max_bits, |bits|), with NaN above inf.
template <class Format, class BitsVec>
C10_HOST_DEVICE C10_ALWAYS_INLINE void update_max_abs(const BitsVec& bits, BitsVec& max_bits) {
  const BitsVec magnitude = bits & (Format::kExponent | (Format::kExponent - 1U));
  max_bits = magnitude > max_bits ? magnitude : max_bits;
}

C10_HOST_DEVICE C10_ALWAYS_INLINE void add_square(float value, double& sum) {
  const auto wide = static_cast<double>(value);
  sum += wide * wide;  // the product is exact: contraction changes no bit
}

C10_HOST_DEVICE C10_ALWAYS_INLINE void add_square(double value, double& sum) {
  sum = std::fma(value, value, sum);
}

template <class Format>
C10_HOST_DEVICE C10_ALWAYS_INLINE void set_max_abs(typename Format::Bits max_bits,
                                                   PartialGradStats& partial) {
  typename Format::opmath_t value;
  Format::to_opmath(max_bits, value);
  if constexpr (sizeof(value) == sizeof(double)) {
    reinterpret_bits(value, partial.max_double);
  } else {
    reinterpret_bits(value, partial.max_float);
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
