#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/float_format.h>

#include <c10/macros/Macros.h>

#include <cstdint>

// The 8-bit format of moments: bitsandbytes' dynamic map, with a float scale for each block of 256
// elements, the block's largest magnitude (Dettmers et al., 8-bit Optimizers via Block-wise
// Quantization, 2022).
//
// A code is a whole number n with a sign. The leading bit of n chooses a decade of [0, 1], and the
// bits below it choose one of the decade's evenly spaced values. So a code becomes a value, and a
// value a code, by one fused multiply-add, whose two numbers depend on the decade. Everything is
// written for one lane or many, and gives the same bits for each.

// A device sees no constants of the host, and has no static variables in functions for both.
#ifdef __CUDA_ARCH__
#define MEZZO_CONSTANT constexpr
#else
#define MEZZO_CONSTANT static constexpr
#endif

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Elements that share a scale. The blocks of a tensor begin at its first element in memory.
inline constexpr int64_t kBlock8 = 256;

C10_HOST_DEVICE constexpr int64_t blocks8_of(int64_t elements) {
  return (elements + kBlock8 - 1) / kBlock8;
}

/// The dtype of codes, for lanes that load and store them.
struct Block8Code;

template <>
struct FloatFormat<Block8Code> {
  using Value = float;
  using Bits = uint32_t;
  using Stored = uint8_t;
};

/// The numbers of the map: of codes with a sign, which are 127 + n or 127 - n, and of codes
/// without, which are n - 1.
///
///            zero   decade i of 0 to 6, 10^(i-7) to 10^(i-6)     one
///   signed   n = 0  2^i values,     n = 2^i     to 2^(i+1) - 1   n = 128
///   unsigned n = 1  2^(i+1) values, n = 2^(i+1) to 2^(i+2) - 1   n = 256
///
/// Tables for `look_up` hold their eight numbers twice.
struct Block8Map {
  // From n to the value: n * slope + offset, at the exponent of n as a float, modulo 8.
  float slope[16];
  float offset[16];
  // From a value x to n: the whole part of x * steps + first, and at most `last`, of the stretch of
  // x. Stretch 0 is zero and decade 0, and stretch 7 is one. `threshold` i is where i + 1 begins;
  // between two of them lie more than 2.5 binades.
  float threshold[16];
  float steps[16];
  float first[16];
  float last[16];
  uint32_t zero;  ///< the n of zero

  static constexpr Block8Map make(bool is_signed) {
    constexpr double kDecadeEnd[] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0};
    Block8Map map{};
    map.zero = is_signed ? 0 : 1;
    double below = 0;  // the largest value below the decade
    for (int i = 0; i < 7; ++i) {
      const double end = kDecadeEnd[i];
      const double values = is_signed ? 1 << i : 2 << i;
      const double spacing = 0.9 * end / values;
      const int exponent = 127 + (is_signed ? i : i + 1);  // a float's bits, of all n in here
      map.slope[exponent % 8] = static_cast<float>(spacing);
      map.offset[exponent % 8] = static_cast<float>(0.1 * end + (0.5 - values) * spacing);
      const double lowest = 0.1 * end + 0.5 * spacing;
      const double enters = (below + lowest) / 2;
      if (i > 0) map.threshold[i - 1] = static_cast<float>(enters);
      map.steps[i] = static_cast<float>(1 / spacing);
      map.first[i] = static_cast<float>(values - 0.1 * end / spacing);
      map.last[i] = static_cast<float>(2 * values - 1);
      if (i == 0) {  // a line through both of its ends
        const double leaves = is_signed ? 2 * enters : lowest + spacing / 2;
        map.steps[0] = static_cast<float>(1 / (leaves - enters));
        map.first[0] = static_cast<float>(values - enters / (leaves - enters));
      }
      below = end - 0.5 * spacing;
    }
    const int exponent = 127 + (is_signed ? 7 : 8);
    map.offset[exponent % 8] = 1;
    map.threshold[6] = static_cast<float>((below + 1) / 2);
    map.first[7] = map.last[7] = is_signed ? 128 : 256;
    for (float* const table :
         {map.slope, map.offset, map.threshold, map.steps, map.first, map.last}) {
      for (int i = 0; i < 8; ++i) table[8 + i] = table[i];
    }
    return map;
  }
};

/// The value of codes in blocks of `scale`.
template <bool kIsSigned, class Lanes>
C10_HOST_DEVICE C10_ALWAYS_INLINE void widen_block8(const typename Lanes::Bits& code,
                                                    const typename Lanes::Value& scale,
                                                    typename Lanes::Value& value) {
  using Bits = typename Lanes::Bits;
  using Value = typename Lanes::Value;
  MEZZO_CONSTANT Block8Map kMap = Block8Map::make(kIsSigned);
  Bits sign = code & 0U;
  Bits n;
  if constexpr (kIsSigned) {
    n = code - 127U;
    sign = n & 0x80000000U;
    n = sign != 0U ? -n : n;
  } else {
    n = code + 1U;
  }
  Value whole;
  Lanes::from_count(n, whole);
  Bits bits;
  reinterpret_bits(whole, bits);
  const Bits exponent = bits >> 23;
  Value slope;
  Lanes::look_up(kMap.slope, exponent, slope);
  Lanes::look_up(kMap.offset, exponent, value);
  Lanes::fma(slope, whole, value, value);
  reinterpret_bits(value, bits);
  bits = n == kMap.zero ? sign : bits | sign;
  reinterpret_bits(bits, value);
  value = value * scale;
}

/// The codes nearest to values in blocks, `inverse` being 1 / scale. Values within a few units in
/// the last place of the middle of two codes may take either. A NaN takes the code of 1.
template <bool kIsSigned, class Lanes>
C10_HOST_DEVICE C10_ALWAYS_INLINE void narrow_block8(const typename Lanes::Value& value,
                                                     const typename Lanes::Value& inverse,
                                                     typename Lanes::Bits& code) {
  using Bits = typename Lanes::Bits;
  using Value = typename Lanes::Value;
  MEZZO_CONSTANT Block8Map kMap = Block8Map::make(kIsSigned);
  Bits bits;
  reinterpret_bits(value, bits);
  const Bits sign = bits & 0x80000000U;
  bits = bits & 0x7FFFFFFFU;
  Value x;
  reinterpret_bits(bits, x);
  x = x * inverse;
  Value one;
  Lanes::broadcast(1.0F, one);
  x = x < one ? x : one;
  // The bits of x as a number are a logarithm, good enough to leave one threshold to be asked.
  reinterpret_bits(x, bits);
  Value logarithm;
  Lanes::from_count(bits, logarithm);
  Value third;
  Value start;
  Lanes::broadcast(1.0F / (3.2F * 0x1p23F), third);
  Lanes::broadcast(-(127.0F - 20.7F) / 3.2F, start);
  Lanes::fma(logarithm, third, start, logarithm);
  const Value zero = x * 0.0F;
  logarithm = logarithm > zero ? logarithm : zero;
  Bits stretch;
  Lanes::to_count(logarithm, stretch);
  Value threshold;
  Lanes::look_up(kMap.threshold, stretch, threshold);
  Lanes::count_where(x >= threshold, stretch);
  Value steps;
  Value first;
  Value last;
  Lanes::look_up(kMap.steps, stretch, steps);
  Lanes::look_up(kMap.first, stretch, first);
  Lanes::look_up(kMap.last, stretch, last);
  Lanes::fma(x, steps, first, x);
  x = x < last ? x : last;
  Lanes::to_count(x, code);
  if constexpr (kIsSigned) {
    const Bits negative = 127U - code;
    const Bits lowest = code & 0U;
    code = sign == 0U ? code + 127U : negative;
    code = (code & 0x80000000U) != 0U ? lowest : code;  // -1, whose nearest value is that of 0
  } else {
    code = code - 1U;
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#undef MEZZO_CONSTANT
