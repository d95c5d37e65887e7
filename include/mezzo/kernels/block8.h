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

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Elements that share a scale. The blocks of a tensor begin at its first element in memory.
inline constexpr int64_t kBlock8 = 256;

C10_HOST_DEVICE constexpr int64_t blocks8_of(int64_t elements) {
  return (elements + kBlock8 - 1) / kBlock8;
}

/// What values of a block are multiplied by before they are rounded. A scale below float's normal
/// numbers is taken for 0; one of inf or NaN stays, and makes NaN of the whole block.
C10_HOST_DEVICE inline float inverse_of_scale(float& scale) {
  if (scale < 0x1p-126F) scale = 0.0F;
  const bool has_inverse = scale > 0.0F && scale <= 0x1.FFFFFEp127F;
  return has_inverse ? 1.0F / scale : 0.0F;
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
  // From n to the value: (n + 0.5) * slope + offset, at the exponent of n + 0.5 modulo 8. Zero and
  // one have the same exponent: with signs one line has both, and without zero is asked for.
  float slope[16];
  float offset[16];
  // From a value x to n: the whole part of x * steps + first, and at most `last`, of the stretch of
  // x. Stretch 0 is zero and decade 0, and stretch 7 is one. `threshold` i is where i + 1 begins;
  // between two of them lie more than 2.5 binades.
  float threshold[16];
  float steps[16];
  float first[16];
  float last[16];

  static constexpr Block8Map make(bool is_signed) {
    constexpr double kDecadeEnd[] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0};
    Block8Map map{};
    double below = 0;  // the largest value below the decade
    for (int i = 0; i < 7; ++i) {
      const double end = kDecadeEnd[i];
      const double values = is_signed ? 1 << i : 2 << i;
      const double spacing = 0.9 * end / values;
      const int exponent = 127 + (is_signed ? i : i + 1);  // as a float's bits have it
      map.slope[exponent % 8] = static_cast<float>(spacing);
      map.offset[exponent % 8] = static_cast<float>(0.1 * end - values * spacing);
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
    map.slope[exponent % 8] = is_signed ? 1.0F / 128 : 0.0F;
    map.offset[exponent % 8] = is_signed ? -1.0F / 256 : 1.0F;
    map.threshold[6] = static_cast<float>((below + 1) / 2);
    map.first[7] = map.last[7] = is_signed ? 128 : 256;
    for (float* const table :
         {map.slope, map.offset, map.threshold, map.steps, map.first, map.last}) {
      for (int i = 0; i < 8; ++i) table[8 + i] = table[i];
    }
    return map;
  }
};

/// Both maps, for a first moment and for others: what a kernel on a device takes as an argument.
struct Block8Maps {
  Block8Map of_signed = Block8Map::make(true);
  Block8Map of_unsigned = Block8Map::make(false);

  template <bool kIsSigned>
  C10_HOST_DEVICE const Block8Map& of() const {
    if constexpr (kIsSigned) {
      return of_signed;
    } else {
      return of_unsigned;
    }
  }
};

/// The value of codes in blocks of `scale`, by `Block8Map::make(kIsSigned)`.
template <bool kIsSigned, class Lanes>
C10_HOST_DEVICE C10_ALWAYS_INLINE void widen_block8(const Block8Map& map,
                                                    const typename Lanes::Bits& code,
                                                    const typename Lanes::Value& scale,
                                                    typename Lanes::Value& value) {
  using Bits = typename Lanes::Bits;
  using Value = typename Lanes::Value;
  Bits n;
  Bits sign;
  if constexpr (kIsSigned) {
    n = code - 127U;
    sign = n & 0x80000000U;
    n = sign != 0U ? -n : n;
  } else {
    n = code + 1U;
  }
  Value position;
  Lanes::from_count(n, position);
  position = position + 0.5F;
  Bits bits;
  reinterpret_bits(position, bits);
  const Bits exponent = bits >> 23;
  Value slope;
  Lanes::look_up(map.slope, exponent, slope);
  Lanes::look_up(map.offset, exponent, value);
  Lanes::fma(slope, position, value, value);
  reinterpret_bits(value, bits);
  if constexpr (kIsSigned) {
    bits = bits | sign;
  } else {
    bits = n == 1U ? n - 1U : bits;
  }
  reinterpret_bits(bits, value);
  value = value * scale;
}

/// The codes nearest to values in blocks, `inverse` being 1 / scale. Values within a few units in
/// the last place of the middle of two codes may take either. A NaN takes the code of 1.
template <bool kIsSigned, class Lanes>
C10_HOST_DEVICE C10_ALWAYS_INLINE void narrow_block8(const Block8Map& map,
                                                     const typename Lanes::Value& value,
                                                     const typename Lanes::Value& inverse,
                                                     typename Lanes::Bits& code) {
  using Bits = typename Lanes::Bits;
  using Value = typename Lanes::Value;
  constexpr uint32_t kOne = 0x3F800000U;  // the bits of floats of 0 or more have their order
  Bits bits;
  reinterpret_bits(value, bits);
  const auto is_negative = (bits & 0x80000000U) != 0U;
  const Bits none = bits & 0U;
  bits = bits & 0x7FFFFFFFU;
  Value x;
  reinterpret_bits(bits, x);
  x = x * inverse;
  reinterpret_bits(x, bits);
  Bits most = none + kOne;
  if constexpr (kIsSigned) {  // the nearest value to -1 is that of code 0
    most = is_negative ? none + (kOne - 0x20000U) : most;
  }
  bits = bits < most ? bits : most;
  reinterpret_bits(bits, x);
  // As a number, the bits are a logarithm good enough to leave one threshold to be asked.
  const Bits lowest = none + 0x34800000U;
  const Bits in_map = bits > lowest ? bits : lowest;
  Value logarithm;
  Lanes::from_count(in_map, logarithm);
  Value third;
  Value start;
  Lanes::broadcast(1.0F / (3.2F * 0x1p23F), third);
  Lanes::broadcast(-(127.0F - 22.0F) / 3.2F, start);
  Lanes::fma(logarithm, third, start, logarithm);
  Bits stretch;
  Lanes::to_count(logarithm, stretch);
  Value threshold;
  Lanes::look_up(map.threshold, stretch, threshold);
  Lanes::count_where(x >= threshold, stretch);
  Value steps;
  Value first;
  Value last;
  Lanes::look_up(map.steps, stretch, steps);
  Lanes::look_up(map.first, stretch, first);
  Lanes::look_up(map.last, stretch, last);
  Lanes::fma(x, steps, first, x);
  Bits position;
  Bits end;
  reinterpret_bits(x, position);
  reinterpret_bits(last, end);
  position = position < end ? position : end;
  reinterpret_bits(position, x);
  Lanes::to_count(x, code);
  if constexpr (kIsSigned) {
    const Bits negative = 127U - code;
    code = is_negative ? negative : code + 127U;
  } else {
    code = code - 1U;
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
