#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/float_format.h>

#include <c10/macros/Macros.h>
#include <c10/util/BFloat16.h>

// How an optimizer keeps a parameter and its moments between steps, for one lane or many.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// All in one dtype, rounded to nearest.
template <class Element>
struct PlainWeights {
  using Parameter = Element;
  using Moment = Element;
};

/// A float in two halves, of which the upper is the model's parameter; moments are floats.
struct SplitWeights {
  using Parameter = c10::BFloat16;
  using Moment = float;
};

/// All in bfloat16, rounded stochastically.
struct StochasticWeights {
  using Parameter = c10::BFloat16;
  using Moment = c10::BFloat16;
};

/// A float from its bfloat16 and the 16 bits, as a signed number, by which its own bits exceed
/// those of the bfloat16.
template <class BitLanes, class ValueLanes>
C10_HOST_DEVICE C10_ALWAYS_INLINE void join_halves(const BitLanes& upper, const BitLanes& lower,
                                                   ValueLanes& value) {
  const BitLanes wide = (upper << 16) + ((lower ^ 0x8000U) - 0x8000U);
  reinterpret_bits(wide, value);
}

/// The reverse, exactly. The upper half is the nearest bfloat16; of two equally near ones that of
/// larger magnitude, for which alone 16 bits suffice. A NaN loses its payload.
template <class ValueLanes, class BitLanes>
C10_HOST_DEVICE C10_ALWAYS_INLINE void split_halves(const ValueLanes& value, BitLanes& upper,
                                                    BitLanes& lower) {
  BitLanes wide;
  reinterpret_bits(value, wide);
  const BitLanes zero = wide & 0U;
  const BitLanes quiet_nan = ((wide >> 16) & 0x8000U) | 0x7FC0U;
  upper = (wide + 0x8000U) >> 16;
  upper = (wide & 0x7FFFFFFFU) > 0x7F800000U ? quiet_nan : upper;
  lower = (wide & 0x7FFFFFFFU) > 0x7F800000U ? zero : wide & 0xFFFFU;
}

/// To one of the two bfloat16 around `value`, the more often the nearer it is: up in magnitude if
/// the bits that are cut off and `noise`, 16 random bits, together exceed 16 bits. So the mean of
/// many roundings is `value`.
template <class ValueLanes, class BitLanes>
C10_HOST_DEVICE C10_ALWAYS_INLINE void narrow_stochastically(const ValueLanes& value,
                                                             const BitLanes& noise,
                                                             BitLanes& bits) {
  BitLanes wide;
  reinterpret_bits(value, wide);
  const BitLanes quiet_nan = (wide >> 16) | 0x40U;
  bits = (wide + noise) >> 16;
  bits = (wide & 0x7FFFFFFFU) > 0x7F800000U ? quiet_nan : bits;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
