#pragma once

#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/cpu_isa.h>
#include <mezzo/kernels/cpu_lanes.h>
#include <mezzo/kernels/gradient_element.h>

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Whole vectors of [begin, count): returns where it stopped, and adds to `found` what it saw.
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

/// `count` elements, of any alignment: those at `from` times `inv_scale` go to `to`, which may be
/// the same place; true if one became inf or NaN. All but double round `inv_scale` to float.
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

/// `count` elements at `data`, of any alignment: true if one is inf or NaN.
template <class Element, class Lanes>
struct CheckKernel {
  C10_ALWAYS_INLINE static bool run(const void* data, int64_t count) {
    const auto* stored = static_cast<const typename Lanes::Format::Stored*>(data);
    bool found = false;
    const int64_t done = check_lanes<Lanes>(stored, 0, count, found);
    check_lanes<ScalarLanes<Element>>(stored, done, count, found);
    return found;
  }
};

/// The loops for one dtype and one instruction set.
struct UnscaleLoops {
  bool (*unscale)(const void* from, void* to, int64_t count, double inv_scale);
  bool (*check)(const void* data, int64_t count);
};

template <class Element>
UnscaleLoops unscale_loops(CpuIsa isa) {
  return {cpu_kernel<UnscaleKernel, Element>(isa), cpu_kernel<CheckKernel, Element>(isa)};
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
      TORCH_CHECK(false, "A gradient has the dtype ", dtype_name(dtype),
                  "; it should be float32, float64, bfloat16 or float16");
  }
}

// Held by mezzo::compiled (mezzo/optim/compiled.h).
#define MEZZO_COMPILED_UNSCALES(EXTERN)                          \
  EXTERN template UnscaleLoops unscale_loops<float>(CpuIsa);     \
  EXTERN template UnscaleLoops unscale_loops<double>(CpuIsa);    \
  EXTERN template UnscaleLoops unscale_loops<c10::Half>(CpuIsa); \
  EXTERN template UnscaleLoops unscale_loops<c10::BFloat16>(CpuIsa);

#ifdef MEZZO_LEFT_TO_LIBRARY
MEZZO_COMPILED_UNSCALES(extern)
#endif

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
