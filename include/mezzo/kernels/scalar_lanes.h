#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/float_format.h>

#include <c10/macros/Macros.h>

#include <cmath>
#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// One element at a time: the device's threads, the tail of a loop, compilers without vector types,
/// and the tests' reference. What `Lanes` offers a kernel's body, here and in VectorLanes: memory
/// to lanes and back, and the arithmetic that operators do not spell.
///
/// Each operation rounds once, as IEEE 754 says, and so gives the same bits on every machine and
/// instruction set. A body writes each product that is added to something as `fma`: whether a
/// compiler contracts a * b + c depends on flags and target, and with it the last bit.
template <class Element>
struct ScalarLanes {
  using Format = FloatFormat<Element>;
  using Stored = typename Format::Stored;
  using Value = typename Format::Value;
  using Bits = typename Format::Bits;
  using Flags = uint32_t;
  static constexpr int64_t kWidth = 1;

  /// The lanes of another dtype, as many as here.
  template <class Other>
  using Like = ScalarLanes<Other>;

  // By memcpy, as the vectors do: the memory holds floats, perhaps at an odd address.
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void load(const Stored* from, Bits& bits) {
    Stored stored;
    __builtin_memcpy(&stored, from, sizeof(Stored));
    bits = stored;
  }
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void store(const Bits& bits, Stored* to) {
    const auto stored = static_cast<Stored>(bits);
    __builtin_memcpy(to, &stored, sizeof(Stored));
  }
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void broadcast(Value from, Value& to) { to = from; }
  C10_HOST_DEVICE C10_ALWAYS_INLINE static bool any(const Flags& flags) { return flags != 0; }
  /// 0, 1, 2 ... in the order in which lanes lie in memory.
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void enumerate(Bits& numbers) { numbers = 0; }

  /// From the values of another dtype's lanes: exact, or rounded once.
  template <class Other>
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void convert(const Other& from, Value& to) {
    to = static_cast<Value>(from);
  }
  /// result = a * b + c, rounded once. `result` may be any of the three.
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void fma(const Value& a, const Value& b, const Value& c,
                                                    Value& result) {
#if defined(__GNUC__) && !defined(__CUDA_ARCH__)  // a call of std::fma may stay one at -O0
    if constexpr (sizeof(Value) == sizeof(float)) {
      result = __builtin_fmaf(a, b, c);
    } else {
      result = __builtin_fma(a, b, c);
    }
#else
    result = std::fma(a, b, c);
#endif
  }
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void sqrt(const Value& x, Value& result) {
    result = std::sqrt(x);
  }
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
