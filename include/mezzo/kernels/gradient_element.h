#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/float_format.h>
#include <mezzo/kernels/gradient_summary_partial.h>

#include <c10/macros/Macros.h>

#include <cmath>
#include <cstdint>

// What is done with each element: the body of the CPU's loops, of the CUDA kernels and of the
// tests' reference.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Sets bits in `nonfinite` where a stored value is inf or NaN.
template <class Format>
struct CheckElement {
  template <class BitLanes, class Flags>
  C10_HOST_DEVICE C10_ALWAYS_INLINE void operator()(const BitLanes& bits, Flags& nonfinite) const {
    nonfinite = nonfinite | ((bits & Format::kExponent) == Format::kExponent);
  }
};

/// gradient = gradient * inv_scale, and a look at what will be stored rather than at what came in:
/// only that sees a product, or its rounding to half, that overflows where the factors do not.
/// The body of the CPU kernel, of the CUDA kernel and of the tests' reference.
template <class Format, class ValueLanes>
struct UnscaleElement {
  ValueLanes inv_scale;

  template <class BitLanes, class Flags>
  C10_HOST_DEVICE C10_ALWAYS_INLINE void operator()(BitLanes& bits, Flags& nonfinite) const {
    ValueLanes value;
    Format::widen(bits, value);
    value = value * inv_scale;
    Format::narrow(value, bits);
    CheckElement<Format>{}(bits, nonfinite);
  }
};

/// All bits of a stored element but the sign.
template <class Format>
inline constexpr typename Format::Bits kMagnitudeBits =
    static_cast<typename Format::Bits>(Format::kExponent | (Format::kExponent - 1U));

/// largest = max(largest, |stored|), as bits: NaN lies above inf.
template <class Format, class BitLanes>
C10_HOST_DEVICE C10_ALWAYS_INLINE void keep_larger_magnitude(const BitLanes& bits,
                                                             BitLanes& largest) {
  const BitLanes magnitude = bits & kMagnitudeBits<Format>;
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
                                                   GradientPartial& partial) {
  typename Format::Value value;
  Format::widen(magnitude, value);
  if constexpr (sizeof(value) == sizeof(double)) {
    reinterpret_bits(value, partial.max_double);
  } else {
    reinterpret_bits(value, partial.max_float);
  }
}

/// Counts, for one lane or many, of what a low-precision dtype would lose.
template <class Format, class ValueLanes, class BitLanes>
struct StatisticsElement {
  using Bits = typename Format::Bits;
  static constexpr Bits kValueMagnitude = static_cast<Bits>(~Bits{0}) >> 1;

  ValueLanes inv_scale;
  Bits stored_underflow;   ///< the largest stored magnitude that rounds to zero
  Bits product_underflow;  ///< and the largest of a product's

  /// `underflow` is a power of two. What a format cannot hold is half its smallest subnormal and
  /// less, which rounds to zero here too.
  C10_HOST_DEVICE C10_ALWAYS_INLINE void set_underflow(double underflow) {
    const auto value = static_cast<typename Format::Value>(underflow);
    reinterpret_bits(value, product_underflow);
    Format::narrow(value, stored_underflow);
  }

  C10_HOST_DEVICE C10_ALWAYS_INLINE void operator()(const BitLanes& bits, BitLanes& zeros,
                                                    BitLanes& underflows,
                                                    BitLanes& scaled_underflows) const {
    const BitLanes magnitude = bits & kMagnitudeBits<Format>;
    BitLanes product;
    multiply(bits, product);
    product = product & kValueMagnitude;
    zeros = magnitude == 0U ? zeros + 1U : zeros;
    underflows = product <= product_underflow ? underflows + 1U : underflows;
    underflows = magnitude == 0U ? underflows - 1U : underflows;
    scaled_underflows = magnitude <= stored_underflow ? scaled_underflows + 1U : scaled_underflows;
    scaled_underflows = magnitude == 0U ? scaled_underflows - 1U : scaled_underflows;
  }

  /// Whether the product is inf or NaN.
  C10_HOST_DEVICE C10_ALWAYS_INLINE bool is_bad(const BitLanes& bits) const {
    BitLanes product;
    multiply(bits, product);
    ValueLanes value;
    reinterpret_bits(product, value);
    return nonfinite_bits(value);
  }

 private:
  C10_HOST_DEVICE C10_ALWAYS_INLINE void multiply(const BitLanes& bits, BitLanes& product) const {
    ValueLanes value;
    Format::widen(bits, value);
    value = value * inv_scale;
    reinterpret_bits(value, product);
  }
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
