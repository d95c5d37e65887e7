#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/float_format.h>
#include <mezzo/kernels/scalar_lanes.h>
#include <mezzo/kernels/vector_math.h>

#include <c10/macros/Macros.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

// Vector types say outright what a compiler would otherwise find only under some flags: loops over
// them are as fast at -O1 without -march as with -O3 -march=native. Each is inlined into a function
// that is compiled for its instruction set, and chosen at run time (cpu_isa.h).
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

#if defined(__GNUC__)

/// As many elements as `kBytes` of Value hold.
template <class Element, int kBytes>
struct VectorLanes {
  using Format = FloatFormat<Element>;
  using Stored = typename Format::Stored;
  static constexpr int64_t kWidth = kBytes / static_cast<int64_t>(sizeof(typename Format::Value));
  using Count = std::conditional_t<sizeof(typename Format::Bits) == 8, int64_t, int32_t>;

  typedef typename Format::Value Value __attribute__((vector_size(kBytes)));
  typedef typename Format::Bits Bits __attribute__((vector_size(kBytes)));
  typedef Count Flags __attribute__((vector_size(kBytes)));
  typedef Stored Memory __attribute__((vector_size(kWidth * sizeof(Stored))));

  template <class Other>
  using Like =
      VectorLanes<Other, static_cast<int>(kWidth * sizeof(typename FloatFormat<Other>::Value))>;

  C10_ALWAYS_INLINE static void load(const Stored* from, Bits& bits) {
    Memory memory;
    __builtin_memcpy(&memory, from, sizeof(Memory));
    bits = __builtin_convertvector(memory, Bits);
  }
  C10_ALWAYS_INLINE static void store(const Bits& bits, Stored* to) {
    const Memory memory = __builtin_convertvector(bits, Memory);
    __builtin_memcpy(to, &memory, sizeof(Memory));
  }
  C10_ALWAYS_INLINE static void broadcast(typename Format::Value from, Value& to) {
    for (int64_t lane = 0; lane < kWidth; ++lane) to[lane] = from;
  }
  C10_ALWAYS_INLINE static bool any(const Flags& flags) {
    Count all = 0;
    for (int64_t lane = 0; lane < kWidth; ++lane) all |= flags[lane];
    return all != 0;
  }
  C10_ALWAYS_INLINE static void enumerate(Bits& numbers) {
    for (int64_t lane = 0; lane < kWidth; ++lane) {
      numbers[lane] = static_cast<typename Format::Bits>(lane);
    }
  }
  template <class Other>
  C10_ALWAYS_INLINE static void convert(const Other& from, Value& to) {
    to = __builtin_convertvector(from, Value);
  }
  C10_ALWAYS_INLINE static void fma(const Value& a, const Value& b, const Value& c, Value& result) {
    vector_fma(a, b, c, result);
  }
  C10_ALWAYS_INLINE static void sqrt(const Value& x, Value& result) { vector_sqrt(x, result); }
};

#endif

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
