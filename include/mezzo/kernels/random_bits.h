#pragma once

#include <mezzo/base/version.h>

#include <c10/macros/Macros.h>

#include <cstdint>

// Random bits for stochastic rounding: a function of seed, step, parameter and element, so that
// they do not depend on the machine, the threads or the order of the work, and a resumed run goes
// on with those that it would have had. Hashes of counters; not for cryptography.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// What is the same for 2^32 elements of a parameter in one step.
struct RandomKey {
  uint32_t first = 0;
  uint32_t second = 0;
};

/// The finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
C10_HOST_DEVICE inline uint64_t mixed_bits(uint64_t bits) {
  bits += 0x9E3779B97F4A7C15U;
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9U;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBU;
  return bits ^ (bits >> 31);
}

/// `step` is 1 in the first step; `block` is the element's number / 2^32.
C10_HOST_DEVICE inline RandomKey random_key(uint64_t seed, uint64_t step, uint64_t parameter,
                                            uint64_t block) {
  const uint64_t bits =
      mixed_bits(mixed_bits(mixed_bits(mixed_bits(seed) ^ step) ^ parameter) ^ block);
  return {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)};
}

/// Each bit of the result depends on each of `bits`: a permutation of 32-bit numbers (the
/// multiply-xorshift hash with the constants that Wellons' search found, 2018), for one or many.
template <class BitLanes>
C10_HOST_DEVICE C10_ALWAYS_INLINE void mix(BitLanes& bits) {
  bits = (bits ^ (bits >> 16)) * 0x7FEB352DU;
  bits = (bits ^ (bits >> 15)) * 0x846CA68BU;
  bits = bits ^ (bits >> 16);
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
