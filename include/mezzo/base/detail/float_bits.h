#pragma once

#include <mezzo/base/version.h>

#include <c10/macros/Macros.h>

#include <cstdint>

// Questions about floats asked of their bits. A caller may compile with -ffast-math, where the
// compiler takes `x != x` and std::isfinite(x) for constants; integers g++ leaves alone. Clang
// knows which bits come from a float, and takes these questions for constants too.
#if defined(__clang__) && __FINITE_MATH_ONLY__
#error "mezzo finds no inf under Clang's -ffast-math; add -fno-finite-math-only after it"
#endif

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

C10_HOST_DEVICE inline bool nonfinite_bits(float value) {
  uint32_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return (bits & 0x7F800000U) == 0x7F800000U;
}

C10_HOST_DEVICE inline bool nonfinite_bits(double value) {
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return (bits & 0x7FF0000000000000U) == 0x7FF0000000000000U;
}

inline bool nan_bits(float value) {
  uint32_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return (bits & 0x7FFFFFFFU) > 0x7F800000U;
}

inline bool nan_bits(double value) {
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return (bits & 0x7FFFFFFFFFFFFFFFU) > 0x7FF0000000000000U;
}

/// Comparisons that NaN fails: `value >= low` alone is taken for !(value < low).
inline bool is_at_least(double value, double low) { return !nan_bits(value) && value >= low; }
inline bool is_above(double value, double low) { return !nan_bits(value) && value > low; }

/// The larger of two, and NaN if one of them is, whichever it is.
template <class Float>
Float max_or_nan(Float a, Float b) {
  if (nan_bits(a)) return a;
  return nan_bits(b) || b > a ? b : a;
}

inline bool is_positive_infinity(double value) {
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits == 0x7FF0000000000000U;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
