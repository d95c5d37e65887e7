#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/float_format.h>

#include <c10/macros/Macros.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

// The partial result of reading a stretch of gradients, and how partial results are combined, on
// host and device.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The number of elements of a partial result on the CPU. It is fixed, so that a sum does not
/// depend on the number of threads.
inline constexpr int64_t kGradStatsChunkElements = 65536;

/// The partial result of a stretch of gradients, before any scale. Largest magnitudes are kept as
/// bits, which sort like the values, with NaN above all. Those of doubles are kept apart, since
/// overflow of a product depends on the dtype that it is computed in.
struct PartialGradStats {
  double norm_sq = 0;
  uint64_t max_double = 0;
  uint32_t max_float = 0;  ///< of float, half and bfloat16, widened to float

  C10_HOST_DEVICE void merge(const PartialGradStats& other) {
    norm_sq += other.norm_sq;
    max_double = other.max_double > max_double ? other.max_double : max_double;
    max_float = other.max_float > max_float ? other.max_float : max_float;
  }
};

static_assert(std::is_trivially_copyable_v<PartialGradStats>, "kernels write it");

/// The summary of gradients times `inv_scale`. Multiplication is monotonic: some product is inf or
/// NaN if and only if that of the largest magnitude is (or that of 0, if the factor is inf or NaN).
struct FinalGradStats {
  double norm_sq;
  double max_abs;
  bool found_inf;

  C10_HOST_DEVICE FinalGradStats(const PartialGradStats& partial, float inv_scale) {
    const double factor = static_cast<double>(inv_scale);
    double largest_double = 0;
    float largest_float = 0;
    reinterpret_bits(partial.max_double, largest_double);
    reinterpret_bits(partial.max_float, largest_float);
    norm_sq = partial.norm_sq * factor * factor;
    const uint64_t bits = magnitude_bits(largest_double * factor);
    const uint64_t bits_of_float = magnitude_bits(static_cast<double>(largest_float * inv_scale));
    const uint64_t larger = bits > bits_of_float ? bits : bits_of_float;
    reinterpret_bits(larger, max_abs);
    found_inf = larger >= kInfinity;
    // A product that overflows in float has a square that does not in double.
    if (found_inf && magnitude_bits(norm_sq) < kInfinity) norm_sq = max_abs;
  }

 private:
  static constexpr uint64_t kInfinity = FloatFormat<double>::kExponent;  // and NaN lies above

  C10_HOST_DEVICE static uint64_t magnitude_bits(double value) {
    uint64_t bits = 0;
    reinterpret_bits(value, bits);
    return bits & (kInfinity | (kInfinity - 1));
  }
};

// The work on each element: the body of the CPU's loops, the CUDA kernels and the tests' reference.

/// Computes gradient = gradient * inv_scale, and checks the value that will be stored: a product,
/// or its rounding to half, may overflow when the factors do not.
template <class Format, class ValueVec>
struct UnscaleFunctor {
  ValueVec inv_scale;

  template <class BitsVec, class Mask>
  C10_HOST_DEVICE C10_ALWAYS_INLINE void operator()(BitsVec& bits, Mask& nonfinite) const {
    ValueVec value;
    Format::to_opmath(bits, value);
    value = value * inv_scale;
    Format::from_opmath(value, bits);
    nonfinite = nonfinite | ((bits & Format::kExponent) == Format::kExponent);
  }
};

/// largest = max(largest, |stored|), as bits: NaN lies above inf.
template <class Format, class BitsVec>
C10_HOST_DEVICE C10_ALWAYS_INLINE void keep_larger_magnitude(const BitsVec& bits,
                                                             BitsVec& largest) {
  const BitsVec magnitude = bits & (Format::kExponent | (Format::kExponent - 1U));  // no sign
  largest = magnitude > largest ? magnitude : largest;
}

C10_HOST_DEVICE C10_ALWAYS_INLINE void add_square(float value, double& sum) {
  const auto wide = static_cast<double>(value);
  sum += wide * wide;  // the product is exact: contracted or not, the bits are the same
}

C10_HOST_DEVICE C10_ALWAYS_INLINE void add_square(double value, double& sum) {
  sum = std::fma(value, value, sum);
}

template <class Format>
C10_HOST_DEVICE C10_ALWAYS_INLINE void set_largest(typename Format::Bits magnitude,
                                                   PartialGradStats& partial) {
  typename Format::opmath_t value;
  Format::to_opmath(magnitude, value);
  if constexpr (sizeof(value) == sizeof(double)) {
    reinterpret_bits(value, partial.max_double);
  } else {
    reinterpret_bits(value, partial.max_float);
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
