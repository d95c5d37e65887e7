#pragma once

#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/cpu_isa.h>
#include <mezzo/kernels/grad_stats_partial.h>
#include <mezzo/kernels/simd.h>

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
template <class Vec>
struct SquareSums {
  double sums[kSquareSums] = {};

  template <std::size_t kLoad>
  C10_ALWAYS_INLINE void add(const typename Vec::Value& value) {
    add_square(value, sums[kLoad]);
  }
};

#if defined(__GNUC__)

/// The sixteen sums in vectors as wide as those that are loaded: of float, a load fills two.
template <class Element, int kBytes>
struct SquareSums<SimdVec<Element, kBytes>> {
  using Vec = SimdVec<Element, kBytes>;
  static constexpr bool kIsDouble = sizeof(typename Vec::Format::opmath_t) == sizeof(double);
  // g++ 12 forgets the attribute of a type that does not depend on a template's parameter.
  using Double = std::conditional_t<kIsDouble, typename Vec::Format::opmath_t, double>;
  typedef Double Doubles __attribute__((vector_size(kBytes)));
  typedef typename Vec::Format::opmath_t HalfOfFloats __attribute__((vector_size(kBytes / 2)));

  Doubles sums[kSquareSums * int64_t{sizeof(double)} / kBytes] = {};

  template <std::size_t kLoad>
  C10_ALWAYS_INLINE void add(const typename Vec::Value& value) {
    if constexpr (kIsDouble) {
      Vec::fma(value, value, sums[kLoad], sums[kLoad]);
    } else {
      Doubles low;
      Doubles high;
      widen(value, low, high);
      sums[2 * kLoad] += low * low;
      sums[2 * kLoad + 1] += high * high;
    }
  }

 private:
  C10_ALWAYS_INLINE static void widen(const typename Vec::Value& value, Doubles& low,
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
template <class Element, class Vec>
struct GradStatsAccumulator {
  using Format = typename Vec::Format;
  using Stored = typename Format::Stored;

  SquareSums<Vec> sums;
  typename Vec::Bits largest{};

  /// Adds sixteen elements.
  C10_ALWAYS_INLINE void add_block(const Stored* data) {
    add_loads(data,
              std::make_index_sequence<static_cast<std::size_t>(kSquareSums / Vec::kWidth)>{});
  }

  /// Adds the last elements, [begin, count), fewer than sixteen, and assigns the sums to `partial`.
  C10_ALWAYS_INLINE void finish(const Stored* data, int64_t begin, int64_t count,
                                PartialGradStats& partial) const {
    double each[kSquareSums];
    unpack(sums, each);
    typename Format::Bits of_lane[Vec::kWidth];
    unpack(largest, of_lane);
    typename Format::Bits most = *std::max_element(of_lane, of_lane + Vec::kWidth);
    for (int64_t i = begin; i < count; ++i) {
      typename Format::Bits bits;
      ScalarVec<Element>::load(data + i, bits);
      typename Format::opmath_t value;
      Format::to_opmath(bits, value);
      add_square(value, each[i - begin]);
      keep_larger_magnitude<Format>(bits, most);
    }
    for (int64_t step = kSquareSums / 2; step > 0; step /= 2) {
      for (int64_t i = 0; i < step; ++i) each[i] += each[i + step];
    }
    partial.norm_sq = each[0];
    set_largest<Format>(most, partial);
  }

 private:
  template <std::size_t... kLoads>
  C10_ALWAYS_INLINE void add_loads(const Stored* data, std::index_sequence<kLoads...>) {
    (add_load<kLoads>(data + static_cast<int64_t>(kLoads) * Vec::kWidth), ...);
  }
  template <std::size_t kLoad>
  C10_ALWAYS_INLINE void add_load(const Stored* data) {
    typename Vec::Bits bits;
    Vec::load(data, bits);
    typename Vec::Value value;
    Format::to_opmath(bits, value);
    sums.template add<kLoad>(value);
    keep_larger_magnitude<Format>(bits, largest);
  }
};

/// Summarises `count` elements at `data`, of any alignment; at most kGradStatsChunkElements.
template <class Element, class Vec>
struct GradStatsKernel {
  C10_ALWAYS_INLINE static void run(const void* data, int64_t count, PartialGradStats& partial) {
    const auto* stored = static_cast<const typename Vec::Format::Stored*>(data);
    GradStatsAccumulator<Element, Vec> accumulator;
    int64_t i = 0;
    for (; i + kSquareSums <= count; i += kSquareSums) accumulator.add_block(stored + i);
    accumulator.finish(stored, i, count, partial);
  }
};

/// Assigns the summary of `count` elements at `data` to `partial`.
using GradStatsKernelFn = void (*)(const void* data, int64_t count, PartialGradStats& partial);

template <class Element>
GradStatsKernelFn get_grad_stats_kernel(CpuIsa isa) {
  return kernel_for_isa<GradStatsKernel, Element>(isa);
}

inline GradStatsKernelFn get_grad_stats_kernel(at::ScalarType dtype, CpuIsa isa) {
  return for_gradient_dtype(
      dtype, [isa]<class Element>(Element) { return get_grad_stats_kernel<Element>(isa); });
}

/// Handles the whole vectors of [begin, count), and adds inf and NaN to `found`. Returns the index
/// of the first element that is left.
template <class Vec>
C10_ALWAYS_INLINE int64_t unscale_vectors(const typename Vec::Format::Stored* from,
                                          typename Vec::Format::Stored* to, int64_t begin,
                                          int64_t count, typename Vec::Format::opmath_t inv_scale,
                                          bool& found) {
  UnscaleFunctor<typename Vec::Format, typename Vec::Value> unscale;
  Vec::broadcast(inv_scale, unscale.inv_scale);
  typename Vec::Mask nonfinite{};
  int64_t i = begin;
  for (; i + Vec::kWidth <= count; i += Vec::kWidth) {
    typename Vec::Bits bits;
    Vec::load(from + i, bits);
    unscale(bits, nonfinite);
    Vec::store(bits, to + i);
  }
  found |= Vec::any(nonfinite);
  return i;
}

/// Writes from[i] * inv_scale to `to`, for `count` elements of any alignment, and returns whether a
/// product is inf or NaN. `to` may be `from`. For all dtypes but double, inv_scale is rounded to
/// float.
template <class Element, class Vec>
struct UnscaleKernel {
  C10_ALWAYS_INLINE static bool run(const void* from, void* to, int64_t count, double inv_scale) {
    const auto* source = static_cast<const typename Vec::Format::Stored*>(from);
    auto* target = static_cast<typename Vec::Format::Stored*>(to);
    const auto factor = static_cast<typename Vec::Format::opmath_t>(inv_scale);
    bool found = false;
    const int64_t done = unscale_vectors<Vec>(source, target, 0, count, factor, found);
    unscale_vectors<ScalarVec<Element>>(source, target, done, count, factor, found);
    return found;
  }
};

/// Multiplies `count` elements; see UnscaleKernel.
using UnscaleLoop = bool (*)(const void* from, void* to, int64_t count, double inv_scale);

template <class Element>
UnscaleLoop get_unscale_kernel(CpuIsa isa) {
  return kernel_for_isa<UnscaleKernel, Element>(isa);
}

inline UnscaleLoop get_unscale_kernel(at::ScalarType dtype, CpuIsa isa) {
  return for_gradient_dtype(
      dtype, [isa]<class Element>(Element) { return get_unscale_kernel<Element>(isa); });
}

// Held by mezzo::compiled (mezzo/optim/compiled.h).
#define MEZZO_COMPILED_GRADIENT_KERNELS_OF(EXTERN, Element)                 \
  EXTERN template GradStatsKernelFn get_grad_stats_kernel<Element>(CpuIsa); \
  EXTERN template UnscaleLoop get_unscale_kernel<Element>(CpuIsa);

#define MEZZO_COMPILED_GRADIENT_KERNELS(EXTERN)         \
  MEZZO_COMPILED_GRADIENT_KERNELS_OF(EXTERN, float)     \
  MEZZO_COMPILED_GRADIENT_KERNELS_OF(EXTERN, double)    \
  MEZZO_COMPILED_GRADIENT_KERNELS_OF(EXTERN, c10::Half) \
  MEZZO_COMPILED_GRADIENT_KERNELS_OF(EXTERN, c10::BFloat16)

#ifdef MEZZO_COMPILED_LIB
MEZZO_COMPILED_GRADIENT_KERNELS(extern)
#endif

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
