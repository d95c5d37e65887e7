#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/block8.h>
#include <mezzo/kernels/cpu_isa.h>
#include <mezzo/kernels/cpu_lanes.h>
#include <mezzo/kernels/work_chunks.h>

#include <c10/macros/Macros.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

// The CPU's loops between floats and blocks of 8 bits (block8.h), over stretches that begin with a
// block.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Of many lanes, or of the one that takes what they leave: each begins at element i, and returns
/// the first that it has not taken.
template <class Lanes, bool kIsSigned>
struct Block8Loops {
  using Codes = typename Lanes::template Like<Block8Code>;
  using Value = typename Lanes::Value;
  using Bits = typename Lanes::Bits;

  C10_ALWAYS_INLINE static int64_t widen(const uint8_t* codes, float scale, float* to, int64_t i,
                                         int64_t count) {
    Value scales;
    Lanes::broadcast(scale, scales);
    for (; i + Lanes::kWidth <= count; i += Lanes::kWidth) {
      Bits code;
      Codes::load(codes + i, code);
      Value value;
      widen_block8<kIsSigned, Lanes>(kBlock8Map<kIsSigned>, code, scales, value);
      __builtin_memcpy(to + i, &value, sizeof(value));
    }
    return i;
  }

  C10_ALWAYS_INLINE static int64_t narrow(const float* from, float inverse, uint8_t* codes,
                                          int64_t i, int64_t count) {
    Value inverses;
    Lanes::broadcast(inverse, inverses);
    for (; i + Lanes::kWidth <= count; i += Lanes::kWidth) {
      Value value;
      __builtin_memcpy(&value, from + i, sizeof(value));
      Bits code;
      narrow_block8<kIsSigned, Lanes>(kBlock8Map<kIsSigned>, value, inverses, code);
      Codes::store(code, codes + i);
    }
    return i;
  }

  /// Raises `bits` to those of the largest magnitude: a NaN's are larger than any other's.
  C10_ALWAYS_INLINE static int64_t find_largest(const float* from, int64_t i, int64_t count,
                                                uint32_t& bits) {
    Bits largest{};
    for (; i + Lanes::kWidth <= count; i += Lanes::kWidth) {
      Bits own;
      __builtin_memcpy(&own, from + i, sizeof(own));
      own = own & 0x7FFFFFFFU;
      largest = own > largest ? own : largest;
    }
    uint32_t each[Lanes::kWidth];
    __builtin_memcpy(each, &largest, sizeof(each));
    for (const uint32_t one : each) bits = std::max(bits, one);
    return i;
  }
};

/// Codes in blocks to floats.
template <class Element, class IsSigned, class Lanes>
struct WidenBlock8Kernel {
  C10_ALWAYS_INLINE static void run(const uint8_t* codes, const float* scales, float* to,
                                    int64_t count) {
    using Many = Block8Loops<Lanes, IsSigned::value>;
    using One = Block8Loops<ScalarLanes<Element>, IsSigned::value>;
    for (int64_t begin = 0; begin < count; begin += kBlock8) {
      const int64_t own = std::min(kBlock8, count - begin);
      const float scale = scales[begin / kBlock8];
      const int64_t rest = Many::widen(codes + begin, scale, to + begin, 0, own);
      One::widen(codes + begin, scale, to + begin, rest, own);
    }
  }
};

/// Floats to codes in blocks.
template <class Element, class IsSigned, class Lanes>
struct NarrowBlock8Kernel {
  using Many = Block8Loops<Lanes, IsSigned::value>;
  using One = Block8Loops<ScalarLanes<Element>, IsSigned::value>;

  C10_ALWAYS_INLINE static void run(const float* from, uint8_t* codes, float* scales,
                                    int64_t count) {
    // All scales first: a loop over a block is too long for a processor to look beyond it.
    for (int64_t begin = 0; begin < count; begin += kBlock8) {
      const int64_t own = std::min(kBlock8, count - begin);
      uint32_t bits = 0;
      const int64_t seen = Many::find_largest(from + begin, 0, own, bits);
      One::find_largest(from + begin, seen, own, bits);
      reinterpret_bits(bits, scales[begin / kBlock8]);
    }
    for (int64_t begin = 0; begin < count; begin += kBlock8) {
      const int64_t own = std::min(kBlock8, count - begin);
      const float inverse = inverse_of_scale(scales[begin / kBlock8]);
      const int64_t rest = Many::narrow(from + begin, inverse, codes + begin, 0, own);
      One::narrow(from + begin, inverse, codes + begin, rest, own);
    }
  }
};

/// Writes the values of `count` codes, of a first moment or, without signs, a second one.
inline void widen_block8(bool is_signed, const uint8_t* codes, const float* scales, float* to,
                         int64_t count, CpuIsa isa = best_isa()) {
  const auto widen = is_signed ? cpu_kernel<WidenBlock8Kernel, float, std::true_type>(isa)
                               : cpu_kernel<WidenBlock8Kernel, float, std::false_type>(isa);
  widen(codes, scales, to, count);
}

/// Writes the codes and the scales of `count` values.
inline void narrow_block8(bool is_signed, const float* from, uint8_t* codes, float* scales,
                          int64_t count, CpuIsa isa = best_isa()) {
  const auto narrow = is_signed ? cpu_kernel<NarrowBlock8Kernel, float, std::true_type>(isa)
                                : cpu_kernel<NarrowBlock8Kernel, float, std::false_type>(isa);
  narrow(from, codes, scales, count);
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
