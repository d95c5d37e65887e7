/// \file
/// The multi-tensor kernel behind mezzo's optimizers on CUDA: unscale, clip, update and clear, or
/// nothing, in one pass. The arithmetic is that of the CPU's loops (detail/kernels/*_element.h).
#pragma once

#include <mezzo/detail/kernels/gradient_use.h>
#include <mezzo/detail/kernels/optimizer_step_table.h>
#include <mezzo/detail/kernels/scalar_lanes.h>
#include <mezzo/version.h>

#include <cuda_runtime.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail::cuda {

inline constexpr int kStepThreads = 256;
inline constexpr int kStepPack = 4;  // elements that a thread reads of each stream at once
inline constexpr int64_t kStepBlock = int64_t{kStepThreads} * kStepPack * 8;

template <class Stored>
struct alignas(sizeof(Stored) * kStepPack < 16 ? sizeof(Stored) * kStepPack : 16) StepPack {
  Stored element[kStepPack];
};

template <class Stored>
__device__ bool is_pack_aligned(const Stored* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % alignof(StepPack<Stored>) == 0;
}

/// Up to a pack of elements in registers; whole ones move with one access where aligned.
template <class Stored>
__device__ void load_pack(const Stored* from, int count, bool is_whole, StepPack<Stored>& pack) {
  if (is_whole) {
    pack = *reinterpret_cast<const StepPack<Stored>*>(from);
    return;
  }
#pragma unroll
  for (int i = 0; i < kStepPack; ++i) pack.element[i] = i < count ? from[i] : Stored{0};
}

template <class Stored>
__device__ void store_pack(const StepPack<Stored>& pack, int count, bool is_whole, Stored* to) {
  if (is_whole) {
    *reinterpret_cast<StepPack<Stored>*>(to) = pack;
    return;
  }
#pragma unroll
  for (int i = 0; i < kStepPack; ++i) {
    if (i < count) to[i] = pack.element[i];
  }
}

/// The streams of one slice, typed.
template <class Parameter, class Gradient, class Rule>
struct StepStreams {
  using Lanes = ScalarLanes<Parameter>;
  using GradientLanes = ScalarLanes<Gradient>;
  using Stored = typename Lanes::Stored;
  using StoredGradient = typename GradientLanes::Stored;
  using Value = typename Lanes::Value;
  static constexpr int kMoments = Rule::kMoments;
  static constexpr int kMomentSlots = kMoments > 0 ? kMoments : 1;

  Stored* parameter;
  StoredGradient* gradient;
  Stored* moment[kMomentSlots];
  bool is_aligned;

  __device__ explicit StepStreams(const StepSlice& slice)
      : parameter(static_cast<Stored*>(slice.span.parameter) + slice.begin),
        gradient(static_cast<StoredGradient*>(slice.span.gradient) + slice.begin),
        is_aligned(is_pack_aligned(parameter) && is_pack_aligned(gradient)) {
#pragma unroll
    for (int k = 0; k < kMoments; ++k) {
      moment[k] = static_cast<Stored*>(slice.span.moments[k]) + slice.begin;
      is_aligned = is_aligned && is_pack_aligned(moment[k]);
    }
  }

  __device__ void step_pack(int64_t at, int count,
                            const typename Rule::template Element<Lanes>& update, Value factor,
                            bool clear) const {
    const bool is_whole = is_aligned && count == kStepPack;
    StepPack<StoredGradient> gradients;
    StepPack<Stored> parameters;
    StepPack<Stored> moments[kMomentSlots];
    load_pack(gradient + at, count, is_whole, gradients);
    load_pack(parameter + at, count, is_whole, parameters);
#pragma unroll
    for (int k = 0; k < kMoments; ++k) load_pack(moment[k] + at, count, is_whole, moments[k]);
#pragma unroll
    for (int i = 0; i < kStepPack; ++i) {
      step_element(gradients.element[i], parameters.element[i], moments, i, update, factor);
    }
    store_pack(parameters, count, is_whole, parameter + at);
#pragma unroll
    for (int k = 0; k < kMoments; ++k) store_pack(moments[k], count, is_whole, moment[k] + at);
    if (clear) store_pack(StepPack<StoredGradient>{}, count, is_whole, gradient + at);
  }

  __device__ static void step_element(StoredGradient stored_gradient, Stored& stored_parameter,
                                      StepPack<Stored> (&stored_moments)[kMomentSlots], int i,
                                      const typename Rule::template Element<Lanes>& update,
                                      Value factor) {
    typename GradientLanes::Bits gradient_bits;
    typename GradientLanes::Value own_value;
    GradientLanes::load(&stored_gradient, gradient_bits);
    GradientLanes::Format::widen(gradient_bits, own_value);
    Value gradient_value;
    Lanes::convert(own_value, gradient_value);
    gradient_value = gradient_value * factor;
    Value parameter_value;
    widen_stored(stored_parameter, parameter_value);
    Value moment_values[kMomentSlots];
#pragma unroll
    for (int k = 0; k < kMoments; ++k) {
      widen_stored(stored_moments[k].element[i], moment_values[k]);
    }
    update(parameter_value, gradient_value, moment_values);
    narrow_value(parameter_value, stored_parameter);
#pragma unroll
    for (int k = 0; k < kMoments; ++k) {
      narrow_value(moment_values[k], stored_moments[k].element[i]);
    }
  }

  __device__ static void widen_stored(const Stored& stored, Value& value) {
    typename Lanes::Bits bits;
    Lanes::load(&stored, bits);
    Lanes::Format::widen(bits, value);
  }
  __device__ static void narrow_value(const Value& value, Stored& stored) {
    typename Lanes::Bits bits;
    Lanes::Format::narrow(value, bits);
    Lanes::store(bits, &stored);
  }

  __device__ void clear_pack(int64_t at, int count) const {
    store_pack(StepPack<StoredGradient>{}, count, is_aligned && count == kStepPack, gradient + at);
  }
};

template <class Parameter, class Gradient, class Rule, class Table>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(kStepThreads)
    optimizer_step_kernel(const __grid_constant__ Table table, const StepInputs inputs) {
  using Streams = StepStreams<Parameter, Gradient, Rule>;
  using Lanes = typename Streams::Lanes;
  const StepSlice slice = table.slice_of(blockIdx.x);
  const Streams streams(slice);
  const int64_t count = slice.end - slice.begin;
  const bool is_skipped = inputs.found_inf != nullptr && *inputs.found_inf != 0.0F;
  const auto first = int64_t{threadIdx.x} * kStepPack;
  constexpr int64_t kStride = int64_t{kStepThreads} * kStepPack;
  const auto pack_size = [&](int64_t at) {
    return static_cast<int>(count - at < kStepPack ? count - at : kStepPack);
  };
  if (is_skipped) {
    for (int64_t at = first; inputs.clear && at < count; at += kStride) {
      streams.clear_pack(at, pack_size(at));
    }
    return;
  }

  // Powers and roots once a block: each is hundreds of cycles in double.
  __shared__ typename Rule::Coefficients coefficients;
  __shared__ double factor;
  if (threadIdx.x == 0) {
    const auto& group = table.group(slice.group);
    const int64_t step = slice.count == nullptr ? 1 : static_cast<int64_t>(*slice.count) + 1;
    coefficients = group.constants.at(group.lr, step);
    factor = inputs.inv_scale == nullptr ? 1.0 : static_cast<double>(*inputs.inv_scale);
    if (inputs.sum_of_squares != nullptr) {
      factor *= clip_coefficient(*inputs.sum_of_squares, inputs.max_norm);
    }
  }
  __syncthreads();
  const typename Rule::template Element<Lanes> update(coefficients);
  const auto own_factor = static_cast<typename Lanes::Value>(factor);
  for (int64_t at = first; at < count; at += kStride) {
    streams.step_pack(at, pack_size(at), update, own_factor, inputs.clear);
  }
}

/// After the step, which reads the counts in all blocks.
template <class Table>
__attribute__((visibility("hidden"))) __global__ void count_steps_kernel(
    const __grid_constant__ Table table, const float* found_inf) {
  if (found_inf != nullptr && *found_inf != 0.0F) return;
  for (int row = static_cast<int>(threadIdx.x); row < table.rows();
       row += static_cast<int>(blockDim.x)) {
    if (table.count(row) != nullptr) *table.count(row) += 1.0F;
  }
}

/// Launches both on `stream`; the caller checks for launch errors.
template <class Parameter, class Gradient, class Rule, class Table>
void launch_optimizer_step(const Table& table, const StepInputs& inputs, cudaStream_t stream) {
  if (table.blocks() > 0) {
    const auto blocks = static_cast<unsigned>(table.blocks());
    optimizer_step_kernel<Parameter, Gradient, Rule>
        <<<blocks, kStepThreads, 0, stream>>>(table, inputs);
  }
  count_steps_kernel<<<1, kStepThreads, 0, stream>>>(table, inputs.found_inf);
}

}  // namespace detail::cuda
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
