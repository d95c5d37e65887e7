/// \file
/// AdamW's step with moments in blocks of 8 bits (block8.h). A warp takes a block, each of its
/// lanes every 32nd element: they become floats in registers, take the step of
/// optimizer_step_body.h, and the warp finds the block's new scale.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/block8.h>
#include <mezzo/kernels/cuda/device.h>
#include <mezzo/kernels/cuda/optimizer_step.cuh>
#include <mezzo/kernels/launch_table.h>
#include <mezzo/kernels/optimizer_step_body.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail::cuda {

/// Elements of a lane.
inline constexpr int kAdamW8bitPack = static_cast<int>(kBlock8) / 32;
static_assert(kStepBlock % kBlock8 == 0, "a slice begins with a block");

/// Parameters of one kernel launch, of one dtype.
using AdamW8bitTable = LaunchTable<AdamW8bitStep, 150>;
static_assert(sizeof(AdamW8bitTable) + sizeof(Block8Maps) <= 32764,
              "CUDA 12.1's limit from sm_70 on");

/// A lane's elements of one moment, as the bits of floats; zeros beyond the end.
struct LaneMoments {
  uint32_t bits[kAdamW8bitPack];
};

/// Calls `visit(i, at)` for each of this lane's elements of a block that there are.
template <class Visit>
__device__ void visit_lane(int64_t first, int64_t count, const Visit& visit) {
  const int64_t lane = first + threadIdx.x % 32;
  MEZZO_UNROLL
  for (int i = 0; i < kAdamW8bitPack; ++i) {
    const int64_t at = lane + int64_t{32} * i;
    if (at < count) visit(i, at);
  }
}

template <int kMoment>
__device__ LaneMoments load_moment(const AdamW8bitStep& step, const Block8Maps& maps,
                                   int64_t first) {
  LaneMoments moment{};
  if (step.scales[0] == nullptr) {
    const auto* const from = static_cast<const uint32_t*>(step.span.moments[kMoment]);
    visit_lane(first, step.span.count, [&](int i, int64_t at) { moment.bits[i] = from[at]; });
    return moment;
  }
  const auto* const codes = static_cast<const uint8_t*>(step.span.moments[kMoment]);
  const float scale = step.scales[kMoment][first / kBlock8];
  visit_lane(first, step.span.count, [&](int i, int64_t at) {
    const uint32_t code = codes[at];
    float value;
    widen_block8<kMoment == 0, ScalarLanes<float>>(maps.of<kMoment == 0>(), code, scale, value);
    reinterpret_bits(value, moment.bits[i]);
  });
  return moment;
}

template <int kMoment>
__device__ void store_moment(const AdamW8bitStep& step, const Block8Maps& maps, int64_t first,
                             const LaneMoments& moment) {
  if (step.scales[0] == nullptr) {
    auto* const to = static_cast<uint32_t*>(step.span.moments[kMoment]);
    visit_lane(first, step.span.count, [&](int i, int64_t at) { to[at] = moment.bits[i]; });
    return;
  }
  uint32_t largest = 0;
  MEZZO_UNROLL
  for (int i = 0; i < kAdamW8bitPack; ++i) {
    const uint32_t bits = moment.bits[i] & 0x7FFFFFFFU;
    largest = bits > largest ? bits : largest;
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFFU, largest, lanes);
    largest = other > largest ? other : largest;
  }
  float scale;
  reinterpret_bits(largest, scale);
  const float inverse = inverse_of_scale(scale);
  if (threadIdx.x % 32 == 0) step.scales[kMoment][first / kBlock8] = scale;
  auto* const codes = static_cast<uint8_t*>(step.span.moments[kMoment]);
  visit_lane(first, step.span.count, [&](int i, int64_t at) {
    float value;
    reinterpret_bits(moment.bits[i], value);
    uint32_t code;
    narrow_block8<kMoment == 0, ScalarLanes<float>>(maps.of<kMoment == 0>(), value, inverse, code);
    codes[at] = static_cast<uint8_t>(code);
  });
}

template <class Parameter>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(kStepThreads, kStepBlocks)
    adamw8bit_kernel(MEZZO_ARGUMENT(AdamW8bitTable) table, MEZZO_ARGUMENT(Block8Maps) maps) {
  using Lanes = ScalarLanes<Parameter>;
  using Body = StepBody<AdamRule<false>, AdamW8bitWeights<Parameter>, Lanes>;
  MEZZO_SHARED(Block8Maps, maps_of_block);
  MEZZO_SHARED(BlockStep<Body>, of_block);
  static_assert(sizeof(Block8Maps) % sizeof(float) == 0);
  for (unsigned i = threadIdx.x; i < sizeof(Block8Maps) / sizeof(float); i += kStepThreads) {
    // There threads can look up different entries at once.
    reinterpret_cast<float*>(&maps_of_block)[i] = reinterpret_cast<const float*>(&maps)[i];
  }
  const AdamW8bitTable::Slice step = table.slice_of(blockIdx.x);
  if (threadIdx.x == 0) {
    const RandomKey key = random_key(step.use.seed, step.use.step, step.use.parameter,
                                     static_cast<uint64_t>(step.begin) >> 32);
    of_block = {Body(step.coefficients, step.use), key};
  }
  __syncthreads();
  const BlockStep<Body> own = of_block;
  auto* const parameters = static_cast<typename Lanes::Stored*>(step.span.parameter);
  const StepGradient<float> gradients{static_cast<char*>(step.span.gradient),
                                      step.use.gradient_dtype};
  MEZZO_NO_UNROLL
  for (int64_t first = step.begin + int64_t{threadIdx.x / 32} * kBlock8; first < step.end;
       first += kStepThreads / 32 * kBlock8) {
    LaneMoments mean = load_moment<0>(step, maps_of_block, first);
    LaneMoments square = load_moment<1>(step, maps_of_block, first);
    visit_lane(first, step.span.count, [&](int i, int64_t at) {
      StepGradient<float> gradient = gradients;
      gradient.advance(at);
      typename Body::template Places<1> place{
          {}, {parameters[at]}, {{mean.bits[i]}, {square.bits[i]}}, {}, false};
      gradient.load(place.gradient);
      own.body(place, {static_cast<uint32_t>(at) ^ own.key});
      parameters[at] = static_cast<typename Lanes::Stored>(place.parameter[0]);
      mean.bits[i] = place.moments[0][0];
      square.bits[i] = place.moments[1][0];
    });
    store_moment<0>(step, maps_of_block, first, mean);
    store_moment<1>(step, maps_of_block, first, square);
  }
}

}  // namespace detail::cuda
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
