#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/float_format.h>

#include <c10/macros/Macros.h>

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

// With explicit vector types, loops are as fast at -O2 without -march as at -O3 -march=native.
// g++ 12 has no instruction for == of 64-byte unsigned vectors and falls back to scalar code: write
// < or >. -Wvector-operation-performance finds other such operations.
// Each loop is inlined into a function that is compiled for one instruction set and selected at run
// time (cpu_isa.h).
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

#if defined(__GNUC__)

/// A vector of `kBytes` bytes of opmath_t. Has the interface of ScalarVec.
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

  /// Loads two vectors: even and odd elements with kDeinterleave, otherwise the lower and the upper
  /// kWidth elements. Deinterleaving 16-bit elements takes no shuffle, but leaves the odd element
  /// in the upper 16 bits of each even lane; store_unrolled requires these bits to be 0.
  template <bool kDeinterleave>
  C10_ALWAYS_INLINE static void load_unrolled(const Stored* from, Bits (&bits)[2]) {
    if constexpr (kDeinterleave && kIs16Bit) {
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
    if constexpr (kDeinterleave && kIs16Bit) {
      const Bits both = (bits[1] << 16) | bits[0];
      std::memcpy(to, &both, sizeof(both));
    } else if constexpr (kIs16Bit) {
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
  C10_ALWAYS_INLINE static void arange(Bits (&indices)[2]) {
    for (int64_t lane = 0; lane < kWidth; ++lane) {
      indices[0][lane] = static_cast<typename Format::Bits>(kDeinterleave ? 2 * lane : lane);
      indices[1][lane] = indices[0][lane] + (kDeinterleave ? 1U : static_cast<uint32_t>(kWidth));
    }
  }
  C10_ALWAYS_INLINE static void broadcast(typename Format::opmath_t scalar, Value& value) {
    for (int64_t lane = 0; lane < kWidth; ++lane) value[lane] = scalar;
  }
  C10_ALWAYS_INLINE static bool any(const Mask& mask) {
    Int bits = 0;
    for (int64_t lane = 0; lane < kWidth; ++lane) bits |= mask[lane];
    return bits != 0;
  }
  template <class To>
  C10_ALWAYS_INLINE static void convert(const Value& value, To& converted) {
    converted = __builtin_convertvector(value, To);
  }
  C10_ALWAYS_INLINE static void from_int(const Bits& integers, Value& value) {
    value = __builtin_convertvector(reinterpret_cast<const Mask&>(integers), Value);
  }
  C10_ALWAYS_INLINE static void to_int(const Value& value, Bits& count) {
    const Mask integers = __builtin_convertvector(value, Mask);
    reinterpret_bits(integers, count);
  }
  C10_ALWAYS_INLINE static void increment_where(const Mask& mask, Bits& count) {
    if constexpr (kWidth == 16) {
      count = mask ? count + 1U : count;
      return;
    }
    Bits minus_one;  // where the mask is set
    reinterpret_bits(mask, minus_one);
    count -= minus_one;
  }
  C10_ALWAYS_INLINE static void lookup8(const typename Format::opmath_t (&table)[16],
                                        const Bits& index, Value& value) {
#if !defined(__clang__)
    if constexpr (kWidth == 8 || kWidth == 16) {  // compiles to one instruction
      Value entries;
      std::memcpy(&entries, table, sizeof(Value));
      value = __builtin_shuffle(entries, index);
      return;
    }
#endif
    for (int64_t lane = 0; lane < kWidth; ++lane) value[lane] = table[index[lane] % 8];
  }
  // GCC's vector types have no operators for fma and sqrt. Each lane is rounded once, bitwise
  // identical to std::fma and std::sqrt. Uses asm since an intrinsic may be inlined only into
  // functions of its own target, and these are first inlined into templates without a target.
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
  static constexpr bool kIs16Bit = 2 * sizeof(Stored) == sizeof(typename Format::Bits);
  static constexpr std::make_integer_sequence<int, kWidth> kLanes{};

  template <class Vector, int... kLane, class Index>
  C10_ALWAYS_INLINE static void shuffle(const Vector& a, const Vector& b, Vector& result,
                                        std::integer_sequence<int, kLane...>, Index index) {
    result = __builtin_shufflevector(a, b, index(kLane)...);
  }

  // GCC converts bytes one element at a time, and 16-bit elements in four to nine instructions.
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

  /// Keeps the lowest bits of each lane.
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
