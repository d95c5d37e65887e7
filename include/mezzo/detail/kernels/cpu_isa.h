#pragma once

#include <mezzo/detail/kernels/cpu_lanes.h>
#include <mezzo/version.h>

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

enum class CpuIsa : uint8_t { scalar, vector128, avx2, avx512 };

/// The loops for one dtype and one instruction set.
struct UnscaleLoops {
  bool (*unscale)(void* data, int64_t count, float inv_scale);
  bool (*check)(const void* data, int64_t count);
};

template <class Element, class Lanes>
struct PlainLoops {
  static bool unscale(void* data, int64_t count, float inv_scale) {
    return unscale_loop<Element, Lanes>(data, count, inv_scale);
  }
  static bool check(const void* data, int64_t count) {
    return check_loop<Element, Lanes>(data, count);
  }
};

#if defined(__GNUC__) && defined(__x86_64__)

template <class Element>
struct Avx2Loops {
  __attribute__((target("avx2"))) static bool unscale(void* data, int64_t count, float inv_scale) {
    return unscale_loop<Element, VectorLanes<Element, 32>>(data, count, inv_scale);
  }
  __attribute__((target("avx2"))) static bool check(const void* data, int64_t count) {
    return check_loop<Element, VectorLanes<Element, 32>>(data, count);
  }
};

template <class Element>
struct Avx512Loops {
  __attribute__((target("avx512f"))) static bool unscale(void* data, int64_t count,
                                                         float inv_scale) {
    return unscale_loop<Element, VectorLanes<Element, 64>>(data, count, inv_scale);
  }
  __attribute__((target("avx512f"))) static bool check(const void* data, int64_t count) {
    return check_loop<Element, VectorLanes<Element, 64>>(data, count);
  }
};

#endif

inline bool has_isa(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::scalar:
      return true;
    case CpuIsa::vector128:
#if defined(__GNUC__)
      return true;
#else
      return false;
#endif
    case CpuIsa::avx2:
#if defined(__GNUC__) && defined(__x86_64__)
      return __builtin_cpu_supports("avx2") != 0;
#else
      return false;
#endif
    case CpuIsa::avx512:
#if defined(__GNUC__) && defined(__x86_64__)
      return __builtin_cpu_supports("avx512f") != 0;
#else
      return false;
#endif
  }
  return false;
}

inline CpuIsa best_isa() {
  static const CpuIsa best = has_isa(CpuIsa::avx512)      ? CpuIsa::avx512
                             : has_isa(CpuIsa::avx2)      ? CpuIsa::avx2
                             : has_isa(CpuIsa::vector128) ? CpuIsa::vector128
                                                          : CpuIsa::scalar;
  return best;
}

template <class Loops>
constexpr UnscaleLoops loops_of() {
  return {&Loops::unscale, &Loops::check};
}

template <class Element>
UnscaleLoops unscale_loops(CpuIsa isa) {
  switch (isa) {
#if defined(__GNUC__) && defined(__x86_64__)
    case CpuIsa::avx512:
      return loops_of<Avx512Loops<Element>>();
    case CpuIsa::avx2:
      return loops_of<Avx2Loops<Element>>();
#endif
#if defined(__GNUC__)
    case CpuIsa::vector128:
      return loops_of<PlainLoops<Element, VectorLanes<Element, 16>>>();
#endif
    default:
      return loops_of<PlainLoops<Element, ScalarLanes<Element>>>();
  }
}

inline UnscaleLoops unscale_loops(at::ScalarType dtype, CpuIsa isa) {
  switch (dtype) {
    case at::kFloat:
      return unscale_loops<float>(isa);
    case at::kDouble:
      return unscale_loops<double>(isa);
    case at::kHalf:
      return unscale_loops<c10::Half>(isa);
    case at::kBFloat16:
      return unscale_loops<c10::BFloat16>(isa);
    default:
      TORCH_CHECK(false, "unscale: dtype ", dtype, " is none of float, double, half and bfloat16");
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
