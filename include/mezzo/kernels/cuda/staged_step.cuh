/// \file
/// Steps whose moments have another format than the weights': blocks of 8 bits (block8.h), or
/// floats beside weights of 16 bits. A warp takes a block, each of its lanes eight elements: they
/// become floats in registers, take the step of optimizer_step_body.h, and the warp finds the
/// block's new scale.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/block8.h>
#include <mezzo/kernels/cuda/device.h>
#include <mezzo/kernels/cuda/gradient_summary.cuh>
#include <mezzo/kernels/cuda/optimizer_step.cuh>
#include <mezzo/kernels/float_format.h>
#include <mezzo/kernels/optimizer_step_body.h>
#include <mezzo/kernels/optimizer_step_table.h>

#include <cstdint>
#include <type_traits>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail::cuda {

/// Elements of a lane.
inline constexpr int kStagedPack = static_cast<int>(kBlock8) / 32;
static_assert(kStepBlock % kBlock8 == 0, "a slice begins with a block");

/// Raises `bits` to the largest of the warp, in each of its lanes.
__device__ inline uint32_t largest_of_warp(uint32_t bits) {
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFFU, bits, lanes);
    bits = other > bits ? other : bits;
  }
  return bits;
}

/// What a lane holds of its block: `size` elements of each stream, and zeros in place of others.
template <class Rule, class Weights>
struct StagedPacks {
  using Lanes = ScalarLanes<typename Weights::Parameter>;
  using Place = StepPlace<typename Weights::Parameter, float, Rule, FloatMoments<Weights>, Lanes>;
  using Stored = typename Lanes::Stored;
  using Scalar = typename Lanes::Format::Value;
  static constexpr unsigned kSlots = Place::kMomentSlots;

  int size;
  StepPack<uint32_t, kStagedPack> gradient;
  StepPack<Stored, kStagedPack> parameter;
  StepPack<uint32_t, kStagedPack> moments[kSlots];
  StepPack<uint16_t, kStagedPack> low_half;

  __device__ Place place(int i) {
    Place result{
        &parameter.element[i], &gradient.element[i], {}, &low_half.element[i], Weights::kIsSplit};
    MEZZO_UNROLL
    for (unsigned k = 0; k != Rule::kMoments; ++k) result.moments[k] = &moments[k].element[i];
    return result;
  }
};

/// The streams of a slice.
template <class Rule, class Weights>
struct StagedStreams {
  using Packs = StagedPacks<Rule, Weights>;
  using Stored = typename Packs::Stored;
  using Scalar = typename Packs::Scalar;

  const StagedSlice& slice;
  const Block8Maps& maps;

  template <class T>
  __device__ static bool holds_packs(const T* from) {
    return reinterpret_cast<uintptr_t>(from) % alignof(StepPack<T, kStagedPack>) == 0;
  }

  template <class T>
  __device__ static void load_some(const void* stream, int64_t at, int size,
                                   StepPack<T, kStagedPack>& pack) {
    const T* const from = static_cast<const T*>(stream) + at;
    if (size == kStagedPack && holds_packs(from)) {
      load_pack(from, pack);
    } else {
      MEZZO_UNROLL
      for (int i = 0; i < kStagedPack; ++i) pack.element[i] = i < size ? from[i] : T{0};
    }
  }

  template <class T>
  __device__ static void store_some(const StepPack<T, kStagedPack>& pack, void* stream, int64_t at,
                                    int size) {
    T* const to = static_cast<T*>(stream) + at;
    if (size == kStagedPack && holds_packs(to)) {
      store_pack(pack, to);
    } else {
      MEZZO_UNROLL
      for (int i = 0; i < kStagedPack; ++i) {
        if (i < size) to[i] = pack.element[i];
      }
    }
  }

  __device__ void load_gradients(int64_t at, Packs& packs) const {
    if (slice.gradient_bytes == sizeof(float)) {
      load_some(slice.span.gradient, at, packs.size, packs.gradient);
      return;
    }
    StepPack<uint16_t, kStagedPack> halves;
    load_some(slice.span.gradient, at, packs.size, halves);
    MEZZO_UNROLL
    for (int i = 0; i < kStagedPack; ++i) {
      float wide;
      if (slice.gradient_is_half != 0) {
        FloatFormat<c10::Half>::widen(uint32_t{halves.element[i]}, wide);
      } else {
        FloatFormat<c10::BFloat16>::widen(uint32_t{halves.element[i]}, wide);
      }
      reinterpret_bits(wide, packs.gradient.element[i]);
    }
  }

  template <unsigned kMoment>
  __device__ void load_moments(int64_t at, Packs& packs) const {
    StepPack<uint32_t, kStagedPack>& moments = packs.moments[kMoment];
    const float* const scales = slice.scales[kMoment];
    if (scales == nullptr) {
      load_some(slice.span.moments[kMoment], at, packs.size, moments);
      return;
    }
    StepPack<uint8_t, kStagedPack> codes;
    load_some(slice.span.moments[kMoment], at, packs.size, codes);
    const float scale = scales[at / kBlock8];
    const Block8Map& map = maps.of<kMoment == 0>();
    MEZZO_UNROLL
    for (int i = 0; i < kStagedPack; ++i) {
      float value = 0.0F;
      if (i < packs.size) {
        widen_block8<kMoment == 0, ScalarLanes<float>>(map, uint32_t{codes.element[i]}, scale,
                                                       value);
      }
      reinterpret_bits(value, moments.element[i]);
    }
  }

  /// All lanes of the warp together.
  template <unsigned kMoment>
  __device__ void store_moments(int64_t at, const Packs& packs) const {
    const StepPack<uint32_t, kStagedPack>& moments = packs.moments[kMoment];
    float* const scales = slice.scales[kMoment];
    if (scales == nullptr) {
      store_some(moments, slice.span.moments[kMoment], at, packs.size);
      return;
    }
    uint32_t bits = 0;
    MEZZO_UNROLL
    for (int i = 0; i < kStagedPack; ++i) {
      const uint32_t own = i < packs.size ? moments.element[i] & 0x7FFFFFFFU : 0U;
      bits = own > bits ? own : bits;
    }
    bits = largest_of_warp(bits);
    float scale;
    reinterpret_bits(bits, scale);
    const float inverse = inverse_of_scale(scale);
    if (threadIdx.x % 32 == 0) scales[at / kBlock8] = scale;
    const Block8Map& map = maps.of<kMoment == 0>();
    StepPack<uint8_t, kStagedPack> codes;
    MEZZO_UNROLL
    for (int i = 0; i < kStagedPack; ++i) {
      float value;
      reinterpret_bits(moments.element[i], value);
      uint32_t code;
      narrow_block8<kMoment == 0, ScalarLanes<float>>(map, value, inverse, code);
      codes.element[i] = static_cast<uint8_t>(code);
    }
    store_some(codes, slice.span.moments[kMoment], at, packs.size);
  }

  __device__ void load(int64_t at, Packs& packs) const {
    load_gradients(at, packs);
    load_some(slice.span.parameter, at, packs.size, packs.parameter);
    if constexpr (Weights::kIsSplit) {
      load_some(slice.span.low_half_or_copy, at, packs.size, packs.low_half);
    }
    load_moments<0>(at, packs);
    if constexpr (Rule::kMoments > 1) load_moments<1>(at, packs);
    if constexpr (Rule::kMoments > 2) load_moments<2>(at, packs);
  }

  template <class Body>
  __device__ void store(int64_t at, const Packs& packs, const Scalar (&parameters)[kStagedPack],
                        const Body& body) const {
    store_some(packs.parameter, slice.span.parameter, at, packs.size);
    if constexpr (Weights::kIsSplit) {
      store_some(packs.low_half, slice.span.low_half_or_copy, at, packs.size);
    } else if constexpr (std::is_same_v<typename Weights::Parameter, float>) {
      if (slice.span.low_half_or_copy != nullptr) {
        StepPack<uint16_t, kStagedPack> copy;
        MEZZO_UNROLL
        for (int i = 0; i < kStagedPack; ++i) body.write_copy(parameters[i], &copy.element[i]);
        store_some(copy, slice.span.low_half_or_copy, at, packs.size);
      }
    }
    store_moments<0>(at, packs);
    if constexpr (Rule::kMoments > 1) store_moments<1>(at, packs);
    if constexpr (Rule::kMoments > 2) store_moments<2>(at, packs);
  }

  __device__ void clear_gradients() const {
    const int64_t bytes = slice.gradient_bytes;
    auto* const from = static_cast<char*>(slice.span.gradient);
    for (int64_t i = slice.begin + threadIdx.x; i < slice.end; i += kStepThreads) {
      if (bytes == sizeof(float)) {
        *reinterpret_cast<uint32_t*>(from + i * bytes) = 0;
      } else {
        *reinterpret_cast<uint16_t*>(from + i * bytes) = 0;
      }
    }
  }

  /// Calls `work(at, size)` in all lanes for each block that the warp takes, with the lane's first
  /// element in the parameter and how many there are.
  template <class Work>
  __device__ void visit_blocks(const Work& work) const {
    const auto warp = static_cast<int64_t>(threadIdx.x / 32);
    const auto lane = static_cast<int64_t>(threadIdx.x % 32);
    MEZZO_NO_UNROLL
    for (int64_t block = slice.begin + warp * kBlock8; block < slice.end;
         block += kStepThreads / 32 * kBlock8) {
      const int64_t at = block + lane * kStagedPack;
      const int64_t left = slice.end - at;
      work(at, static_cast<int>(left < 0 ? 0 : left < kStagedPack ? left : kStagedPack));
    }
  }
};

/// Copies the maps from a kernel's arguments, all threads together, to where threads can look up
/// different entries at once.
__device__ inline void copy_maps(const Block8Maps& from, Block8Maps& to) {
  static_assert(sizeof(Block8Maps) % sizeof(float) == 0);
  const auto* const source = reinterpret_cast<const float*>(&from);
  auto* const target = reinterpret_cast<float*>(&to);
  for (unsigned i = threadIdx.x; i < sizeof(Block8Maps) / sizeof(float); i += kStepThreads) {
    target[i] = source[i];
  }
}

/// The body and the random key of a block, in all of its threads.
template <class Body>
struct BodyOfBlock {
  Body body;
  RandomKey key;
};

template <class Rule, class Weights>
using StagedBody = StepBody<typename Weights::Parameter, float, Rule, FloatMoments<Weights>,
                            ScalarLanes<typename Weights::Parameter>>;

template <class Rule, class Weights, class Table>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(kStepThreads, kStepBlocks)
    staged_step_kernel(MEZZO_ARGUMENT(PagedTable<Table>) table, const StepInputs inputs,
                       MEZZO_ARGUMENT(Block8Maps) maps) {
  using Streams = StagedStreams<Rule, Weights>;
  using Body = StagedBody<Rule, Weights>;
  const StagedSlice slice = table.slice_of(blockIdx.x);
  MEZZO_SHARED(Block8Maps, maps_of_block);
  const Streams streams{slice, maps_of_block};
  if (is_skipped(inputs)) {
    if (inputs.clear) streams.clear_gradients();
    return;
  }
  MEZZO_SHARED(BodyOfBlock<Body>, of_block);
  copy_maps(maps, maps_of_block);
  if (threadIdx.x == 0) {
    const StepUse use = use_of_slice(table, slice, inputs);
    of_block = {Body(coefficients_of_slice(table, slice, inputs, use), use),
                random_key_of_slice(slice, use)};
  }
  __syncthreads();
  const BodyOfBlock<Body> step = of_block;
  streams.visit_blocks([&](int64_t at, int size) {
    typename Streams::Packs packs;
    packs.size = size;
    streams.load(at, packs);
    typename Streams::Scalar parameters[kStagedPack];
    MEZZO_UNROLL
    for (int i = 0; i < kStagedPack; ++i) {
      typename Streams::Scalar moments[Streams::Packs::kSlots];
      step.body.compute(packs.place(i), parameters[i], moments);
      step.body.write(packs.place(i), static_cast<uint32_t>(at + i), step.key, parameters[i],
                      moments);
    }
    streams.store(at, packs, parameters, step.body);
  });
  if (!inputs.clear) return;
  __syncthreads();  // other threads' gradients are cleared
  streams.clear_gradients();
}

template <class Rule, class Weights, class Table>
void launch_staged_step(const PagedTable<Table>& table, const StepInputs& inputs, Stream stream) {
  if (table.blocks() == 0) return;
  launch<staged_step_kernel<Rule, Weights, Table>>(table.blocks(), kStepThreads, stream, table,
                                                   inputs, Block8Maps{});
}

}  // namespace detail::cuda
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
