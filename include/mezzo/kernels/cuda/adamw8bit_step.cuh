/// \file
/// AdamW's step with moments in blocks of 8 bits (block8.h). A warp takes a block, each of its
/// lanes every 32nd element: they become floats in registers, take the step of
/// optimizer_step_body.h, and the warp finds the block's new scale.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/blockwise_quant.h>
#include <mezzo/kernels/cuda/device.h>
#include <mezzo/kernels/cuda/optimizer_step.cuh>
#include <mezzo/kernels/multi_tensor_metadata.h>
#include <mezzo/kernels/step_functor.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail::cuda {

/// Elements of a lane.
inline constexpr int kElementsPerLane = static_cast<int>(kQuantBlockSize) / 32;
static_assert(kStepElementsPerBlock % kQuantBlockSize == 0, "a slice begins with a block");

/// Parameters of one kernel launch, of one dtype.
using AdamW8bitListMetadata = TensorListMetadata<AdamW8bitParamArgs, 150>;
static_assert(sizeof(AdamW8bitListMetadata) + sizeof(DynamicMaps) <= 32764,
              "CUDA 12.1's limit from sm_70 on");

/// A lane's elements of one moment, as the bits of floats; zeros beyond the end.
struct LaneMoments {
  uint32_t bits[kElementsPerLane];
};

/// Calls `visit(i, at)` for each of this lane's elements of a block that there are.
template <class Visit>
__device__ void for_each_in_lane(int64_t first, int64_t count, const Visit& visit) {
  const int64_t lane = first + threadIdx.x % 32;
  MEZZO_UNROLL
  for (int i = 0; i < kElementsPerLane; ++i) {
    const int64_t at = lane + int64_t{32} * i;
    if (at < count) visit(i, at);
  }
}

template <int kMoment>
__device__ LaneMoments load_moment(const AdamW8bitParamArgs& step, const DynamicMaps& maps,
                                   int64_t first) {
  LaneMoments moment{};
  if (step.scales[0] == nullptr) {
    const auto* const from = static_cast<const uint32_t*>(step.pointers.moments[kMoment]);
    for_each_in_lane(first, step.pointers.numel,
                     [&](int i, int64_t at) { moment.bits[i] = from[at]; });
    return moment;
  }
  const auto* const codes = static_cast<const uint8_t*>(step.pointers.moments[kMoment]);
  const float scale = step.scales[kMoment][first / kQuantBlockSize];
  for_each_in_lane(first, step.pointers.numel, [&](int i, int64_t at) {
    const uint32_t code = codes[at];
    float value;
    dequantize_block<kMoment == 0, ScalarVec<float>>(maps.of<kMoment == 0>(), code, scale, value);
    reinterpret_bits(value, moment.bits[i]);
  });
  return moment;
}

template <int kMoment>
__device__ void store_moment(const AdamW8bitParamArgs& step, const DynamicMaps& maps, int64_t first,
                             const LaneMoments& moment) {
  if (step.scales[0] == nullptr) {
    auto* const to = static_cast<uint32_t*>(step.pointers.moments[kMoment]);
    for_each_in_lane(first, step.pointers.numel,
                     [&](int i, int64_t at) { to[at] = moment.bits[i]; });
    return;
  }
  uint32_t absmax_bits = 0;
  MEZZO_UNROLL
  for (int i = 0; i < kElementsPerLane; ++i) {
    const uint32_t bits = moment.bits[i] & 0x7FFFFFFFU;
    absmax_bits = bits > absmax_bits ? bits : absmax_bits;
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFFU, absmax_bits, lanes);
    absmax_bits = other > absmax_bits ? other : absmax_bits;
  }
  float scale;
  reinterpret_bits(absmax_bits, scale);
  const float inverse = invert_absmax(scale);
  if (threadIdx.x % 32 == 0) step.scales[kMoment][first / kQuantBlockSize] = scale;
  auto* const codes = static_cast<uint8_t*>(step.pointers.moments[kMoment]);
  for_each_in_lane(first, step.pointers.numel, [&](int i, int64_t at) {
    float value;
    reinterpret_bits(moment.bits[i], value);
    uint32_t code;
    quantize_block<kMoment == 0, ScalarVec<float>>(maps.of<kMoment == 0>(), value, inverse, code);
    codes[at] = static_cast<uint8_t>(code);
  });
}

template <class Parameter>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(kStepThreads,
                                                                        kStepMinBlocksPerSm)
    adamw8bit_kernel(MEZZO_GRID_CONSTANT(AdamW8bitListMetadata) table,
                     MEZZO_GRID_CONSTANT(DynamicMaps) maps) {
  using Vec = ScalarVec<Parameter>;
  using Body = StepFunctor<AdamFunctor<false>, AdamW8bitWeightFormat<Parameter>, Vec>;
  MEZZO_SHARED(DynamicMaps, shared_maps);
  MEZZO_SHARED(BlockContext<Body>, shared_context);
  static_assert(sizeof(DynamicMaps) % sizeof(float) == 0);
  for (unsigned i = threadIdx.x; i < sizeof(DynamicMaps) / sizeof(float); i += kStepThreads) {
    // There threads can look up different entries at once.
    reinterpret_cast<float*>(&shared_maps)[i] = reinterpret_cast<const float*>(&maps)[i];
  }
  const AdamW8bitListMetadata::Chunk step = table.get_chunk(blockIdx.x);
  if (threadIdx.x == 0) {
    const RandomKey key = random_key(step.use.seed, step.use.step, step.use.param_index,
                                     static_cast<uint64_t>(step.begin) >> 32);
    shared_context = {Body(step.coefficients, step.use), key};
  }
  __syncthreads();
  const BlockContext<Body> own = shared_context;
  auto* const parameters = static_cast<typename Vec::Stored*>(step.pointers.parameter);
  const StepGradient<float> gradients{static_cast<char*>(step.pointers.gradient),
                                      step.use.gradient_dtype};
  MEZZO_NO_UNROLL
  for (int64_t first = step.begin + int64_t{threadIdx.x / 32} * kQuantBlockSize; first < step.end;
       first += kStepThreads / 32 * kQuantBlockSize) {
    LaneMoments mean = load_moment<0>(step, shared_maps, first);
    LaneMoments square = load_moment<1>(step, shared_maps, first);
    for_each_in_lane(first, step.pointers.numel, [&](int i, int64_t at) {
      StepGradient<float> gradient = gradients;
      gradient.advance(at);
      typename Body::template Elements<1> element{
          {}, {parameters[at]}, {{mean.bits[i]}, {square.bits[i]}}, {}, false};
      gradient.load(element.gradient);
      own.body(element, {static_cast<uint32_t>(at) ^ own.key});
      parameters[at] = static_cast<typename Vec::Stored>(element.parameter[0]);
      mean.bits[i] = element.moments[0][0];
      square.bits[i] = element.moments[1][0];
    });
    store_moment<0>(step, shared_maps, first, mean);
    store_moment<1>(step, shared_maps, first, square);
  }
}

}  // namespace detail::cuda
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
