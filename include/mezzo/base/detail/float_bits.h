#pragma once

#include <mezzo/base/version.h>

#include <c10/macros/Macros.h>

#include <cstdint>
#include <cstring>

// Tests for inf and NaN that read the bits, since -ffast-math folds `x != x` and std::isfinite(x)
// to constants. g++ does not fold the integer tests; Clang does, since it tracks the origin of
// bits.
#if defined(__clang__) && __FINITE_MATH_ONLY__
#error "mezzo cannot detect inf with Clang's -ffast-math; add -fno-finite-math-only after it"
#endif

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

C10_HOST_DEVICE inline bool is_nonfinite(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return (bits & 0x7F800000U) == 0x7F800000U;
}

C10_HOST_DEVICE inline bool is_nonfinite(double value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return (bits & 0x7FF0000000000000U) == 0x7FF0000000000000U;
}

inline bool is_nan(double value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return (bits & 0x7FFFFFFFFFFFFFFFU) > 0x7FF0000000000000U;
}

/// Comparisons that are false for NaN, also under -ffast-math, which may compile `value >= low` to
/// !(value < low).
inline bool is_at_least(double value, double low) { return !is_nan(value) && value >= low; }
inline bool is_above(double value, double low) { return !is_nan(value) && value > low; }

inline bool is_positive_infinity(double value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits == 0x7FF0000000000000U;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
