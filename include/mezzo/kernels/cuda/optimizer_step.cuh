/// \file
/// The multi-tensor kernel behind mezzo's optimizers on CUDA: unscale, clip, update and clear, or
/// nothing, in one pass. The arithmetic is that of the CPU's loops (mezzo/kernels/*_element.h).
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/cuda/device.h>
#include <mezzo/kernels/float_format.h>
#include <mezzo/kernels/optimizer_step_body.h>
#include <mezzo/kernels/optimizer_step_table.h>

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
  MEZZO_UNROLL
  for (int i = 0; i < kStepPack; ++i) pack.element[i] = i < count ? from[i] : Stored{0};
}

template <class Stored>
__device__ void store_pack(const StepPack<Stored>& pack, int count, bool is_whole, Stored* to) {
  if (is_whole) {
    *reinterpret_cast<StepPack<Stored>*>(to) = pack;
    return;
  }
  MEZZO_UNROLL
  for (int i = 0; i < kStepPack; ++i) {
    if (i < count) to[i] = pack.element[i];
  }
}

/// The streams of one slice, typed.
template <class Parameter, class Gradient, class Rule, class Weights>
struct StepStreams {
  using Lanes = ScalarLanes<Parameter>;
  using Body = StepBody<Parameter, Gradient, Rule, Weights, Lanes>;
  using Place = typename Body::Place;
  using Stored = typename Lanes::Stored;
  using StoredGradient = typename ScalarLanes<Gradient>::Stored;
  using StoredMoment = typename Place::MomentLanes::Stored;
  using Scalar = typename Lanes::Format::Value;
  static constexpr unsigned kMoments = Rule::kMoments;
  static constexpr bool kReadsLowHalf = Body::kIsSplit;
  static constexpr bool kWritesHalves = Body::kIsSplit || Body::kMayCopy;

  Place base;
  bool is_aligned;

  __device__ explicit StepStreams(const StepSlice& slice)
      : base{static_cast<Stored*>(slice.span.parameter) + slice.begin,
             static_cast<StoredGradient*>(slice.span.gradient) + slice.begin,
             {},
             advanced(static_cast<uint16_t*>(slice.span.low_half_or_copy), slice.begin),
             advanced(static_cast<Scalar*>(slice.span.average), slice.begin),
             slice.span.low_half_or_copy != nullptr,
             slice.span.average != nullptr},
        is_aligned(is_pack_aligned(base.parameter) && is_pack_aligned(base.gradient) &&
                   is_pack_aligned(base.low_half_or_copy) && is_pack_aligned(base.average)) {
    MEZZO_UNROLL
    for (unsigned k = 0; k != kMoments; ++k) {
      base.moments[k] = static_cast<StoredMoment*>(slice.span.moments[k]) + slice.begin;
      is_aligned = is_aligned && is_pack_aligned(base.moments[k]);
    }
  }

  template <class T>
  __device__ static T* advanced(T* pointer, int64_t by) {
    return pointer == nullptr ? nullptr : pointer + by;
  }

  __device__ void step_pack(int64_t at, int count, const Body& step, uint32_t number,
                            const RandomKey& key, bool clear) const {
    const bool is_whole = is_aligned && count == kStepPack;
    StepPack<StoredGradient> gradients;
    StepPack<Stored> parameters;
    StepPack<StoredMoment> moments[Place::kMomentSlots];
    StepPack<uint16_t> low_half_or_copy;
    StepPack<Scalar> average;
    load_pack(base.gradient + at, count, is_whole, gradients);
    load_pack(base.parameter + at, count, is_whole, parameters);
    MEZZO_UNROLL
    for (unsigned k = 0; k != kMoments; ++k)
      load_pack(base.moments[k] + at, count, is_whole, moments[k]);
    if (kReadsLowHalf) load_pack(base.low_half_or_copy + at, count, is_whole, low_half_or_copy);
    if (base.has_average) load_pack(base.average + at, count, is_whole, average);
    MEZZO_UNROLL
    for (int i = 0; i < kStepPack; ++i) {
      Place place{&parameters.element[i],
                  &gradients.element[i],
                  {},
                  &low_half_or_copy.element[i],
                  &average.element[i],
                  base.has_low_half_or_copy,
                  base.has_average};
      MEZZO_UNROLL
      for (unsigned k = 0; k != kMoments; ++k) place.moments[k] = &moments[k].element[i];
      step(place, number + static_cast<uint32_t>(i), key);
    }
    store_pack(parameters, count, is_whole, base.parameter + at);
    MEZZO_UNROLL
    for (unsigned k = 0; k != kMoments; ++k)
      store_pack(moments[k], count, is_whole, base.moments[k] + at);
    if (kWritesHalves && base.has_low_half_or_copy)
      store_pack(low_half_or_copy, count, is_whole, base.low_half_or_copy + at);
    if (base.has_average) store_pack(average, count, is_whole, base.average + at);
    if (clear) store_pack(gradients, count, is_whole, base.gradient + at);
  }

  __device__ void clear_pack(int64_t at, int count) const {
    store_pack(StepPack<StoredGradient>{}, count, is_aligned && count == kStepPack,
               base.gradient + at);
  }
};

/// What thread 0 works out for its block: powers and roots are hundreds of cycles in double each.
template <class Table>
__device__ StepUse use_of_slice(const Table& table, const StepSlice& slice,
                                const StepInputs& inputs) {
  const auto& group = table.group(slice.group);
  StepUse use{.clear = inputs.clear,
              .copies_half = slice.copies_half,
              .average_share = group.average_share,
              .seed = group.seed,
              .step = slice.count == nullptr ? 1 : static_cast<uint64_t>(*slice.count) + 1,
              .parameter = static_cast<uint64_t>(slice.number)};
  if (inputs.inv_scale != nullptr) use.factor = static_cast<double>(*inputs.inv_scale);
  if (inputs.sum_of_squares != nullptr) {
    use.factor *= clip_coefficient(*inputs.sum_of_squares, inputs.max_norm);
  }
  return use;
}

template <class Parameter, class Gradient, class Rule, class Weights, class Table>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(kStepThreads)
    optimizer_step_kernel(MEZZO_ARGUMENT(PagedTable<Table>) table, const StepInputs inputs) {
  using Streams = StepStreams<Parameter, Gradient, Rule, Weights>;
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

  MEZZO_SHARED(typename Rule::Coefficients, coefficients);
  MEZZO_SHARED(StepUse, use);
  MEZZO_SHARED(RandomKey, key);
  if (threadIdx.x == 0) {
    use = use_of_slice(table, slice, inputs);
    const auto& group = table.group(slice.group);
    coefficients =
        group.constants.at(group.lr * inputs.lr_factor(), static_cast<int64_t>(use.step));
    // A block's elements have one key: 2^32 is a multiple of their number.
    key = random_key(use.seed, use.step, use.parameter, static_cast<uint64_t>(slice.begin >> 32));
  }
  __syncthreads();
  const typename Streams::Body step(coefficients, use);
  for (int64_t at = first; at < count; at += kStride) {
    streams.step_pack(at, pack_size(at), step, static_cast<uint32_t>(slice.begin + at), key,
                      inputs.clear);
  }
}
static_assert((int64_t{1} << 32) % kStepBlock == 0);

/// After the step, which reads the counters in all blocks. Static, as every kernel that is no
/// template: several objects of one program may hold it.
static __global__ void count_steps_kernel(MEZZO_ARGUMENT(CounterTable) table,
                                          const float* found_inf) {
  if (found_inf != nullptr && *found_inf != 0.0F) return;
  for (int64_t i = threadIdx.x; i < table.size(); i += blockDim.x) table[i] += 1.0F;
}

template <class Parameter, class Gradient, class Rule, class Weights, class Table>
void launch_optimizer_step(const PagedTable<Table>& table, const StepInputs& inputs,
                           Stream stream) {
  if (table.blocks() == 0) return;
  launch<optimizer_step_kernel<Parameter, Gradient, Rule, Weights, Table>>(
      table.blocks(), kStepThreads, stream, table, inputs);
}

}  // namespace detail::cuda
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
