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

/// Lanes for as many elements as `kBytes` of Value hold.
template <class Element, int kBytes>
struct VectorLanes {
  using Format = FloatFormat<Element>;
  using Stored = typename Format::Stored;
  static constexpr int64_t kWidth = kBytes / static_cast<int64_t>(sizeof(typename Format::Value));
  static constexpr int kVectors = 2;
  using Count = std::conditional_t<sizeof(typename Format::Bits) == 8, int64_t, int32_t>;

  typedef typename Format::Value Value __attribute__((vector_size(kBytes)));
  typedef typename Format::Bits Bits __attribute__((vector_size(kBytes)));
  typedef Count Flags __attribute__((vector_size(kBytes)));
  typedef Stored Memory __attribute__((vector_size(kWidth * sizeof(Stored))));
  typedef uint16_t Halves __attribute__((vector_size(kWidth * sizeof(uint16_t))));
  typedef uint16_t Words __attribute__((vector_size(kBytes)));

  template <class Other>
  using Like =
      VectorLanes<Other, static_cast<int>(kWidth * sizeof(typename FloatFormat<Other>::Value))>;

  C10_ALWAYS_INLINE static void load(const Stored* from, Bits& bits) {
    Memory memory;
    std::memcpy(&memory, from, sizeof(Memory));
    if constexpr (sizeof(Stored) < sizeof(typename Format::Bits)) {
      widen(memory, bits);
    } else {
      bits = memory;
    }
  }
  C10_ALWAYS_INLINE static void store(const Bits& bits, Stored* to) {
    Memory memory;
    if constexpr (sizeof(Stored) < sizeof(typename Format::Bits)) {
      keep_low(bits, memory);
    } else {
      memory = bits;
    }
    std::memcpy(to, &memory, sizeof(Memory));
  }

  /// Loads a block of two vectors: its even elements and its odd ones, or its first half and its
  /// second. Even and odd ones of 16 bits take no shuffle; above an even one's bits lie the odd
  /// one's. `store_block` expects nothing there.
  template <bool kEvenOdd>
  C10_ALWAYS_INLINE static void load_block(const Stored* from, Bits (&bits)[2]) {
    if constexpr (kEvenOdd && kIsHalf) {
      std::memcpy(&bits[0], from, sizeof(Bits));
      bits[1] = bits[0] >> 16;
      return;
    }
    load(from, bits[0]);
    load(from + kWidth, bits[1]);
    if constexpr (kEvenOdd) {
      const Bits low = bits[0];
      shuffle(low, bits[1], bits[0], kLanes, [](int lane) { return 2 * lane; });
      shuffle(low, bits[1], bits[1], kLanes, [](int lane) { return 2 * lane + 1; });
    }
  }
  template <bool kEvenOdd>
  C10_ALWAYS_INLINE static void store_block(const Bits (&bits)[2], Stored* to) {
    if constexpr (kEvenOdd && kIsHalf) {
      const Bits both = (bits[1] << 16) | bits[0];
      std::memcpy(to, &both, sizeof(both));
    } else if constexpr (kIsHalf) {
      Words words[2];
      std::memcpy(words, bits, sizeof(words));
      shuffle(words[0], words[1], words[0], std::make_integer_sequence<int, 2 * kWidth>{},
              [](int lane) { return 2 * lane; });
      std::memcpy(to, words, sizeof(Words));
    } else {
      store(bits[0], to);
      store(bits[1], to + kWidth);
    }
  }
  template <bool kEvenOdd>
  C10_ALWAYS_INLINE static void enumerate(Bits (&numbers)[2]) {
    for (int64_t lane = 0; lane < kWidth; ++lane) {
      numbers[0][lane] = static_cast<typename Format::Bits>(kEvenOdd ? 2 * lane : lane);
      numbers[1][lane] = numbers[0][lane] + (kEvenOdd ? 1U : static_cast<uint32_t>(kWidth));
    }
  }
  C10_ALWAYS_INLINE static void broadcast(typename Format::Value from, Value& to) {
    for (int64_t lane = 0; lane < kWidth; ++lane) to[lane] = from;
  }
  C10_ALWAYS_INLINE static bool any(const Flags& flags) {
    Count all = 0;
    for (int64_t lane = 0; lane < kWidth; ++lane) all |= flags[lane];
    return all != 0;
  }
  template <class Wide>
  C10_ALWAYS_INLINE static void convert(const Value& value, Wide& wide) {
    wide = __builtin_convertvector(value, Wide);
  }
  C10_ALWAYS_INLINE static void from_count(const Bits& count, Value& value) {
    value = __builtin_convertvector(reinterpret_cast<const Flags&>(count), Value);
  }
  C10_ALWAYS_INLINE static void to_count(const Value& value, Bits& count) {
    const Flags whole = __builtin_convertvector(value, Flags);
    reinterpret_bits(whole, count);
  }
  C10_ALWAYS_INLINE static void count_where(const Flags& flags, Bits& count) {
    if constexpr (kWidth == 16) {
      count = flags ? count + 1U : count;
      return;
    }
    Bits ones;
    reinterpret_bits(flags, ones);  // all bits set for yes
    count -= ones;
  }
  C10_ALWAYS_INLINE static void look_up(const typename Format::Value (&table)[16],
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
    if constexpr (sizeof(typename Format::Value) == sizeof(float)) {
      asm("vfmadd231ps {%2, %1, %0|%0, %1, %2}" : "+v"(sum) : "v"(a), "v"(b));
    } else {
      asm("vfmadd231pd {%2, %1, %0|%0, %1, %2}" : "+v"(sum) : "v"(a), "v"(b));
    }
#else
    for (int64_t lane = 0; lane < kWidth; ++lane) {
      typename Format::Value one;
      ScalarLanes<Element>::fma(a[lane], b[lane], c[lane], one);
      sum[lane] = one;
    }
#endif
    result = sum;
  }
  C10_ALWAYS_INLINE static void sqrt(const Value& x, Value& result) {
#if defined(__x86_64__) && !defined(__clang__)
    if constexpr (sizeof(typename Format::Value) == sizeof(float)) {
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
  C10_ALWAYS_INLINE static void widen(const Memory& memory, Bits& bits) {
#if defined(__x86_64__) && !defined(__clang__)
    if constexpr (sizeof(Bits) >= 32 && sizeof(Stored) == 1) {
      asm("vpmovzxbd {%1, %0|%0, %1}" : "=v"(bits) : "vm"(memory));
      return;
    } else if constexpr (sizeof(Bits) >= 32) {
      asm("vpmovzxwd {%1, %0|%0, %1}" : "=v"(bits) : "vm"(memory));
      return;
    }
#endif
    bits = __builtin_convertvector(__builtin_convertvector(memory, Halves), Bits);
  }

  /// Takes the lowest bits of each lane.
  C10_ALWAYS_INLINE static void keep_low(const Bits& bits, Memory& memory) {
    constexpr bool kTakesBytes = sizeof(Stored) == 1;
#if defined(__x86_64__) && !defined(__clang__)
    if constexpr (sizeof(Bits) == 64 && kTakesBytes) {
      asm("vpmovdb {%1, %0|%0, %1}" : "=v"(memory) : "v"(bits));
      return;
    } else if constexpr (sizeof(Bits) == 64) {
      asm("vpmovdw {%1, %0|%0, %1}" : "=v"(memory) : "v"(bits));
      return;
    } else if constexpr (sizeof(Bits) == 32 && kTakesBytes) {
      typedef uint8_t Bytes __attribute__((vector_size(32)));
      Bytes bytes;
      reinterpret_bits(bits, bytes);
      bytes = __builtin_shuffle(
          bytes, Bytes{0,  4,  8,  12, 0,  4,  8,  12, 0,  4,  8,  12, 0,  4,  8,  12,
                       16, 20, 24, 28, 16, 20, 24, 28, 16, 20, 24, 28, 16, 20, 24, 28});
      Bits words;
      reinterpret_bits(bytes, words);
      words = __builtin_shuffle(words, Bits{0, 4, 0, 4, 0, 4, 0, 4});
      std::memcpy(&memory, &words, sizeof(memory));
      return;
    }
#endif
    if constexpr (kTakesBytes) {
      memory = __builtin_convertvector(__builtin_convertvector(bits, Halves), Memory);
    } else {
      memory = __builtin_convertvector(bits, Memory);
    }
  }
};

#endif

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
