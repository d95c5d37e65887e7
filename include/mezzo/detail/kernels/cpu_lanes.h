#pragma once

#include <mezzo/detail/kernels/float_format.h>
#include <mezzo/detail/kernels/unscale_element.h>
#include <mezzo/version.h>

#include <c10/macros/Macros.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

// The CPU's loops, once for each vector width. Vector types say outright what a compiler would
// otherwise find only under some flags: these loops are as fast at -O1 without -march as with
// -O3 -march=native. Each is inlined into a function that is compiled for its instruction set, and
// chosen at run time (cpu_isa.h).
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// One element at a time: the tail of a loop, compilers without vector types, and the reference.
template <class Element>
struct ScalarLanes {
  using Format = FloatFormat<Element>;
  using Stored = typename Format::Stored;
  using Value = typename Format::Value;
  using Bits = typename Format::Bits;
  using Flags = uint32_t;
  static constexpr int64_t kWidth = 1;

  // By memcpy, as the vectors do: the memory holds floats, perhaps at an odd address.
  C10_ALWAYS_INLINE static void load(const Stored* from, Bits& bits) {
    Stored stored;
    __builtin_memcpy(&stored, from, sizeof(Stored));
    bits = stored;
  }
  C10_ALWAYS_INLINE static void store(const Bits& bits, Stored* to) {
    const auto stored = static_cast<Stored>(bits);
    __builtin_memcpy(to, &stored, sizeof(Stored));
  }
  C10_ALWAYS_INLINE static void broadcast(typename Format::Value from, Value& to) { to = from; }
  C10_ALWAYS_INLINE static bool any(const Flags& flags) { return flags != 0; }
};

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
};

#endif

/// Whole vectors of [begin, count): returns where it stopped, and adds to `found` what it saw.
template <class Lanes>
C10_ALWAYS_INLINE int64_t unscale_lanes(typename Lanes::Format::Stored* data, int64_t begin,
                                        int64_t count, typename Lanes::Format::Value inv_scale,
                                        bool& found) {
  UnscaleElement<typename Lanes::Format, typename Lanes::Value> unscale;
  Lanes::broadcast(inv_scale, unscale.inv_scale);
  typename Lanes::Flags nonfinite{};
  int64_t i = begin;
  for (; i + Lanes::kWidth <= count; i += Lanes::kWidth) {
    typename Lanes::Bits bits;
    Lanes::load(data + i, bits);
    unscale(bits, nonfinite);
    Lanes::store(bits, data + i);
  }
  found |= Lanes::any(nonfinite);
  return i;
}

template <class Lanes>
C10_ALWAYS_INLINE int64_t check_lanes(const typename Lanes::Format::Stored* data, int64_t begin,
                                      int64_t count, bool& found) {
  const CheckElement<typename Lanes::Format> check;
  typename Lanes::Flags nonfinite{};
  int64_t i = begin;
  for (; i + Lanes::kWidth <= count; i += Lanes::kWidth) {
    typename Lanes::Bits bits;
    Lanes::load(data + i, bits);
    check(bits, nonfinite);
  }
  found |= Lanes::any(nonfinite);
  return i;
}

/// `count` elements at `data`, of any alignment: scaled in place; true if one became inf or NaN.
template <class Element, class Lanes>
C10_ALWAYS_INLINE bool unscale_loop(void* data, int64_t count, float inv_scale) {
  auto* stored = static_cast<typename Lanes::Format::Stored*>(data);
  bool found = false;
  const int64_t done = unscale_lanes<Lanes>(stored, 0, count, inv_scale, found);
  unscale_lanes<ScalarLanes<Element>>(stored, done, count, inv_scale, found);
  return found;
}

template <class Element, class Lanes>
C10_ALWAYS_INLINE bool check_loop(const void* data, int64_t count) {
  const auto* stored = static_cast<const typename Lanes::Format::Stored*>(data);
  bool found = false;
  const int64_t done = check_lanes<Lanes>(stored, 0, count, found);
  check_lanes<ScalarLanes<Element>>(stored, done, count, found);
  return found;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
