#pragma once

#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/cpu_isa.h>
#include <mezzo/kernels/partial_grad_stats.h>
#include <mezzo/kernels/simd.h>

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

// CPU kernel of GradStats. Squares are summed in float64, in which the square of a float32 is
// exact, in sixteen sums for any vector width: element i of a chunk is added to sum i % 16, and the
// sixteen are reduced as a tree. All instruction sets are bitwise identical.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns `make(Element{})` for the element type of `dtype`.
template <class Make>
auto dispatch_gradient_dtype(at::ScalarType dtype, const Make& make) -> decltype(make(float{})) {
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
      TORCH_CHECK(false, "expected a gradient of float32, float64, bfloat16 or float16, but got ",
                  dtype_name(dtype));
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

/// The sixteen sums in vectors of kBytes; a vector of float32 is added to two of them.
template <class Element, int kBytes>
struct SquareSums<SimdVec<Element, kBytes>> {
  using Vec = SimdVec<Element, kBytes>;
  static constexpr bool kIsDouble = sizeof(typename Vec::Format::opmath_t) == sizeof(double);
  // g++ 12 drops vector_size from a type that does not depend on a template parameter.
  using Double = std::conditional_t<kIsDouble, typename Vec::Format::opmath_t, double>;
  typedef Double Doubles __attribute__((vector_size(kBytes)));
  typedef typename Vec::Format::opmath_t HalfWidthFloats __attribute__((vector_size(kBytes / 2)));

  Doubles sums[kSquareSums * int64_t{sizeof(double)} / kBytes] = {};

  template <std::size_t kLoad>
  C10_ALWAYS_INLINE void add(const typename Vec::Value& value) {
    if constexpr (kIsDouble) {
      Vec::fma(value, value, sums[kLoad], sums[kLoad]);
    } else {
      Doubles low;
      Doubles high;
      to_double(value, low, high);
      sums[2 * kLoad] += low * low;
      sums[2 * kLoad + 1] += high * high;
    }
  }

 private:
  C10_ALWAYS_INLINE static void to_double(const typename Vec::Value& value, Doubles& low,
                                          Doubles& high) {
    HalfWidthFloats low_floats;
    HalfWidthFloats high_floats;
    std::memcpy(&low_floats, &value, sizeof(HalfWidthFloats));
    std::memcpy(&high_floats, reinterpret_cast<const char*>(&value) + sizeof(HalfWidthFloats),
                sizeof(HalfWidthFloats));
#if defined(__x86_64__) && \
    !defined(__clang__)  // g++ 12 compiles __builtin_convertvector to a dozen instructions
    asm("vcvtps2pd {%1, %0|%0, %1}" : "=v"(low) : "vm"(low_floats));
    asm("vcvtps2pd {%1, %0|%0, %1}" : "=v"(high) : "vm"(high_floats));
#else
    low = __builtin_convertvector(low_floats, Doubles);
    high = __builtin_convertvector(high_floats, Doubles);
#endif
  }
};

#endif

/// Copies the lanes of vectors to an array. The asm forces the copy into memory: at -O3, g++ 12
/// otherwise keeps the original in memory during the loop before.
template <class Vectors, class Element>
C10_ALWAYS_INLINE void unpack(const Vectors& vectors, Element* lanes) {
  Vectors copy = vectors;
#if defined(__GNUC__)
  asm("" : "+m"(copy));
#endif
  std::memcpy(lanes, &copy, sizeof(copy));
}

/// Sums and maximum of a chunk.
template <class Element, class Vec>
struct GradStatsAccumulator {
  using Format = typename Vec::Format;
  using Stored = typename Format::Stored;

  SquareSums<Vec> sums;
  typename Vec::Bits max_bits_vec{};

  /// Adds sixteen elements.
  C10_ALWAYS_INLINE void add_tile(const Stored* data) {
    add_loads(data,
              std::make_index_sequence<static_cast<std::size_t>(kSquareSums / Vec::kWidth)>{});
  }

  /// Adds elements [begin, count), fewer than sixteen, and writes the result to `partial`.
  C10_ALWAYS_INLINE void finish(const Stored* data, int64_t begin, int64_t count,
                                PartialGradStats& partial) const {
    double square_sums[kSquareSums];
    unpack(sums, square_sums);
    typename Format::Bits lane_max[Vec::kWidth];
    unpack(max_bits_vec, lane_max);
    typename Format::Bits max_bits = *std::max_element(lane_max, lane_max + Vec::kWidth);
    for (int64_t i = begin; i < count; ++i) {
      typename Format::Bits bits;
      ScalarVec<Element>::load(data + i, bits);
      typename Format::opmath_t value;
      Format::to_opmath(bits, value);
      add_square(value, square_sums[i - begin]);
      update_max_abs<Format>(bits, max_bits);
    }
    for (int64_t step = kSquareSums / 2; step > 0; step /= 2) {
      for (int64_t i = 0; i < step; ++i) square_sums[i] += square_sums[i + step];
    }
    partial.norm_sq = square_sums[0];
    set_max_abs<Format>(max_bits, partial);
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
    update_max_abs<Format>(bits, max_bits_vec);
  }
};

/// Writes the statistics of `count` elements of any alignment, at most kGradStatsChunkElements.
template <class Element, class Vec>
struct GradStatsKernel {
  C10_ALWAYS_INLINE static void run(const void* data, int64_t count, PartialGradStats& partial) {
    const auto* stored = static_cast<const typename Vec::Format::Stored*>(data);
    GradStatsAccumulator<Element, Vec> accumulator;
    int64_t i = 0;
    for (; i + kSquareSums <= count; i += kSquareSums) accumulator.add_tile(stored + i);
    accumulator.finish(stored, i, count, partial);
  }
};

using GradStatsKernelFn = void (*)(const void* data, int64_t count, PartialGradStats& partial);

template <class Element>
GradStatsKernelFn get_grad_stats_kernel(CpuIsa isa) {
  return kernel_for_isa<GradStatsKernel, Element>(isa);
}

inline GradStatsKernelFn get_grad_stats_kernel(at::ScalarType dtype, CpuIsa isa) {
  return dispatch_gradient_dtype(
      dtype, [isa]<class Element>(Element) { return get_grad_stats_kernel<Element>(isa); });
}

// Compiled by mezzo::compiled (mezzo/optim/compiled.h).
#define MEZZO_COMPILED_GRAD_STATS_KERNELS(EXTERN)                             \
  EXTERN template GradStatsKernelFn get_grad_stats_kernel<float>(CpuIsa);     \
  EXTERN template GradStatsKernelFn get_grad_stats_kernel<double>(CpuIsa);    \
  EXTERN template GradStatsKernelFn get_grad_stats_kernel<c10::Half>(CpuIsa); \
  EXTERN template GradStatsKernelFn get_grad_stats_kernel<c10::BFloat16>(CpuIsa);

#ifdef MEZZO_COMPILED_LIB
MEZZO_COMPILED_GRAD_STATS_KERNELS(extern)
#endif

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
