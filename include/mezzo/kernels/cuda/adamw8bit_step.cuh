/// \file
/// The multi-tensor kernel of AdamW8bit (blockwise_quant.h). A warp steps a quantization block,
/// each lane every 32nd element, in registers, and reduces the block's new absmax.
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

inline constexpr int kElementsPerLane = static_cast<int>(kQuantBlockSize) / 32;
static_assert(kStepElementsPerBlock % kQuantBlockSize == 0, "a chunk begins with a block");

/// Parameters of one dtype.
using AdamW8bitListMetadata = TensorListMetadata<AdamW8bitParamArgs, 150>;
static_assert(sizeof(AdamW8bitListMetadata) + sizeof(DynamicMaps) <= 32764,
              "limit of CUDA 12.1 from sm_70 on");

/// The bits of a lane's elements of a moment as float32; 0 beyond the end.
struct LaneMoments {
  uint32_t bits[kElementsPerLane];
};

/// Calls `visit(k, i)` for each of this lane's elements below `count`: its k-th is element i.
template <class Visit>
__device__ void for_each_in_lane(int64_t first, int64_t count, const Visit& visit) {
  const int64_t lane = first + threadIdx.x % 32;
  MEZZO_UNROLL
  for (int k = 0; k < kElementsPerLane; ++k) {
    const int64_t i = lane + int64_t{32} * k;
    if (i < count) visit(k, i);
  }
}

template <int kMoment>
__device__ LaneMoments load_moment(const AdamW8bitParamArgs& args, const DynamicMaps& maps,
                                   int64_t first) {
  LaneMoments moment{};
  const ParamPointers& pointers = args.param.pointers;
  if (args.absmax[0] == nullptr) {
    const auto* const data = static_cast<const uint32_t*>(pointers.moments[kMoment]);
    for_each_in_lane(first, pointers.numel, [&](int k, int64_t i) { moment.bits[k] = data[i]; });
    return moment;
  }
  const auto* const qvals = static_cast<const uint8_t*>(pointers.moments[kMoment]);
  const float absmax = args.absmax[kMoment][first / kQuantBlockSize];
  for_each_in_lane(first, pointers.numel, [&](int k, int64_t i) {
    const uint32_t qval = qvals[i];
    float value;
    dequantize_block<kMoment == 0, ScalarVec<float>>(maps.get<kMoment == 0>(), qval, absmax, value);
    reinterpret_bits(value, moment.bits[k]);
  });
  return moment;
}

template <int kMoment>
__device__ void store_moment(const AdamW8bitParamArgs& args, const DynamicMaps& maps, int64_t first,
                             const LaneMoments& moment) {
  const ParamPointers& pointers = args.param.pointers;
  if (args.absmax[0] == nullptr) {
    auto* const data = static_cast<uint32_t*>(pointers.moments[kMoment]);
    for_each_in_lane(first, pointers.numel, [&](int k, int64_t i) { data[i] = moment.bits[k]; });
    return;
  }
  uint32_t absmax_bits = 0;
  MEZZO_UNROLL
  for (int k = 0; k < kElementsPerLane; ++k) {
    const uint32_t bits = moment.bits[k] & 0x7FFFFFFFU;
    absmax_bits = bits > absmax_bits ? bits : absmax_bits;
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFFU, absmax_bits, lanes);
    absmax_bits = other > absmax_bits ? other : absmax_bits;
  }
  float absmax;
  reinterpret_bits(absmax_bits, absmax);
  const float inverse_absmax = invert_absmax(absmax);
  if (threadIdx.x % 32 == 0) args.absmax[kMoment][first / kQuantBlockSize] = absmax;
  auto* const qvals = static_cast<uint8_t*>(pointers.moments[kMoment]);
  for_each_in_lane(first, pointers.numel, [&](int k, int64_t i) {
    float value;
    reinterpret_bits(moment.bits[k], value);
    uint32_t qval;
    quantize_block<kMoment == 0, ScalarVec<float>>(maps.get<kMoment == 0>(), value, inverse_absmax,
                                                   qval);
    qvals[i] = static_cast<uint8_t>(qval);
  });
}

template <class Parameter>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(kStepThreads,
                                                                        kStepMinBlocksPerSm)
    adamw8bit_kernel(MEZZO_GRID_CONSTANT(AdamW8bitListMetadata) metadata,
                     MEZZO_GRID_CONSTANT(DynamicMaps) maps) {
  using Vec = ScalarVec<Parameter>;
  using Step = StepFunctor<AdamFunctor<false>, AdamW8bitWeightFormat<Parameter>, Vec>;
  MEZZO_SHARED(DynamicMaps, shared_maps);
  MEZZO_SHARED(BlockContext<Step>, shared_context);
  static_assert(sizeof(DynamicMaps) % sizeof(float) == 0);
  for (unsigned i = threadIdx.x; i < sizeof(DynamicMaps) / sizeof(float); i += kStepThreads) {
    // In shared memory, since constant memory serializes lookups of different entries.
    reinterpret_cast<float*>(&shared_maps)[i] = reinterpret_cast<const float*>(&maps)[i];
  }
  const AdamW8bitListMetadata::Chunk chunk = metadata.get_chunk(blockIdx.x);
  const ParamArgs& param = chunk.param;
  if (threadIdx.x == 0) {
    const RandomKey key = random_key(chunk.step_args.seed, chunk.step_args.step, param.param_index,
                                     static_cast<uint64_t>(chunk.begin) >> 32);
    shared_context = {
        Step(chunk.coefficients, chunk.step_args.multipliers, param.model_param_is_fp16), key};
  }
  __syncthreads();
  const BlockContext<Step> context = shared_context;
  auto* const parameters = static_cast<typename Vec::Stored*>(param.pointers.parameter);
  const GradArray<float> gradients{static_cast<char*>(param.pointers.gradient),
                                   param.gradient_dtype};
  MEZZO_NO_UNROLL
  for (int64_t first = chunk.begin + int64_t{threadIdx.x / 32} * kQuantBlockSize; first < chunk.end;
       first += kStepThreads / 32 * kQuantBlockSize) {
    LaneMoments exp_avg = load_moment<0>(chunk, shared_maps, first);
    LaneMoments exp_avg_sq = load_moment<1>(chunk, shared_maps, first);
    for_each_in_lane(first, param.pointers.numel, [&](int k, int64_t i) {
      GradArray<float> gradient = gradients;
      gradient.advance(i);
      typename Step::template Elements<1> element{
          {}, {parameters[i]}, {{exp_avg.bits[k]}, {exp_avg_sq.bits[k]}}, {}, false};
      gradient.load(element.gradient);
      context.functor(element, {static_cast<uint32_t>(i) ^ context.key});
      parameters[i] = static_cast<typename Vec::Stored>(element.parameter[0]);
      exp_avg.bits[k] = element.moments[0][0];
      exp_avg_sq.bits[k] = element.moments[1][0];
    });
    store_moment<0>(chunk, shared_maps, first, exp_avg);
    store_moment<1>(chunk, shared_maps, first, exp_avg_sq);
  }
}

}  // namespace detail::cuda
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
