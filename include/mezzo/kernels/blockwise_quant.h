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

// Blockwise quantization of moments to 8 bits (Dettmers et al., 8-bit Optimizers via Block-wise
// Quantization, 2022): bitsandbytes' dynamic map, and a float32 absmax for each block of 256
// elements.
//
// A quantized value (qval) is an integer n with a sign. The leading bit of n selects a decade of
// [0, 1], and the bits below it one of the decade's evenly spaced values. Quantization and
// dequantization are one fused multiply-add with coefficients of the decade, for scalars and
// vectors with bitwise identical results. A step has two of each, so their instructions bound its
// speed.

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Elements per absmax. Blocks begin at a tensor's first element in memory.
inline constexpr int64_t kQuantBlockSize = 256;

C10_HOST_DEVICE constexpr int64_t num_quant_blocks(int64_t elements) {
  return (elements + kQuantBlockSize - 1) / kQuantBlockSize;
}

/// Returns the factor of a block's values before quantization. Sets a subnormal `absmax` to 0. An
/// absmax of inf or NaN stays, and dequantizes the whole block to NaN.
C10_HOST_DEVICE inline float invert_absmax(float& absmax) {
  if (absmax < 0x1p-126F) absmax = 0.0F;
  const bool is_invertible = absmax > 0.0F && absmax <= 0x1.FFFFFEp127F;
  return is_invertible ? 1.0F / absmax : 0.0F;
}

/// Element type of qvals, for vectors that load and store them.
struct QuantizedByte;

template <>
struct FloatFormat<QuantizedByte> {
  using opmath_t = float;
  using Bits = uint32_t;
  using Stored = uint8_t;
};

/// bitsandbytes' create_dynamic_map. A signed qval is 127 + n or 127 - n, an unsigned one n - 1.
///
///            zero   decade i of 0 to 6, 10^(i-7) to 10^(i-6)     one
///   signed   n = 0  2^i values,     n = 2^i     to 2^(i+1) - 1   n = 128
///   unsigned n = 1  2^(i+1) values, n = 2^(i+1) to 2^(i+2) - 1   n = 256
///
/// Tables for `lookup8` hold their eight entries twice.
struct DynamicMap {
  /// Added to values in [0, 1] to bound the logarithm of the sum.
  static constexpr float kShift = 0x1p-22F;

  // Dequantization: position * slope + offset, at the position's exponent modulo 8. The position is
  // 4 n if signed, otherwise n. Zero and one have the same exponent, and one line.
  float slope[16];
  float offset[16];
  // Quantization of x + kShift: n - 1 or |n| is the integer part of (x + kShift) * quant_slope +
  // quant_offset, at most `quant_max`, in the segment of x. Segment 0 is zero and decade 0, segment
  // 7 is one. threshold[i] is where segment i + 1 begins; consecutive thresholds are more than 2.5
  // binades apart.
  float threshold[16];
  float quant_slope[16];
  float quant_offset[16];
  float quant_max[16];

  static constexpr DynamicMap make(bool is_signed) {
    constexpr double kDecadeEnd[] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0};
    DynamicMap map{};
    double prev_max = 0;  // the largest value below the decade
    for (int i = 0; i < 7; ++i) {
      const double end = kDecadeEnd[i];
      const double values = is_signed ? 1 << i : 2 << i;
      const double spacing = 0.9 * end / values;
      const int exponent = 127 + i + (is_signed ? 2 : 1);  // as a float's bits have it
      map.slope[exponent % 8] = static_cast<float>(is_signed ? spacing / 4 : spacing);
      map.offset[exponent % 8] = static_cast<float>(0.1 * end - (values - 0.5) * spacing);
      const double lowest = 0.1 * end + 0.5 * spacing;
      const double lower_edge = (prev_max + lowest) / 2;
      double quant_slope = 1 / spacing;
      double quant_offset = values - 0.1 * end / spacing;
      if (i == 0) {  // a line through the beginnings of n and, if it has one, n + 1
        quant_slope = is_signed ? 0.5 / lower_edge : 1 / (lowest + spacing / 2 - lower_edge);
        quant_offset = values - lower_edge * quant_slope;
      } else {
        map.threshold[i - 1] = static_cast<float>(lower_edge + kShift);
      }
      map.quant_slope[i] = static_cast<float>(quant_slope);
      map.quant_offset[i] =
          static_cast<float>(quant_offset - kShift * quant_slope - (is_signed ? 0 : 1));
      map.quant_max[i] = static_cast<float>(2 * values - (is_signed ? 1 : 2));
      prev_max = end - 0.5 * spacing;
    }
    const int exponent = is_signed ? 136 : 135;
    map.slope[exponent % 8] = is_signed ? 1.0F / 512 : 1.0F / 255;
    map.offset[exponent % 8] = is_signed ? 0.0F : -1.0F / 255;
    map.threshold[6] = static_cast<float>((prev_max + 1) / 2 + kShift);
    map.threshold[7] = 2.0F;  // none
    map.quant_offset[7] = map.quant_max[7] = is_signed ? 128 : 255;
    for (float* const table :
         {map.slope, map.offset, map.threshold, map.quant_slope, map.quant_offset, map.quant_max}) {
      for (int i = 0; i < 8; ++i) table[8 + i] = table[i];
    }
    return map;
  }
};

/// The maps of a first moment (signed) and a second; a kernel argument.
struct DynamicMaps {
  DynamicMap signed_map = DynamicMap::make(true);
  DynamicMap unsigned_map = DynamicMap::make(false);

  template <bool kIsSigned>
  C10_HOST_DEVICE constexpr const DynamicMap& get() const {
    return kIsSigned ? signed_map : unsigned_map;
  }
};

inline constexpr DynamicMaps kDynamicMaps;

/// Dequantizes qvals of a block.
/// \param map  DynamicMap::make(kIsSigned)
template <bool kIsSigned, class Vec>
C10_HOST_DEVICE C10_ALWAYS_INLINE void dequantize_block(const DynamicMap& map,
                                                        const typename Vec::Bits& qval,
                                                        const typename Vec::Value& absmax,
                                                        typename Vec::Value& value) {
  typename Vec::Value position;
  Vec::from_int(qval, position);
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
  value = value * absmax;
}

/// Quantizes values of a block to the nearest qvals. A value within a few ulp of the middle of two
/// may round to either. An unsigned map ignores signs.
/// \param map  DynamicMap::make(kIsSigned)
/// \param inverse_absmax  invert_absmax(absmax)
template <bool kIsSigned, class Vec>
C10_HOST_DEVICE C10_ALWAYS_INLINE void quantize_block(const DynamicMap& map,
                                                      const typename Vec::Value& value,
                                                      const typename Vec::Value& inverse_absmax,
                                                      typename Vec::Bits& qval) {
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
  Vec::fma(x, inverse_absmax, shift, x);
  // The bits of x as an integer approximate its logarithm, precisely enough to leave one threshold
  // to compare. The fma rounds to an integer in the last bits of a float between 2^23 and 2^24.
  reinterpret_bits(x, bits);
  Value logarithm;
  Value log_slope;
  Value log_offset;
  Vec::from_int(bits, logarithm);
  Vec::broadcast(0x1p-23F / 3.23F, log_slope);
  Vec::broadcast(0x1.8p23F - 33.0F, log_offset);
  Vec::fma(logarithm, log_slope, log_offset, logarithm);
  Bits segment;
  reinterpret_bits(logarithm, segment);  // modulo 8
  Value threshold;
  Vec::lookup8(map.threshold, segment, threshold);
  Vec::increment_where(x >= threshold, segment);
  Value quant_slope;
  Value quant_offset;
  Value quant_max;
  Vec::lookup8(map.quant_slope, segment, quant_slope);
  Vec::lookup8(map.quant_offset, segment, quant_offset);
  Vec::lookup8(map.quant_max, segment, quant_max);
  Vec::fma(x, quant_slope, quant_offset, x);
  Bits end;
  reinterpret_bits(x, bits);
  reinterpret_bits(quant_max, end);
  bits = bits < end ? bits : end;  // bits of nonnegative floats sort like their values
  if constexpr (kIsSigned) bits = bits | sign;
  reinterpret_bits(bits, x);
  Vec::to_int(x, qval);
  if constexpr (kIsSigned) {
    typename Vec::Mask signed_qval;
    reinterpret_bits(qval, signed_qval);
    signed_qval = signed_qval + 127;
    signed_qval = signed_qval > 0 ? signed_qval : typename Vec::Mask{};  // -1 rounds to qval 0
    reinterpret_bits(signed_qval, qval);
  }
}

/// Kernel arguments of one AdamW8bit parameter. A step dequantizes a block's moments, applies
/// StepFunctor, and quantizes them with the block's new absmax.
struct AdamW8bitParamArgs {
  ParamArgs param;   ///< float32 or bfloat16; moments are qvals, or float32 if absmax is null
  float* absmax[2];  ///< of each moment, a float32 per block
  AdamCoefficients coefficients;
  StepArgs step_args;

  C10_HOST_DEVICE int64_t num_elements() const { return param.pointers.numel; }
};

/// Stochastically rounded bfloat16 with moments dequantized to float32.
struct StochasticFloatMomentsFormat : StochasticWeightFormat {
  using Moment = float;
};

template <class Parameter>
using AdamW8bitWeightFormat =
    std::conditional_t<std::is_same_v<Parameter, float>, PlainWeightFormat<float>,
                       StochasticFloatMomentsFormat>;

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
