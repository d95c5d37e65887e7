#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/cpu_isa.h>
#include <mezzo/kernels/grad_stats_cpu.h>
#include <mezzo/kernels/simd.h>
#include <mezzo/kernels/unscale_functor.h>

#include <c10/core/ScalarType.h>
#include <c10/macros/Macros.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Unscales the whole vectors of elements [begin, count), and sets `found_inf` if a product is inf
/// or NaN. Returns the index of the first remaining element.
template <class Vec>
C10_ALWAYS_INLINE int64_t unscale_vectors(const typename Vec::Format::Stored* from,
                                          typename Vec::Format::Stored* to, int64_t begin,
                                          int64_t count, typename Vec::Format::opmath_t inv_scale,
                                          bool& found_inf) {
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
  found_inf |= Vec::any(nonfinite);
  return i;
}

/// Writes from[i] * inv_scale to to[i] for `count` elements of any alignment; `to` may be `from`.
/// Returns whether a product is inf or NaN. inv_scale is rounded to float32, except for float64.
template <class Element, class Vec>
struct UnscaleKernel {
  C10_ALWAYS_INLINE static bool run(const void* from, void* to, int64_t count, double inv_scale) {
    const auto* source = static_cast<const typename Vec::Format::Stored*>(from);
    auto* target = static_cast<typename Vec::Format::Stored*>(to);
    const auto factor = static_cast<typename Vec::Format::opmath_t>(inv_scale);
    bool found_inf = false;
    const int64_t done = unscale_vectors<Vec>(source, target, 0, count, factor, found_inf);
    unscale_vectors<ScalarVec<Element>>(source, target, done, count, factor, found_inf);
    return found_inf;
  }
};

using UnscaleKernelFn = bool (*)(const void* from, void* to, int64_t count, double inv_scale);

template <class Element>
UnscaleKernelFn get_unscale_kernel(CpuIsa isa) {
  return kernel_for_isa<UnscaleKernel, Element>(isa);
}

inline UnscaleKernelFn get_unscale_kernel(at::ScalarType dtype, CpuIsa isa) {
  return for_gradient_dtype(
      dtype, [isa]<class Element>(Element) { return get_unscale_kernel<Element>(isa); });
}

// Compiled by mezzo::compiled (mezzo/optim/compiled.h).
#define MEZZO_COMPILED_UNSCALE_KERNELS(EXTERN)                           \
  EXTERN template UnscaleKernelFn get_unscale_kernel<float>(CpuIsa);     \
  EXTERN template UnscaleKernelFn get_unscale_kernel<double>(CpuIsa);    \
  EXTERN template UnscaleKernelFn get_unscale_kernel<c10::Half>(CpuIsa); \
  EXTERN template UnscaleKernelFn get_unscale_kernel<c10::BFloat16>(CpuIsa);

#ifdef MEZZO_COMPILED_LIB
MEZZO_COMPILED_UNSCALE_KERNELS(extern)
#endif

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
