/// \file
/// The kernels behind GradScaler on CUDA: one pass over all gradients that unscales and checks; and
/// the loss scale's state machine.
#pragma once

#include <mezzo/base/loss_scale.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/cuda/device.h>
#include <mezzo/kernels/float_format.h>
#include <mezzo/kernels/gradient_element.h>
#include <mezzo/kernels/launch_table.h>
#include <mezzo/kernels/update_scale.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail::cuda {

inline constexpr int kUnscaleThreads = 512;

/// Bytes that one block handles: eight packs of 16 bytes for each thread.
template <class Element>
inline constexpr int kElementsPerBlock = kUnscaleThreads * 16 * 8 / int{sizeof(Element)};

/// Calls `visit(Stored&)` on [begin, end) of `data`, divided among the block's threads, in packs if
/// alignment allows, and writes the values back.
template <class Stored, class Visit>
__device__ void visit_elements(Stored* data, int64_t begin, int64_t end, Visit& visit) {
  using Vector = GradientPack<Stored>;
  Stored* const first = data + begin;
  const int64_t count = end - begin;
  const bool is_aligned = reinterpret_cast<uintptr_t>(first) % sizeof(Vector) == 0;
  const int64_t packs = is_aligned ? count / Vector::kSize : 0;
  auto* const pack = reinterpret_cast<Vector*>(first);
  for (int64_t i = threadIdx.x; i < packs; i += blockDim.x) {
    Vector values = pack[i];
    MEZZO_UNROLL
    for (int lane = 0; lane < Vector::kSize; ++lane) visit(values.element[lane]);
    pack[i] = values;
  }
  for (int64_t i = packs * Vector::kSize + threadIdx.x; i < count; i += blockDim.x) {
    Stored value = first[i];
    visit(value);
    first[i] = value;
  }
}

template <class Element>
struct UnscaleVisit {
  using Format = FloatFormat<Element>;
  UnscaleElement<Format, typename Format::Value> unscale;
  uint32_t nonfinite = 0;

  __device__ void operator()(typename Format::Stored& stored) {
    typename Format::Bits bits = stored;
    unscale(bits, nonfinite);
    stored = static_cast<typename Format::Stored>(bits);
  }
};

/// Every block that finds an inf or NaN writes the same 1; no atomic is needed.
__device__ inline void report(uint32_t nonfinite, float* found_inf) {
  const bool is_found = __syncthreads_or(nonfinite != 0) != 0;
  if (is_found && threadIdx.x == 0) *found_inf = 1.0F;
}

/// Unscales and checks.
template <class Element>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(kUnscaleThreads)
    unscale_kernel(MEZZO_ARGUMENT(GradientTable) table, const float* inv_scale, float* found_inf) {
  using Format = FloatFormat<Element>;
  const auto slice = table.slice_of(blockIdx.x);
  auto* const data = static_cast<typename Format::Stored*>(slice.data);
  UnscaleVisit<Element> unscale{{static_cast<typename Format::Value>(*inv_scale)}};
  visit_elements(data, slice.begin, slice.end, unscale);
  report(unscale.nonfinite, found_inf);
}

static __global__ void update_scale_kernel(const LossScale rule, float* scale, float* inverse,
                                           int32_t* growth_tracker, int32_t* hysteresis_left,
                                           const float* found_inf) {
  const LossScaleState next =
      rule.next({*scale, *growth_tracker, *hysteresis_left}, *found_inf != 0.0F);
  *scale = next.scale;
  *inverse = inverse_scale(next.scale);
  *growth_tracker = next.growth_tracker;
  *hysteresis_left = next.hysteresis_left;
}

}  // namespace detail::cuda
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
