#pragma once

#include <mezzo/base/version.h>

#include <c10/macros/Macros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

// Storage and arithmetic of each dtype, for scalars and vectors: `Bits` is an unsigned integer and
// `opmath_t` (at::opmath_type) a float of the same width. Vectors are passed by reference, since
// the ABI of a 64-byte vector passed by value depends on the translation unit's target.
//
// A GPU converts float16 and bfloat16 with its own instructions, to the same bits except for the
// payload of a NaN.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Copies the bits of `from` to `to`, vectors or scalars of one size.
template <class To, class From>
C10_HOST_DEVICE C10_ALWAYS_INLINE void reinterpret_bits(const From& from, To& to) {
  static_assert(sizeof(To) == sizeof(From));
  std::memcpy(&to, &from, sizeof(To));
}

/// A dtype whose stored form is its opmath type.
template <class OpmathT, class BitsT, BitsT kExponentBits>
struct NativeFormat {
  using opmath_t = OpmathT;
  using Bits = BitsT;
  using Stored = BitsT;                             ///< the bits of an element in memory
  static constexpr Bits kExponent = kExponentBits;  ///< all set: inf or NaN

  template <class BitsVec, class ValueVec>
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void to_opmath(const BitsVec& bits, ValueVec& value) {
    reinterpret_bits(bits, value);
  }
  template <class ValueVec, class BitsVec>
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void from_opmath(const ValueVec& value, BitsVec& bits) {
    reinterpret_bits(value, bits);
  }
};

template <class Element>
struct FloatFormat;

template <>
struct FloatFormat<float> : NativeFormat<float, uint32_t, 0x7F800000U> {};

template <>
struct FloatFormat<double> : NativeFormat<double, uint64_t, 0x7FF0000000000000U> {};

/// bfloat16: the upper 16 bits of a float. Rounds to nearest, ties to even; a NaN stays NaN.
template <>
struct FloatFormat<c10::BFloat16> {
  using opmath_t = float;
  using Bits = uint32_t;
  using Stored = uint16_t;
  static constexpr Bits kExponent = 0x7F80U;

  template <class BitsVec, class ValueVec>
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void to_opmath(const BitsVec& bits, ValueVec& value) {
    const BitsVec upper = bits << 16;
    reinterpret_bits(upper, value);
  }
  template <class ValueVec, class BitsVec>
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void from_opmath(const ValueVec& value, BitsVec& bits) {
#ifdef __CUDA_ARCH__
    bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
    BitsVec wide;
    reinterpret_bits(value, wide);
    const BitsVec rounded = wide + 0x7FFFU + ((wide >> 16) & 1U);
    const BitsVec quiet_nan = wide | 0x400000U;
    wide = (wide & 0x7FFFFFFFU) > 0x7F800000U ? quiet_nan : rounded;
    bits = wide >> 16;
#endif
  }
};

/// IEEE float16. The CPU converts with integer operations and one float addition, without subnormal
/// floats: conversions are exact under flush-to-zero too, and need no F16C.
template <>
struct FloatFormat<c10::Half> {
  using opmath_t = float;
  using Bits = uint32_t;
  using Stored = uint16_t;
  static constexpr Bits kExponent = 0x7C00U;
  static constexpr Bits kOneHalf = 0x3F000000U;  ///< 0.5F, whose ulp is float16's min subnormal

  template <class BitsVec, class ValueVec>
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void to_opmath(const BitsVec& bits, ValueVec& value) {
#ifdef __CUDA_ARCH__
    value = __half2float(__ushort_as_half(static_cast<Stored>(bits)));
#else
    const BitsVec magnitude = bits & 0x7FFFU;
    const BitsVec normal = (magnitude << 13) + 0x38000000U;     // rebias the exponent by 127 - 15
    const BitsVec nonfinite = (magnitude << 13) + 0x70000000U;  // all exponent bits stay set
    const BitsVec shifted = magnitude + kOneHalf;               // 0.5 + the subnormal's value
    ValueVec subnormal_value;
    reinterpret_bits(shifted, subnormal_value);
    subnormal_value = subnormal_value - 0.5F;
    BitsVec subnormal;
    reinterpret_bits(subnormal_value, subnormal);
    BitsVec wide = magnitude >= kExponent ? nonfinite : normal;
    wide = magnitude < 0x0400U ? subnormal : wide;
    wide = wide | ((bits & 0x8000U) << 16);
    reinterpret_bits(wide, value);
#endif
  }
  template <class ValueVec, class BitsVec>
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void from_opmath(const ValueVec& value, BitsVec& bits) {
#ifdef __CUDA_ARCH__
    bits = __half_as_ushort(__float2half_rn(value));
#else
    BitsVec wide;
    reinterpret_bits(value, wide);
    const BitsVec magnitude = wide & 0x7FFFFFFFU;
    const BitsVec rounded = (magnitude - 0x38000000U + 0x0FFFU + ((magnitude >> 13) & 1U)) >> 13;
    ValueVec small_value;
    reinterpret_bits(magnitude, small_value);
    small_value = small_value + 0.5F;  // rounds to a multiple of the smallest subnormal
    BitsVec small;
    reinterpret_bits(small_value, small);
    small = small - kOneHalf;
    BitsVec fp16 = magnitude < 0x38800000U ? small : rounded;          // below 2^-14
    fp16 = magnitude >= 0x47800000U ? (fp16 & 0U) + kExponent : fp16;  // 65536 and more
    fp16 = magnitude > 0x7F800000U ? (fp16 & 0U) + 0x7E00U : fp16;     // NaN
    bits = fp16 | ((wide >> 16) & 0x8000U);
#endif
  }
};

/// A vector of one element with the interface of SimdVec: for CUDA threads, loop tails, compilers
/// without vector types, and the tests' reference.
///
/// Each operation rounds once, as IEEE 754 demands, and is bitwise identical on all instruction
/// sets. Write a multiply-add as `fma`: whether a compiler contracts a * b + c depends on flags and
/// target, and changes the last bit.
template <class Element>
struct ScalarVec {
  using Format = FloatFormat<Element>;
  using Stored = typename Format::Stored;
  using Value = typename Format::opmath_t;
  using Bits = typename Format::Bits;
  using Mask = int32_t;
  static constexpr int64_t kWidth = 1;
  static constexpr int kUnroll = 1;  ///< vectors that a step loads of each array at once

  /// The vector type of another dtype with as many elements.
  template <class Other>
  using Rebind = ScalarVec<Other>;

  // memcpy, since host memory may be misaligned and has another type. On a device memory is
  // aligned, and nvcc would copy byte by byte.
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void load(const Stored* from, Bits& bits) {
#ifdef __CUDA_ARCH__
    bits = *from;
#else
    Stored stored;
    std::memcpy(&stored, from, sizeof(Stored));
    bits = stored;
#endif
  }
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void store(const Bits& bits, Stored* to) {
    const auto stored = static_cast<Stored>(bits);
#ifdef __CUDA_ARCH__
    *to = stored;
#else
    std::memcpy(to, &stored, sizeof(Stored));
#endif
  }
  template <bool kDeinterleave>
  C10_ALWAYS_INLINE static void load_unrolled(const Stored* from, Bits (&bits)[1]) {
    load(from, bits[0]);
  }
  template <bool kDeinterleave>
  C10_ALWAYS_INLINE static void store_unrolled(const Bits (&bits)[1], Stored* to) {
    store(bits[0], to);
  }
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void broadcast(Value scalar, Value& value) {
    value = scalar;
  }
  C10_HOST_DEVICE C10_ALWAYS_INLINE static bool any(const Mask& mask) { return mask != 0; }
  /// Sets the index of each element that load_unrolled loads.
  template <bool kDeinterleave>
  C10_ALWAYS_INLINE static void arange(Bits (&indices)[1]) {
    indices[0] = 0;
  }

  /// Converts float to double, or copies.
  template <class To>
  C10_ALWAYS_INLINE static void convert(const Value& value, To& converted) {
    converted = static_cast<To>(value);
  }
  /// Converts an integer below 2^31, rounded to nearest.
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void from_int(const Bits& integer, Value& value) {
    value = static_cast<Value>(static_cast<int32_t>(integer));
  }
  /// Truncates a value in [0, 2^31).
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void to_int(const Value& value, Bits& integer) {
    integer = static_cast<Bits>(static_cast<int32_t>(value));
  }
  /// Adds 1 where the mask is set.
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void increment_where(const Mask& mask, Bits& count) {
    count += static_cast<Bits>(mask);
  }
  /// Looks up table[index % 8]; entries 8 to 15 repeat 0 to 7.
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void lookup8(const Value (&table)[16], const Bits& index,
                                                        Value& value) {
    value = table[index % 8U];
  }
  /// result = a * b + c, rounded once. `result` may alias an operand.
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void fma(const Value& a, const Value& b, const Value& c,
                                                    Value& result) {
    result = std::fma(a, b, c);
  }
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void sqrt(const Value& x, Value& result) {
    result = std::sqrt(x);
  }
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
