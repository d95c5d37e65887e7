#pragma once

#include <mezzo/base/version.h>
#include <mezzo/base/weight_storage.h>
#include <mezzo/kernels/float_format.h>

#include <c10/core/ScalarType.h>
#include <c10/macros/Macros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

// Storage formats of a parameter and its moments, for scalars and vectors, and the random bits of
// stochastic rounding. The bits are a hash of seed, step, parameter and element: they do not depend
// on machine, threads or order, and a resumed run continues them. Not for cryptography.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The random key of 2^32 consecutive elements of a parameter in one step.
using RandomKey = uint32_t;

/// The finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
C10_HOST_DEVICE inline uint64_t splitmix64(uint64_t bits) {
  bits += 0x9E3779B97F4A7C15U;
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9U;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBU;
  return bits ^ (bits >> 31);
}

/// \param step   1 in the first step
/// \param high_index  element index / 2^32
C10_HOST_DEVICE inline RandomKey random_key(uint64_t seed, uint64_t step, uint64_t parameter,
                                            uint64_t high_index) {
  return static_cast<RandomKey>(
      splitmix64(splitmix64(splitmix64(splitmix64(seed) ^ step) ^ parameter) ^ high_index));
}

/// Permutes 32 bits so that each result bit depends on all of `bits`: the multiply-xorshift hash
/// lowbias32 (Wellons, 2018).
template <class BitsVec>
C10_HOST_DEVICE C10_ALWAYS_INLINE void hash_bits(BitsVec& bits) {
  bits = (bits ^ (bits >> 16)) * 0x7FEB352DU;
  bits = (bits ^ (bits >> 15)) * 0x846CA68BU;
  bits = bits ^ (bits >> 16);
}

/// Parameter and moments in one dtype, rounded to nearest.
template <class Element>
struct PlainWeightFormat {
  using Parameter = Element;
  using Moment = Element;
  static constexpr bool kIsSplit = false;
  static constexpr bool kIsStochastic = false;
};

/// A float32 parameter as the model's bfloat16 and 16 low bits; moments are float32.
struct SplitWeightFormat : PlainWeightFormat<c10::BFloat16> {
  using Moment = float;
  static constexpr bool kIsSplit = true;
};

/// Parameter and moments in bfloat16 with stochastic rounding.
struct StochasticWeightFormat : PlainWeightFormat<c10::BFloat16> {
  static constexpr bool kIsStochastic = true;
};

/// Calls `visit.operator()<WeightFormat>()` for each format.
template <class Visit>
void for_each_weight_format(const Visit& visit) {
  visit.template operator()<PlainWeightFormat<float>>();
  visit.template operator()<PlainWeightFormat<double>>();
  visit.template operator()<PlainWeightFormat<c10::BFloat16>>();
  visit.template operator()<PlainWeightFormat<c10::Half>>();
  visit.template operator()<SplitWeightFormat>();
  visit.template operator()<StochasticWeightFormat>();
}

/// Returns whether parameters with this storage and dtype of the trained values have WeightFormat.
template <class WeightFormat>
bool matches_format(optim::WeightStorage storage, at::ScalarType dtype) {
  return WeightFormat::kIsSplit == (storage == optim::WeightStorage::split_master) &&
         WeightFormat::kIsStochastic == (storage == optim::WeightStorage::stochastic_rounding) &&
         dtype == c10::CppTypeToScalarType<typename WeightFormat::Parameter>::value;
}

/// Inverse of split_low_bits: adds the signed low bits to the bits of the bfloat16. Ignores
/// negative low bits of a zero and positive ones of an infinity, which split_low_bits does not
/// produce: they are left from a weight that was modified outside the optimizer.
template <class BitsVec, class ValueVec>
C10_HOST_DEVICE C10_ALWAYS_INLINE void combine_low_bits(const BitsVec& upper, const BitsVec& lower,
                                                        ValueVec& value) {
  const BitsVec zero = lower & 0U;
  const BitsVec magnitude = upper & 0x7FFFU;
  const BitsVec if_negative = magnitude < 1U ? zero : lower;
  const BitsVec if_positive = magnitude > 0x7F7FU ? zero : lower;
  const BitsVec remainder = lower > 0x7FFFU ? if_negative : if_positive;
  const BitsVec wide = (upper << 16) + ((remainder ^ 0x8000U) - 0x8000U);
  reinterpret_bits(wide, value);
}

/// Splits a float32 exactly into the nearest bfloat16 and a signed 16-bit remainder. Ties round
/// away from zero, for which 16 bits suffice. A NaN loses its payload.
template <class ValueVec, class BitsVec>
C10_HOST_DEVICE C10_ALWAYS_INLINE void split_low_bits(const ValueVec& value, BitsVec& upper,
                                                      BitsVec& lower) {
  BitsVec wide;
  reinterpret_bits(value, wide);
  const BitsVec zero = wide & 0U;
  const BitsVec quiet_nan = ((wide >> 16) & 0x8000U) | 0x7FC0U;
  upper = (wide + 0x8000U) >> 16;
  upper = (wide & 0x7FFFFFFFU) > 0x7F800000U ? quiet_nan : upper;
  lower = (wide & 0x7FFFFFFFU) > 0x7F800000U ? zero : wide & 0xFFFFU;
}

/// Rounds to one of the two neighboring bfloat16 values at random, with mean `value`: up in
/// magnitude if the 16 truncated bits plus `noise`, 16 random bits, carry.
template <class ValueVec, class BitsVec>
C10_HOST_DEVICE C10_ALWAYS_INLINE void stochastic_round_to_bf16(const ValueVec& value,
                                                                const BitsVec& noise,
                                                                BitsVec& bits) {
  BitsVec wide;
  reinterpret_bits(value, wide);
  // Arithmetic produces quiet NaNs, which stay NaN when truncated.
  wide = (wide << 1) > 0xFF000000U ? wide : wide + noise;
  bits = wide >> 16;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
