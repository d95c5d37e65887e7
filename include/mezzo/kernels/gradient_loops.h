#pragma once

#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/cpu_isa.h>
#include <mezzo/kernels/cpu_lanes.h>
#include <mezzo/kernels/gradient_element.h>

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

// The CPU's loops over gradients: one sums up, one unscales. Squares are summed in double, in
// sixteen sums whatever the vectors' width: element i of a chunk belongs to sum i % 16, and the
// sixteen are added as a tree. So every instruction set gives the same bits. The square of a float
// is exact in double.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns `make(Element{})` for the element type of a gradient's dtype.
template <class Make>
auto for_gradient_dtype(at::ScalarType dtype, const Make& make) -> decltype(make(float{})) {
  switch (dtype) {
    case at::kFloat:
      return make(float{});
    case at::kDouble:
      return make(double{});
    case at::kHalf:
      return make(c10::Half{});
    case at::kBFloat16:
      return make(c10::BFloat16{});
    default:
      TORCH_CHECK(false, "A gradient has the dtype ", dtype_name(dtype),
                  "; it should be float32, float64, bfloat16 or float16");
  }
}

inline constexpr int64_t kSquareSums = 16;

/// The sixteen sums as scalars.
template <class Lanes>
struct SquareSums {
  double sums[kSquareSums] = {};

  template <std::size_t kLoad>
  C10_ALWAYS_INLINE void add(const typename Lanes::Value& value) {
    add_square(value, sums[kLoad]);
  }
};

#if defined(__GNUC__)

/// The sixteen sums in vectors as wide as those that are loaded: of float, a load fills two.
template <class Element, int kBytes>
struct SquareSums<VectorLanes<Element, kBytes>> {
  using Lanes = VectorLanes<Element, kBytes>;
  static constexpr bool kIsDouble = sizeof(typename Lanes::Format::Value) == sizeof(double);
  // g++ 12 forgets the attribute of a type that does not depend on a template's parameter.
  using Double = std::conditional_t<kIsDouble, typename Lanes::Format::Value, double>;
  typedef Double Doubles __attribute__((vector_size(kBytes)));
  typedef typename Lanes::Format::Value HalfOfFloats __attribute__((vector_size(kBytes / 2)));

  Doubles sums[kSquareSums * int64_t{sizeof(double)} / kBytes] = {};

  template <std::size_t kLoad>
  C10_ALWAYS_INLINE void add(const typename Lanes::Value& value) {
    if constexpr (kIsDouble) {
      Lanes::fma(value, value, sums[kLoad], sums[kLoad]);
    } else {
      Doubles low;
      Doubles high;
      widen(value, low, high);
      sums[2 * kLoad] += low * low;
      sums[2 * kLoad + 1] += high * high;
    }
  }

 private:
  C10_ALWAYS_INLINE static void widen(const typename Lanes::Value& value, Doubles& low,
                                      Doubles& high) {
    HalfOfFloats low_floats;
    HalfOfFloats high_floats;
    std::memcpy(&low_floats, &value, sizeof(HalfOfFloats));
    std::memcpy(&high_floats, reinterpret_cast<const char*>(&value) + sizeof(HalfOfFloats),
                sizeof(HalfOfFloats));
#if defined(__x86_64__) && \
    !defined(__clang__)  // g++ 12 makes a dozen instructions of the plain form
    asm("vcvtps2pd {%1, %0|%0, %1}" : "=v"(low) : "vm"(low_floats));
    asm("vcvtps2pd {%1, %0|%0, %1}" : "=v"(high) : "vm"(high_floats));
#else
    low = __builtin_convertvector(low_floats, Doubles);
    high = __builtin_convertvector(high_floats, Doubles);
#endif
  }
};

#endif

/// Access to single lanes of vectors that a loop has filled. They are copied so that the compiler
/// puts the copy into memory: at -O3, g++ 12 otherwise keeps the original there during the loop.
template <class Vectors, class Element>
C10_ALWAYS_INLINE void unpack(const Vectors& vectors, Element* each) {
  Vectors copy = vectors;
#if defined(__GNUC__)
  asm("" : "+m"(copy));
#endif
  std::memcpy(each, &copy, sizeof(copy));
}

/// Running sums and maximum of one chunk.
template <class Element, class Lanes>
struct SummaryAccumulator {
  using Format = typename Lanes::Format;
  using Stored = typename Format::Stored;

  SquareSums<Lanes> sums;
  typename Lanes::Bits largest{};

  /// Adds sixteen elements.
  C10_ALWAYS_INLINE void add_block(const Stored* data) {
    add_loads(data,
              std::make_index_sequence<static_cast<std::size_t>(kSquareSums / Lanes::kWidth)>{});
  }

  /// Adds the last elements, [begin, count), fewer than sixteen, and assigns the sums to `partial`.
  C10_ALWAYS_INLINE void finish(const Stored* data, int64_t begin, int64_t count,
                                GradientPartial& partial) const {
    double each[kSquareSums];
    unpack(sums, each);
    typename Format::Bits of_lane[Lanes::kWidth];
    unpack(largest, of_lane);
    typename Format::Bits most = *std::max_element(of_lane, of_lane + Lanes::kWidth);
    for (int64_t i = begin; i < count; ++i) {
      typename Format::Bits bits;
      ScalarLanes<Element>::load(data + i, bits);
      typename Format::Value value;
      Format::widen(bits, value);
      add_square(value, each[i - begin]);
      keep_larger_magnitude<Format>(bits, most);
    }
    for (int64_t step = kSquareSums / 2; step > 0; step /= 2) {
      for (int64_t i = 0; i < step; ++i) each[i] += each[i + step];
    }
    partial.sum_of_squares = each[0];
    set_largest<Format>(most, partial);
  }

 private:
  template <std::size_t... kLoads>
  C10_ALWAYS_INLINE void add_loads(const Stored* data, std::index_sequence<kLoads...>) {
    (add_load<kLoads>(data + static_cast<int64_t>(kLoads) * Lanes::kWidth), ...);
  }
  template <std::size_t kLoad>
  C10_ALWAYS_INLINE void add_load(const Stored* data) {
    typename Lanes::Bits bits;
    Lanes::load(data, bits);
    typename Lanes::Value value;
    Format::widen(bits, value);
    sums.template add<kLoad>(value);
    keep_larger_magnitude<Format>(bits, largest);
  }
};

/// Summarises `count` elements at `data`, of any alignment; at most kSummaryChunk.
template <class Element, class Lanes>
struct SummaryKernel {
  C10_ALWAYS_INLINE static void run(const void* data, int64_t count, GradientPartial& partial) {
    const auto* stored = static_cast<const typename Lanes::Format::Stored*>(data);
    SummaryAccumulator<Element, Lanes> accumulator;
    int64_t i = 0;
    for (; i + kSquareSums <= count; i += kSquareSums) accumulator.add_block(stored + i);
    accumulator.finish(stored, i, count, partial);
  }
};

/// Assigns the summary of `count` elements at `data` to `partial`.
using SummaryLoop = void (*)(const void* data, int64_t count, GradientPartial& partial);

template <class Element>
SummaryLoop summary_loop(CpuIsa isa) {
  return cpu_kernel<SummaryKernel, Element>(isa);
}

inline SummaryLoop summary_loop(at::ScalarType dtype, CpuIsa isa) {
  return for_gradient_dtype(dtype,
                            [isa]<class Element>(Element) { return summary_loop<Element>(isa); });
}

/// Handles the whole vectors of [begin, count), and adds inf and NaN to `found`. Returns the index
/// of the first element that is left.
template <class Lanes>
C10_ALWAYS_INLINE int64_t unscale_lanes(const typename Lanes::Format::Stored* from,
                                        typename Lanes::Format::Stored* to, int64_t begin,
                                        int64_t count, typename Lanes::Format::Value inv_scale,
                                        bool& found) {
  UnscaleElement<typename Lanes::Format, typename Lanes::Value> unscale;
  Lanes::broadcast(inv_scale, unscale.inv_scale);
  typename Lanes::Flags nonfinite{};
  int64_t i = begin;
  for (; i + Lanes::kWidth <= count; i += Lanes::kWidth) {
    typename Lanes::Bits bits;
    Lanes::load(from + i, bits);
    unscale(bits, nonfinite);
    Lanes::store(bits, to + i);
  }
  found |= Lanes::any(nonfinite);
  return i;
}

/// Writes from[i] * inv_scale to `to`, for `count` elements of any alignment, and returns whether a
/// product is inf or NaN. `to` may be `from`. For all dtypes but double, inv_scale is rounded to
/// float.
template <class Element, class Lanes>
struct UnscaleKernel {
  C10_ALWAYS_INLINE static bool run(const void* from, void* to, int64_t count, double inv_scale) {
    const auto* source = static_cast<const typename Lanes::Format::Stored*>(from);
    auto* target = static_cast<typename Lanes::Format::Stored*>(to);
    const auto factor = static_cast<typename Lanes::Format::Value>(inv_scale);
    bool found = false;
    const int64_t done = unscale_lanes<Lanes>(source, target, 0, count, factor, found);
    unscale_lanes<ScalarLanes<Element>>(source, target, done, count, factor, found);
    return found;
  }
};

/// Multiplies `count` elements; see UnscaleKernel.
using UnscaleLoop = bool (*)(const void* from, void* to, int64_t count, double inv_scale);

template <class Element>
UnscaleLoop unscale_loop(CpuIsa isa) {
  return cpu_kernel<UnscaleKernel, Element>(isa);
}

inline UnscaleLoop unscale_loop(at::ScalarType dtype, CpuIsa isa) {
  return for_gradient_dtype(dtype,
                            [isa]<class Element>(Element) { return unscale_loop<Element>(isa); });
}

// Held by mezzo::compiled (mezzo/optim/compiled.h).
#define MEZZO_COMPILED_GRADIENT_LOOPS_OF(EXTERN, Element)    \
  EXTERN template SummaryLoop summary_loop<Element>(CpuIsa); \
  EXTERN template UnscaleLoop unscale_loop<Element>(CpuIsa);

#define MEZZO_COMPILED_GRADIENT_LOOPS(EXTERN)         \
  MEZZO_COMPILED_GRADIENT_LOOPS_OF(EXTERN, float)     \
  MEZZO_COMPILED_GRADIENT_LOOPS_OF(EXTERN, double)    \
  MEZZO_COMPILED_GRADIENT_LOOPS_OF(EXTERN, c10::Half) \
  MEZZO_COMPILED_GRADIENT_LOOPS_OF(EXTERN, c10::BFloat16)

#ifdef MEZZO_COMPILED_LIB
MEZZO_COMPILED_GRADIENT_LOOPS(extern)
#endif

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
