#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/float_format.h>

#include <c10/macros/Macros.h>

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

// With explicit vector types, loops are as fast at -O2 without -march as with -O3 -march=native.
// g++ 12 has no instruction for == of unsigned vectors of 64 bytes, and takes lane by lane: write <
// or >, and look for others with -Wvector-operation-performance.
// Each loop is inlined into a function that is compiled for its instruction set, and chosen at run
// time (cpu_isa.h).
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

#if defined(__GNUC__)

/// Vec for as many elements as `kBytes` of Value hold.
template <class Element, int kBytes>
struct SimdVec {
  using Format = FloatFormat<Element>;
  using Stored = typename Format::Stored;
  static constexpr int64_t kWidth =
      kBytes / static_cast<int64_t>(sizeof(typename Format::opmath_t));
  static constexpr int kUnroll = 2;
  using Int = std::conditional_t<sizeof(typename Format::Bits) == 8, int64_t, int32_t>;

  typedef typename Format::opmath_t Value __attribute__((vector_size(kBytes)));
  typedef typename Format::Bits Bits __attribute__((vector_size(kBytes)));
  typedef Int Mask __attribute__((vector_size(kBytes)));
  typedef Stored StoredVec __attribute__((vector_size(kWidth * sizeof(Stored))));
  typedef uint16_t U16Vec __attribute__((vector_size(kWidth * sizeof(uint16_t))));
  typedef uint16_t U16x2 __attribute__((vector_size(kBytes)));

  template <class Other>
  using Rebind =
      SimdVec<Other, static_cast<int>(kWidth * sizeof(typename FloatFormat<Other>::opmath_t))>;

  C10_ALWAYS_INLINE static void load(const Stored* from, Bits& bits) {
    StoredVec stored;
    std::memcpy(&stored, from, sizeof(StoredVec));
    if constexpr (sizeof(Stored) < sizeof(typename Format::Bits)) {
      zero_extend(stored, bits);
    } else {
      bits = stored;
    }
  }
  C10_ALWAYS_INLINE static void store(const Bits& bits, Stored* to) {
    StoredVec stored;
    if constexpr (sizeof(Stored) < sizeof(typename Format::Bits)) {
      truncate(bits, stored);
    } else {
      stored = bits;
    }
    std::memcpy(to, &stored, sizeof(StoredVec));
  }

  /// Loads a block of two vectors: its even elements and its odd ones, or its first half and its
  /// second. Even and odd ones of 16 bits take no shuffle; above an even one's bits lie the odd
  /// one's. `store_unrolled` expects nothing there.
  template <bool kDeinterleave>
  C10_ALWAYS_INLINE static void load_unrolled(const Stored* from, Bits (&bits)[2]) {
    if constexpr (kDeinterleave && kIsHalf) {
      std::memcpy(&bits[0], from, sizeof(Bits));
      bits[1] = bits[0] >> 16;
      return;
    }
    load(from, bits[0]);
    load(from + kWidth, bits[1]);
    if constexpr (kDeinterleave) {
      const Bits low = bits[0];
      shuffle(low, bits[1], bits[0], kLanes, [](int lane) { return 2 * lane; });
      shuffle(low, bits[1], bits[1], kLanes, [](int lane) { return 2 * lane + 1; });
    }
  }
  template <bool kDeinterleave>
  C10_ALWAYS_INLINE static void store_unrolled(const Bits (&bits)[2], Stored* to) {
    if constexpr (kDeinterleave && kIsHalf) {
      const Bits both = (bits[1] << 16) | bits[0];
      std::memcpy(to, &both, sizeof(both));
    } else if constexpr (kIsHalf) {
      U16x2 u16s[2];
      std::memcpy(u16s, bits, sizeof(u16s));
      shuffle(u16s[0], u16s[1], u16s[0], std::make_integer_sequence<int, 2 * kWidth>{},
              [](int lane) { return 2 * lane; });
      std::memcpy(to, u16s, sizeof(U16x2));
    } else {
      store(bits[0], to);
      store(bits[1], to + kWidth);
    }
  }
  template <bool kDeinterleave>
  C10_ALWAYS_INLINE static void arange(Bits (&numbers)[2]) {
    for (int64_t lane = 0; lane < kWidth; ++lane) {
      numbers[0][lane] = static_cast<typename Format::Bits>(kDeinterleave ? 2 * lane : lane);
      numbers[1][lane] = numbers[0][lane] + (kDeinterleave ? 1U : static_cast<uint32_t>(kWidth));
    }
  }
  C10_ALWAYS_INLINE static void broadcast(typename Format::opmath_t from, Value& to) {
    for (int64_t lane = 0; lane < kWidth; ++lane) to[lane] = from;
  }
  C10_ALWAYS_INLINE static bool any(const Mask& flags) {
    Int all = 0;
    for (int64_t lane = 0; lane < kWidth; ++lane) all |= flags[lane];
    return all != 0;
  }
  template <class To>
  C10_ALWAYS_INLINE static void convert(const Value& value, To& converted) {
    converted = __builtin_convertvector(value, To);
  }
  C10_ALWAYS_INLINE static void from_int(const Bits& count, Value& value) {
    value = __builtin_convertvector(reinterpret_cast<const Mask&>(count), Value);
  }
  C10_ALWAYS_INLINE static void to_int(const Value& value, Bits& count) {
    const Mask integers = __builtin_convertvector(value, Mask);
    reinterpret_bits(integers, count);
  }
  C10_ALWAYS_INLINE static void increment_where(const Mask& flags, Bits& count) {
    if constexpr (kWidth == 16) {
      count = flags ? count + 1U : count;
      return;
    }
    Bits ones;
    reinterpret_bits(flags, ones);  // all bits set for yes
    count -= ones;
  }
  C10_ALWAYS_INLINE static void lookup8(const typename Format::opmath_t (&table)[16],
                                        const Bits& index, Value& value) {
#if !defined(__clang__)
    if constexpr (kWidth == 8 || kWidth == 16) {  // one instruction
      Value eight_or_both;
      std::memcpy(&eight_or_both, table, sizeof(Value));
      value = __builtin_shuffle(eight_or_both, index);
      return;
    }
#endif
    for (int64_t lane = 0; lane < kWidth; ++lane) value[lane] = table[index[lane] % 8];
  }
  // GCC's vectors have no operators for a fused multiply-add and a square root. Each lane is
  // rounded once, to the bits of std::fma and std::sqrt. asm, since an intrinsic may be inlined
  // only into functions of its own target; these are first inlined into templates without a target.
  C10_ALWAYS_INLINE static void fma(const Value& a, const Value& b, const Value& c, Value& result) {
    Value sum = c;
#if defined(__x86_64__) && !defined(__clang__)
    if constexpr (sizeof(typename Format::opmath_t) == sizeof(float)) {
      asm("vfmadd231ps {%2, %1, %0|%0, %1, %2}" : "+v"(sum) : "v"(a), "v"(b));
    } else {
      asm("vfmadd231pd {%2, %1, %0|%0, %1, %2}" : "+v"(sum) : "v"(a), "v"(b));
    }
#else
    for (int64_t lane = 0; lane < kWidth; ++lane) {
      typename Format::opmath_t lane_sum;
      ScalarVec<Element>::fma(a[lane], b[lane], c[lane], lane_sum);
      sum[lane] = lane_sum;
    }
#endif
    result = sum;
  }
  C10_ALWAYS_INLINE static void sqrt(const Value& x, Value& result) {
#if defined(__x86_64__) && !defined(__clang__)
    if constexpr (sizeof(typename Format::opmath_t) == sizeof(float)) {
      asm("vsqrtps {%1, %0|%0, %1}" : "=v"(result) : "v"(x));
    } else {
      asm("vsqrtpd {%1, %0|%0, %1}" : "=v"(result) : "v"(x));
    }
#else
    for (int64_t lane = 0; lane < kWidth; ++lane) result[lane] = std::sqrt(x[lane]);
#endif
  }

 private:
  static constexpr bool kIsHalf = 2 * sizeof(Stored) == sizeof(typename Format::Bits);
  static constexpr std::make_integer_sequence<int, kWidth> kLanes{};

  template <class Vector, int... kLane, class Index>
  C10_ALWAYS_INLINE static void shuffle(const Vector& a, const Vector& b, Vector& result,
                                        std::integer_sequence<int, kLane...>, Index index) {
    result = __builtin_shufflevector(a, b, index(kLane)...);
  }

  // For GCC, which takes bytes element by element, or makes four to nine instructions of one.
  C10_ALWAYS_INLINE static void zero_extend(const StoredVec& stored, Bits& bits) {
#if defined(__x86_64__) && !defined(__clang__)
    if constexpr (sizeof(Bits) >= 32 && sizeof(Stored) == 1) {
      asm("vpmovzxbd {%1, %0|%0, %1}" : "=v"(bits) : "vm"(stored));
      return;
    } else if constexpr (sizeof(Bits) >= 32) {
      asm("vpmovzxwd {%1, %0|%0, %1}" : "=v"(bits) : "vm"(stored));
      return;
    }
#endif
    bits = __builtin_convertvector(__builtin_convertvector(stored, U16Vec), Bits);
  }

  /// Takes the lowest bits of each lane.
  C10_ALWAYS_INLINE static void truncate(const Bits& bits, StoredVec& stored) {
    constexpr bool kIsByte = sizeof(Stored) == 1;
#if defined(__x86_64__) && !defined(__clang__)
    if constexpr (sizeof(Bits) == 64 && kIsByte) {
      asm("vpmovdb {%1, %0|%0, %1}" : "=v"(stored) : "v"(bits));
      return;
    } else if constexpr (sizeof(Bits) == 64) {
      asm("vpmovdw {%1, %0|%0, %1}" : "=v"(stored) : "v"(bits));
      return;
    } else if constexpr (sizeof(Bits) == 32 && kIsByte) {
      typedef uint8_t U8Vec __attribute__((vector_size(32)));
      U8Vec bytes;
      reinterpret_bits(bits, bytes);
      bytes = __builtin_shuffle(
          bytes, U8Vec{0,  4,  8,  12, 0,  4,  8,  12, 0,  4,  8,  12, 0,  4,  8,  12,
                       16, 20, 24, 28, 16, 20, 24, 28, 16, 20, 24, 28, 16, 20, 24, 28});
      Bits u16s;
      reinterpret_bits(bytes, u16s);
      u16s = __builtin_shuffle(u16s, Bits{0, 4, 0, 4, 0, 4, 0, 4});
      std::memcpy(&stored, &u16s, sizeof(stored));
      return;
    }
#endif
    if constexpr (kIsByte) {
      stored = __builtin_convertvector(__builtin_convertvector(bits, U16Vec), StoredVec);
    } else {
      stored = __builtin_convertvector(bits, StoredVec);
    }
  }
};

#endif

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
