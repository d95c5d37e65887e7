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
template <class ValueT, class BitsT, BitsT kExponentBits>
struct NativeFormat {
  using Value = ValueT;
  using Bits = BitsT;
  using Stored = BitsT;                             ///< one element in memory, as its bits
  static constexpr Bits kExponent = kExponentBits;  ///< all set: inf or NaN

  template <class BitLanes, class ValueLanes>
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void widen(const BitLanes& bits, ValueLanes& value) {
    reinterpret_bits(bits, value);
  }
  template <class ValueLanes, class BitLanes>
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void narrow(const ValueLanes& value, BitLanes& bits) {
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
  using Value = float;
  using Bits = uint32_t;
  using Stored = uint16_t;
  static constexpr Bits kExponent = 0x7F80U;

  template <class BitLanes, class ValueLanes>
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void widen(const BitLanes& bits, ValueLanes& value) {
    const BitLanes upper = bits << 16;
    reinterpret_bits(upper, value);
  }
  template <class ValueLanes, class BitLanes>
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void narrow(const ValueLanes& value, BitLanes& bits) {
#ifdef __CUDA_ARCH__
    bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
    BitLanes wide;
    reinterpret_bits(value, wide);
    const BitLanes rounded = wide + 0x7FFFU + ((wide >> 16) & 1U);
    const BitLanes quiet_nan = wide | 0x400000U;
    wide = (wide & 0x7FFFFFFFU) > 0x7F800000U ? quiet_nan : rounded;
    bits = wide >> 16;
#endif
  }
};

/// IEEE half. On the CPU it is converted by integer operations and one float addition. No subnormal
/// float occurs, so conversions are exact under flush-to-zero too, and need no special instruction.
template <>
struct FloatFormat<c10::Half> {
  using Value = float;
  using Bits = uint32_t;
  using Stored = uint16_t;
  static constexpr Bits kExponent = 0x7C00U;
  static constexpr Bits kOneHalf = 0x3F000000U;  ///< 0.5F, whose ulp is half's smallest subnormal

  template <class BitLanes, class ValueLanes>
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void widen(const BitLanes& bits, ValueLanes& value) {
#ifdef __CUDA_ARCH__
    value = __half2float(__ushort_as_half(static_cast<Stored>(bits)));
#else
    const BitLanes magnitude = bits & 0x7FFFU;
    const BitLanes normal = (magnitude << 13) + 0x38000000U;     // rebias the exponent by 127 - 15
    const BitLanes nonfinite = (magnitude << 13) + 0x70000000U;  // all exponent bits stay set
    const BitLanes shifted = magnitude + kOneHalf;               // 0.5 + the subnormal's value
    ValueLanes subnormal_value;
    reinterpret_bits(shifted, subnormal_value);
    subnormal_value = subnormal_value - 0.5F;
    BitLanes subnormal;
    reinterpret_bits(subnormal_value, subnormal);
    BitLanes wide = magnitude >= kExponent ? nonfinite : normal;
    wide = magnitude < 0x0400U ? subnormal : wide;
    wide = wide | ((bits & 0x8000U) << 16);
    reinterpret_bits(wide, value);
#endif
  }
  template <class ValueLanes, class BitLanes>
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void narrow(const ValueLanes& value, BitLanes& bits) {
#ifdef __CUDA_ARCH__
    bits = __half_as_ushort(__float2half_rn(value));
#else
    BitLanes wide;
    reinterpret_bits(value, wide);
    const BitLanes magnitude = wide & 0x7FFFFFFFU;
    const BitLanes rounded = (magnitude - 0x38000000U + 0x0FFFU + ((magnitude >> 13) & 1U)) >> 13;
    ValueLanes small_value;
    reinterpret_bits(magnitude, small_value);
    small_value = small_value + 0.5F;  // rounds to a multiple of the smallest subnormal
    BitLanes small;
    reinterpret_bits(small_value, small);
    small = small - kOneHalf;
    BitLanes narrow = magnitude < 0x38800000U ? small : rounded;             // below 2^-14
    narrow = magnitude >= 0x47800000U ? (narrow & 0U) + kExponent : narrow;  // 65536 and more
    narrow = magnitude > 0x7F800000U ? (narrow & 0U) + 0x7E00U : narrow;     // NaN
    bits = narrow | ((wide >> 16) & 0x8000U);
#endif
  }
};

/// A single lane: for the device's threads, the tail of a loop, compilers without vector types, and
/// the tests' reference. Like VectorLanes it moves memory to lanes and back, and has the arithmetic
/// for which there are no operators.
///
/// Each operation rounds once, as IEEE 754 demands, and so gives the same bits on every machine and
/// instruction set. Write a product that is added to something as `fma`: whether a compiler
/// contracts a * b + c depends on flags and target, and changes the last bit.
template <class Element>
struct ScalarLanes {
  using Format = FloatFormat<Element>;
  using Stored = typename Format::Stored;
  using Value = typename Format::Value;
  using Bits = typename Format::Bits;
  using Flags = int32_t;
  static constexpr int64_t kWidth = 1;
  static constexpr int kVectors = 1;  ///< of a block, which a step takes of each stream at once

  /// Lanes of another dtype, in the same number.
  template <class Other>
  using Like = ScalarLanes<Other>;

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
  template <bool kEvenOdd>
  C10_ALWAYS_INLINE static void load_block(const Stored* from, Bits (&bits)[1]) {
    load(from, bits[0]);
  }
  template <bool kEvenOdd>
  C10_ALWAYS_INLINE static void store_block(const Bits (&bits)[1], Stored* to) {
    store(bits[0], to);
  }
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void broadcast(Value from, Value& to) { to = from; }
  C10_HOST_DEVICE C10_ALWAYS_INLINE static bool any(const Flags& flags) { return flags != 0; }
  /// Sets each lane's index in its block.
  template <bool kEvenOdd>
  C10_ALWAYS_INLINE static void enumerate(Bits (&numbers)[1]) {
    numbers[0] = 0;
  }

  /// Widens a float to double, or leaves it.
  template <class Wide>
  C10_ALWAYS_INLINE static void convert(const Value& value, Wide& wide) {
    wide = static_cast<Wide>(value);
  }
  /// Converts a whole number below 2^31, rounded to nearest.
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void from_count(const Bits& count, Value& value) {
    value = static_cast<Value>(static_cast<int32_t>(count));
  }
  /// Truncates a value of 0 or more, below 2^31.
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void to_count(const Value& value, Bits& count) {
    count = static_cast<Bits>(static_cast<int32_t>(value));
  }
  /// Adds 1 where a flag is set.
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void count_where(const Flags& flags, Bits& count) {
    count += static_cast<Bits>(flags);
  }
  /// table[index % 8], of a table that holds eight values twice.
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void look_up(const Value (&table)[16], const Bits& index,
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
