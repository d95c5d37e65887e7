#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/adam_functor.h>
#include <mezzo/kernels/float_format.h>
#include <mezzo/kernels/step_args.h>
#include <mezzo/kernels/weight_formats.h>

#include <c10/core/ScalarType.h>
#include <c10/macros/Macros.h>
#include <c10/util/BFloat16.h>

#include <cstdint>
#include <type_traits>

// The 8-bit format of moments: bitsandbytes' dynamic map, with a float scale for each block of 256
// elements, the block's largest magnitude (Dettmers et al., 8-bit Optimizers via Block-wise
// Quantization, 2022).
//
// A code is a whole number n with a sign. The leading bit of n chooses a decade of [0, 1], and the
// bits below it choose one of the decade's evenly spaced values. So a code becomes a value, and a
// value a code, by one fused multiply-add, whose two numbers depend on the decade. Everything is
// written for one lane or many, and gives the same bits for each. Fewer instructions are what makes
// a step faster here: it has two of these conversions for each moment.

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Elements that share a scale. The blocks of a tensor begin at its first element in memory.
inline constexpr int64_t kQuantBlockSize = 256;

C10_HOST_DEVICE constexpr int64_t num_quant_blocks(int64_t elements) {
  return (elements + kQuantBlockSize - 1) / kQuantBlockSize;
}

/// What values of a block are multiplied by before they are rounded. A scale below float's normal
/// numbers is taken for 0; one of inf or NaN stays, and makes NaN of the whole block.
C10_HOST_DEVICE inline float invert_absmax(float& scale) {
  if (scale < 0x1p-126F) scale = 0.0F;
  const bool has_inverse = scale > 0.0F && scale <= 0x1.FFFFFEp127F;
  return has_inverse ? 1.0F / scale : 0.0F;
}

/// The dtype of codes, for lanes that load and store them.
struct QuantizedByte;

template <>
struct FloatFormat<QuantizedByte> {
  using opmath_t = float;
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
/// Tables for `lookup8` hold their eight numbers twice.
struct DynamicMap {
  /// What is added to a value in [0, 1], so that the logarithm of the sum has an end.
  static constexpr float kShift = 0x1p-22F;

  // From a position, 4 n with a sign and n without, to the value: position * slope + offset, at the
  // exponent of the position modulo 8. Zero and one have the same exponent, and a line.
  float slope[16];
  float offset[16];
  // From a value x + kShift to n with signs, to the code without: the whole part of
  // it * steps + first, and at most `last`, of the segment of x. Segment 0 is zero and decade 0,
  // and segment 7 is one. `threshold` i is where i + 1 begins; between two lie more than 2.5
  // binades.
  float threshold[16];
  float steps[16];
  float first[16];
  float last[16];

  static constexpr DynamicMap make(bool is_signed) {
    constexpr double kDecadeEnd[] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0};
    DynamicMap map{};
    double below = 0;  // the largest value below the decade
    for (int i = 0; i < 7; ++i) {
      const double end = kDecadeEnd[i];
      const double values = is_signed ? 1 << i : 2 << i;
      const double spacing = 0.9 * end / values;
      const int exponent = 127 + i + (is_signed ? 2 : 1);  // as a float's bits have it
      map.slope[exponent % 8] = static_cast<float>(is_signed ? spacing / 4 : spacing);
      map.offset[exponent % 8] = static_cast<float>(0.1 * end - (values - 0.5) * spacing);
      const double lowest = 0.1 * end + 0.5 * spacing;
      const double enters = (below + lowest) / 2;
      double steps = 1 / spacing;
      double first = values - 0.1 * end / spacing;
      if (i == 0) {  // a line through the beginnings of n and, if it has one, n + 1
        steps = is_signed ? 0.5 / enters : 1 / (lowest + spacing / 2 - enters);
        first = values - enters * steps;
      } else {
        map.threshold[i - 1] = static_cast<float>(enters + kShift);
      }
      map.steps[i] = static_cast<float>(steps);
      map.first[i] = static_cast<float>(first - kShift * steps - (is_signed ? 0 : 1));
      map.last[i] = static_cast<float>(2 * values - (is_signed ? 1 : 2));
      below = end - 0.5 * spacing;
    }
    const int exponent = is_signed ? 136 : 135;
    map.slope[exponent % 8] = is_signed ? 1.0F / 512 : 1.0F / 255;
    map.offset[exponent % 8] = is_signed ? 0.0F : -1.0F / 255;
    map.threshold[6] = static_cast<float>((below + 1) / 2 + kShift);
    map.threshold[7] = 2.0F;  // none
    map.first[7] = map.last[7] = is_signed ? 128 : 255;
    for (float* const table :
         {map.slope, map.offset, map.threshold, map.steps, map.first, map.last}) {
      for (int i = 0; i < 8; ++i) table[8 + i] = table[i];
    }
    return map;
  }
};

/// Both maps, for a first moment and for others: what a kernel on a device takes as an argument.
struct DynamicMaps {
  DynamicMap signed_map = DynamicMap::make(true);
  DynamicMap unsigned_map = DynamicMap::make(false);

  template <bool kIsSigned>
  C10_HOST_DEVICE constexpr const DynamicMap& of() const {
    return kIsSigned ? signed_map : unsigned_map;
  }
};

inline constexpr DynamicMaps kDynamicMaps;

/// The value of codes in blocks of `scale`, by `DynamicMap::make(kIsSigned)`.
template <bool kIsSigned, class Vec>
C10_HOST_DEVICE C10_ALWAYS_INLINE void dequantize_block(const DynamicMap& map,
                                                        const typename Vec::Bits& code,
                                                        const typename Vec::Value& scale,
                                                        typename Vec::Value& value) {
  typename Vec::Value position;
  Vec::from_int(code, position);
  position = kIsSigned ? position * 4.0F - 508.0F : position + 1.0F;  // exact
  typename Vec::Bits bits;
  reinterpret_bits(position, bits);
  const typename Vec::Bits exponent = bits >> 23;  // modulo 8
  typename Vec::Value slope;
  Vec::lookup8(map.slope, exponent, slope);
  Vec::lookup8(map.offset, exponent, value);
  if constexpr (kIsSigned) {
    typename Vec::Bits offset;
    reinterpret_bits(value, offset);
    offset = offset ^ (bits & 0x80000000U);
    reinterpret_bits(offset, value);
  }
  Vec::fma(slope, position, value, value);
  value = value * scale;
}

/// The codes nearest to values in blocks, `inverse` being 1 / scale. Values within a few units in
/// the last place of the middle of two codes may take either. The signs of values whose map has
/// none are not looked at.
template <bool kIsSigned, class Vec>
C10_HOST_DEVICE C10_ALWAYS_INLINE void quantize_block(const DynamicMap& map,
                                                      const typename Vec::Value& value,
                                                      const typename Vec::Value& inverse,
                                                      typename Vec::Bits& code) {
  using Bits = typename Vec::Bits;
  using Value = typename Vec::Value;
  Bits bits;
  reinterpret_bits(value, bits);
  const Bits sign = bits & 0x80000000U;
  bits = bits & 0x7FFFFFFFU;
  Value x;
  Value shift;
  reinterpret_bits(bits, x);
  Vec::broadcast(DynamicMap::kShift, shift);
  Vec::fma(x, inverse, shift, x);
  // As a number, the bits are a logarithm good enough to leave one threshold to be asked. The sum
  // is rounded to a whole number, in the last bits of a float between 2^23 and 2^24.
  reinterpret_bits(x, bits);
  Value logarithm;
  Value third;
  Value start;
  Vec::from_int(bits, logarithm);
  Vec::broadcast(0x1p-23F / 3.23F, third);
  Vec::broadcast(0x1.8p23F - 33.0F, start);
  Vec::fma(logarithm, third, start, logarithm);
  Bits segment;
  reinterpret_bits(logarithm, segment);  // modulo 8
  Value threshold;
  Vec::lookup8(map.threshold, segment, threshold);
  Vec::increment_where(x >= threshold, segment);
  Value steps;
  Value first;
  Value last;
  Vec::lookup8(map.steps, segment, steps);
  Vec::lookup8(map.first, segment, first);
  Vec::lookup8(map.last, segment, last);
  Vec::fma(x, steps, first, x);
  Bits end;
  reinterpret_bits(x, bits);
  reinterpret_bits(last, end);
  bits = bits < end ? bits : end;  // the bits of floats of 0 or more have their order
  if constexpr (kIsSigned) bits = bits | sign;
  reinterpret_bits(bits, x);
  Vec::to_int(x, code);
  if constexpr (kIsSigned) {
    typename Vec::Mask number;  // with a sign
    reinterpret_bits(code, number);
    number = number + 127;
    number =
        number > 0 ? number : typename Vec::Mask{};  // the nearest value to -1 is that of code 0
    reinterpret_bits(number, code);
  }
}

/// One parameter's part of AdamW8bit's step: a block's moments become floats, take the step of
/// optimizer_step_body.h, and become codes under the block's new scale.
struct AdamW8bitParamArgs {
  ParamPointers pointers;          ///< its moments are codes, or floats without scales
  float* scales[2];                ///< a float for each block of a moment; null: moments are floats
  at::ScalarType parameter_dtype;  ///< float or bfloat16; gradients have it too, or are float
  AdamCoefficients coefficients;
  StepArgs use;

  C10_HOST_DEVICE int64_t elements() const { return pointers.numel; }
};

/// WeightFormat rounded stochastically, with moments that are floats while they are computed with.
struct StochasticFloatMomentsFormat : StochasticWeightFormat {
  using Moment = float;
};

/// The weights of an AdamW8bit: a parameter of bfloat16 is rounded stochastically.
template <class Parameter>
using AdamW8bitWeightFormat =
    std::conditional_t<std::is_same_v<Parameter, float>, PlainWeightFormat<float>,
                       StochasticFloatMomentsFormat>;

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
