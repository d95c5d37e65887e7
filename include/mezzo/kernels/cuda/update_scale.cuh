/// \file
/// The loss scale's state machine on the device.
#pragma once

#include <mezzo/base/loss_scale.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/scale_tensors.h>

#include <cuda_runtime.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail::cuda {

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
