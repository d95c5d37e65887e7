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

// Storage and arithmetic of each dtype, for one lane or many: `Bits` is an
// unsigned integer and `Value` a float of the same width, or vectors of them. Vectors are passed by
// reference, since the ABI of a 64-byte vector passed by value depends on the translation unit's
// target.
//
// A GPU converts half and bfloat16 by its own instructions, to the same bits except for the payload
// of a NaN.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Copies the bits of `from` to `to`, of the same size: lanes or scalars, host or device.
template <class To, class From>
C10_HOST_DEVICE C10_ALWAYS_INLINE void reinterpret_bits(const From& from, To& to) {
  static_assert(sizeof(To) == sizeof(From));
  std::memcpy(&to, &from, sizeof(To));
}

/// A dtype that is computed with in its stored form.
template <class OpmathT, class BitsT, BitsT kExponentBits>
struct NativeFormat {
  using opmath_t = OpmathT;
  using Bits = BitsT;
  using Stored = BitsT;                             ///< one element in memory, as its bits
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

/// bfloat16: the upper half of a float; rounds to nearest, ties to even, and keeps NaN a NaN.
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

/// IEEE half. On the CPU it is converted by integer operations and one float addition. No subnormal
/// float occurs, so conversions are exact under flush-to-zero too, and need no special instruction.
template <>
struct FloatFormat<c10::Half> {
  using opmath_t = float;
  using Bits = uint32_t;
  using Stored = uint16_t;
  static constexpr Bits kExponent = 0x7C00U;
  static constexpr Bits kOneHalf = 0x3F000000U;  ///< 0.5F, whose ulp is half's smallest subnormal

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
    BitsVec half_bits = magnitude < 0x38800000U ? small : rounded;  // below 2^-14
    half_bits =
        magnitude >= 0x47800000U ? (half_bits & 0U) + kExponent : half_bits;       // 65536 and more
    half_bits = magnitude > 0x7F800000U ? (half_bits & 0U) + 0x7E00U : half_bits;  // NaN
    bits = half_bits | ((wide >> 16) & 0x8000U);
#endif
  }
};

/// A single lane: for the device's threads, the tail of a loop, compilers without vector types, and
/// the tests' reference. Rebind SimdVec it moves memory to lanes and back, and has the arithmetic
/// for which there are no operators.
///
/// Each operation rounds once, as IEEE 754 demands, and so gives the same bits on every machine and
/// instruction set. Write a product that is added to something as `fma`: whether a compiler
/// contracts a * b + c depends on flags and target, and changes the last bit.
template <class Element>
struct ScalarVec {
  using Format = FloatFormat<Element>;
  using Stored = typename Format::Stored;
  using Value = typename Format::opmath_t;
  using Bits = typename Format::Bits;
  using Mask = int32_t;
  static constexpr int64_t kWidth = 1;
  static constexpr int kUnroll = 1;  ///< of a block, which a step takes of each stream at once

  /// Vec of another dtype, in the same number.
  template <class Other>
  using Rebind = ScalarVec<Other>;

  // The host copies by memcpy, as vectors do: the memory holds floats, perhaps at an odd address. A
  // device has no odd addresses, and its compiler would copy byte by byte.
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
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void broadcast(Value from, Value& to) { to = from; }
  C10_HOST_DEVICE C10_ALWAYS_INLINE static bool any(const Mask& flags) { return flags != 0; }
  /// Sets each lane's index in its block.
  template <bool kDeinterleave>
  C10_ALWAYS_INLINE static void arange(Bits (&numbers)[1]) {
    numbers[0] = 0;
  }

  /// Widens a float to double, or leaves it.
  template <class To>
  C10_ALWAYS_INLINE static void convert(const Value& value, To& converted) {
    converted = static_cast<To>(value);
  }
  /// Converts a whole number below 2^31, rounded to nearest.
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void from_int(const Bits& count, Value& value) {
    value = static_cast<Value>(static_cast<int32_t>(count));
  }
  /// Truncates a value of 0 or more, below 2^31.
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void to_int(const Value& value, Bits& count) {
    count = static_cast<Bits>(static_cast<int32_t>(value));
  }
  /// Adds 1 where a flag is set.
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void increment_where(const Mask& flags, Bits& count) {
    count += static_cast<Bits>(flags);
  }
  /// table[index % 8], of a table that holds eight values twice.
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void lookup8(const Value (&table)[16], const Bits& index,
                                                        Value& value) {
    value = table[index % 8U];
  }
  /// result = a * b + c, rounded once. `result` may be any of the three.
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
