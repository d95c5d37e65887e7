#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/simd.h>

#include <ATen/Version.h>

#include <cstdint>
#include <string>

// Kernels have one body, compiled for each instruction set and selected at run time.
//
// A kernel is a class template over element types (or any types) and, last, a vector type:
//
//   template <class Element, class Vec>
//   struct UnscaleKernel {
//     C10_ALWAYS_INLINE static bool run(const void* from, void* to, int64_t count, double scale);
//   };
//   auto* const unscale = kernel_for_isa<UnscaleKernel, float>(best_isa());
//
// `run` and all functions that it calls must be C10_ALWAYS_INLINE, otherwise they are compiled for
// the caller's target. Its arguments must not be vectors. `Vec` is ScalarVec<Element> or
// SimdVec<Element, bytes> of the first type.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Instruction sets. scalar: the portable fallback. vector128: aarch64. avx2: AVX2
/// and FMA. avx512: AVX512F and AVX512BW, as in ATen.
enum class CpuIsa : uint8_t { scalar, vector128, avx2, avx512 };

template <class Kernel, class Function = decltype(&Kernel::run)>
struct IsaVariants;

#if defined(__GNUC__) && defined(__x86_64__)
/// Executes vzeroupper when it is destroyed. Dirty upper halves slow the caller's SSE code down on
/// Intel CPUs; g++ inserts vzeroupper itself only from -O2 on.
struct VzeroupperGuard {
  __attribute__((target("avx"), always_inline)) ~VzeroupperGuard() { __builtin_ia32_vzeroupper(); }
};
#endif

// g++ rematerializes a loop's vector constants from general registers in each iteration, unless it
// tunes for a CPU where that is slow: 16-bit steps take 5 to 11 % less time with btver2.
#if defined(__GNUC__) && defined(__x86_64__) && !defined(__clang__)
#define MEZZO_TUNING ",tune=btver2"
#else
#define MEZZO_TUNING ""
#endif

/// A kernel's body inlined into a function for each target.
template <class Kernel, class Result, class... Args>
struct IsaVariants<Kernel, Result (*)(Args...)> {
  static Result baseline(Args... args) { return Kernel::run(args...); }
#if defined(__GNUC__) && defined(__x86_64__)
  __attribute__((target("avx2,fma" MEZZO_TUNING))) static Result avx2(Args... args) {
    const VzeroupperGuard guard;
    return Kernel::run(args...);
  }
  __attribute__((target("avx512f,avx512bw" MEZZO_TUNING))) static Result avx512(Args... args) {
    const VzeroupperGuard guard;
    return Kernel::run(args...);
  }
#endif
};

#undef MEZZO_TUNING

/// Returns the instruction set of ATen's kernels: the best that this CPU has, or the environment
/// variable ATEN_CPU_CAPABILITY (default, avx2 or avx512).
inline CpuIsa best_isa() {
#if defined(__GNUC__) && defined(__x86_64__)
  static const CpuIsa best = [] {
    const std::string capability = at::get_cpu_capability();
    return capability == "AVX512" ? CpuIsa::avx512
           : capability == "AVX2" ? CpuIsa::avx2
                                  : CpuIsa::scalar;
  }();
  return best;
#elif defined(__GNUC__) && defined(__aarch64__)
  return CpuIsa::vector128;
#else
  return CpuIsa::scalar;
#endif
}

/// Returns whether this CPU can run kernels of `isa`.
inline bool has_isa(CpuIsa isa) {
  const CpuIsa best = best_isa();
  return isa == CpuIsa::scalar || isa == best || (isa == CpuIsa::avx2 && best == CpuIsa::avx512);
}

/// Returns the kernel's `run` compiled for `isa`. Call it only if has_isa(isa).
template <template <class...> class Kernel, class Element, class... Others>
auto kernel_for_isa(CpuIsa isa) -> decltype(&Kernel<Element, Others..., ScalarVec<Element>>::run) {
  switch (isa) {
#if defined(__GNUC__) && defined(__x86_64__)
    case CpuIsa::avx512:
      return &IsaVariants<Kernel<Element, Others..., SimdVec<Element, 64>>>::avx512;
    case CpuIsa::avx2:
      return &IsaVariants<Kernel<Element, Others..., SimdVec<Element, 32>>>::avx2;
#elif defined(__GNUC__) && defined(__aarch64__)
    case CpuIsa::vector128:
      return &IsaVariants<Kernel<Element, Others..., SimdVec<Element, 16>>>::baseline;
#endif
    default:
      return &IsaVariants<Kernel<Element, Others..., ScalarVec<Element>>>::baseline;
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
