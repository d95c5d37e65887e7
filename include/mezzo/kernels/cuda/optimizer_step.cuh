/// \file
/// The multi-tensor kernel behind mezzo's optimizers on CUDA: unscale, clip, update and clear, or
/// nothing, in one pass. The arithmetic is that of the CPU's loops (mezzo/kernels/*_element.h).
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/cuda/device.h>
#include <mezzo/kernels/float_format.h>
#include <mezzo/kernels/launch_table.h>
#include <mezzo/kernels/optimizer_step_body.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail::cuda {

inline constexpr int kStepThreads = 256;
/// Blocks that a multiprocessor has room for. Without this number nvcc aims at more blocks, gives
/// threads fewer registers, and spills the rest to memory.
inline constexpr int kStepBlocks = 2;
inline constexpr int kStepBlock = kStepThreads * 32;

/// Elements that a thread reads of each stream at once: 16 bytes of a float or 16-bit parameter.
template <class Stored>
inline constexpr int kStepPack = sizeof(Stored) == 2 ? 8 : 4;

template <class Stored, int kSize>
struct alignas(sizeof(Stored) * kSize < 16 ? sizeof(Stored) * kSize : 16) StepPack {
  Stored element[kSize];
};

template <class Stored, int kSize>
__device__ void load_pack(const Stored* from, StepPack<Stored, kSize>& pack) {
  pack = *reinterpret_cast<const StepPack<Stored, kSize>*>(from);
}

template <class Stored, int kSize>
__device__ void store_pack(const StepPack<Stored, kSize>& pack, Stored* to) {
  *reinterpret_cast<StepPack<Stored, kSize>*>(to) = pack;
}

__device__ inline int bytes_of(at::ScalarType gradient_dtype) {
  return gradient_dtype == at::kDouble ? 8 : gradient_dtype == at::kFloat ? 4 : 2;
}

/// A gradient's elements in memory, of the dtype that it happens to have. All threads of a block
/// take the same branch.
template <class Scalar>
struct StepGradient {
  using Bits = typename FloatFormat<Scalar>::Stored;

  char* data;
  at::ScalarType dtype;

  /// Reads `kSize` elements from number `at` on, at an address that packs may have.
  template <int kSize>
  __device__ void load(int64_t at, StepPack<Bits, kSize>& pack) const {
    if constexpr (sizeof(Scalar) == sizeof(double)) {
      if (dtype == at::kDouble) return load_pack(element<Bits>(at), pack);
      widen<float>(at, pack);
    } else {
      if (dtype == at::kFloat) return load_pack(element<Bits>(at), pack);
      dtype == at::kHalf ? widen<c10::Half>(at, pack) : widen<c10::BFloat16>(at, pack);
    }
  }

  /// Sets `kSize` elements to zero.
  template <int kSize>
  __device__ void clear(int64_t at) const {
    const int bytes = bytes_of(dtype);
    if (bytes == 2) {
      store_pack(StepPack<uint16_t, kSize>{}, element<uint16_t>(at));
    } else if (bytes == 4) {
      store_pack(StepPack<uint32_t, kSize>{}, element<uint32_t>(at));
    } else {
      store_pack(StepPack<uint64_t, kSize>{}, element<uint64_t>(at));
    }
  }

 private:
  template <class Stored>
  __device__ Stored* element(int64_t at) const {
    return reinterpret_cast<Stored*>(data) + at;
  }
  template <class Element, int kSize>
  __device__ void widen(int64_t at, StepPack<Bits, kSize>& pack) const {
    using Format = FloatFormat<Element>;
    StepPack<typename Format::Stored, kSize> stored;
    load_pack(element<typename Format::Stored>(at), stored);
    MEZZO_UNROLL
    for (int i = 0; i < kSize; ++i) {
      const typename Format::Bits bits = stored.element[i];
      typename Format::Value value;
      Format::widen(bits, value);
      const auto wide = static_cast<Scalar>(value);
      reinterpret_bits(wide, pack.element[i]);
    }
  }
};

/// Calls `whole(streams, at)` for each pack of this thread in a slice of `count` elements; the
/// streams begin at the pack. Calls `single(at)` for each of its elements outside of packs: the
/// tail, or all elements if a stream is not aligned.
template <class Streams, class Whole, class Single>
__device__ void visit_slice(const Streams& streams, int count, const Whole& whole,
                            const Single& single) {
  constexpr int kStride = kStepThreads * Streams::kPack;
  const int packed = streams.is_aligned ? count - count % Streams::kPack : 0;
  const auto thread = static_cast<int>(threadIdx.x);
  Streams here = streams;  // pointers advance: an index would cost instructions for each stream
  here.advance(thread * Streams::kPack);
  // Not unrolled: a pack is enough work for one turn, and copies of it compile slowly.
  MEZZO_NO_UNROLL
  for (int at = thread * Streams::kPack; at < packed; at += kStride) {
    whole(here, at);
    here.advance(kStride);
  }
  MEZZO_NO_UNROLL
  for (int at = packed + thread; at < count; at += kStepThreads) single(at);
}

using StepSlice = StepTable::Slice;

/// The streams of one slice, typed. The gradient's is not: a pack of it is widened to Scalar.
template <class Rule, class Weights>
struct StepStreams {
  using Lanes = ScalarLanes<typename Weights::Parameter>;
  using Scalar = typename Lanes::Value;
  using Body = StepBody<Rule, Weights, Lanes>;
  using Place = typename Body::Place;
  using Stored = typename Lanes::Stored;
  using StoredMoment = typename Place::MomentLanes::Stored;
  static constexpr int kPack = kStepPack<Stored>;
  static constexpr unsigned kMoments = Rule::kMoments;

  Place base;
  StepGradient<Scalar> gradient;
  bool is_aligned;

  __device__ explicit StepStreams(const StepSlice& slice)
      : base{static_cast<Stored*>(slice.span.parameter) + slice.begin,
             nullptr,
             {},
             advanced(static_cast<uint16_t*>(slice.span.low_half_or_copy), slice.begin),
             slice.span.low_half_or_copy != nullptr},
        gradient{
            static_cast<char*>(slice.span.gradient) + slice.begin * bytes_of(slice.gradient_dtype),
            slice.gradient_dtype},
        is_aligned(holds_packs(base.parameter) && holds_gradients() &&
                   holds_packs(base.low_half_or_copy)) {
    MEZZO_UNROLL
    for (unsigned k = 0; k != kMoments; ++k) {
      base.moments[k] = static_cast<StoredMoment*>(slice.span.moments[k]) + slice.begin;
      is_aligned = is_aligned && holds_packs(base.moments[k]);
    }
  }

  __device__ bool holds_gradients() const {
    const int bytes = bytes_of(gradient.dtype) * kPack;
    return reinterpret_cast<uintptr_t>(gradient.data) % (bytes < 16 ? bytes : 16) == 0;
  }

  template <class T>
  __device__ static bool holds_packs(const T* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % alignof(StepPack<T, kPack>) == 0;
  }

  template <class T>
  __device__ static T* advanced(T* pointer, int64_t by) {
    return pointer == nullptr ? nullptr : pointer + by;
  }

  __device__ void advance(int by) {
    base = place(by);
    gradient.data += int64_t{by} * bytes_of(gradient.dtype);
  }

  /// Returns the place of element `at` in memory, without its gradient.
  __device__ Place place(int at) const {
    Place result{base.parameter + at,
                 nullptr,
                 {},
                 advanced(base.low_half_or_copy, at),
                 base.has_low_half_or_copy};
    MEZZO_UNROLL
    for (unsigned k = 0; k != kMoments; ++k) result.moments[k] = base.moments[k] + at;
    return result;
  }

  /// A pack of each stream, in registers.
  struct Packs {
    StepPack<typename StepGradient<Scalar>::Bits, kPack> gradient;
    StepPack<Stored, kPack> parameter;
    StepPack<StoredMoment, kPack> moments[Place::kMomentSlots];
    StepPack<uint16_t, kPack> low_half_or_copy;
    bool has_low_half_or_copy;

    /// Returns the place of element `i` in these registers.
    __device__ Place place(int i) {
      Place result{&parameter.element[i],
                   &gradient.element[i],
                   {},
                   &low_half_or_copy.element[i],
                   has_low_half_or_copy};
      MEZZO_UNROLL
      for (unsigned k = 0; k != kMoments; ++k) result.moments[k] = &moments[k].element[i];
      return result;
    }
  };

  __device__ void load(Packs& packs) const {
    gradient.load(0, packs.gradient);
    load_pack(base.parameter, packs.parameter);
    MEZZO_UNROLL
    for (unsigned k = 0; k != kMoments; ++k) load_pack(base.moments[k], packs.moments[k]);
    packs.has_low_half_or_copy = Body::kIsSplit || (Body::kMayCopy && base.has_low_half_or_copy);
    if (packs.has_low_half_or_copy) load_pack(base.low_half_or_copy, packs.low_half_or_copy);
  }

  __device__ void store(const Packs& packs) const {
    store_pack(packs.parameter, base.parameter);
    if (Body::kIsSplit) store_pack(packs.low_half_or_copy, base.low_half_or_copy);
    MEZZO_UNROLL
    for (unsigned k = 0; k != kMoments; ++k) store_pack(packs.moments[k], base.moments[k]);
  }

  /// Writes the weights of 16 bits of new masters, if these are masters.
  template <class AnyBody>
  __device__ void store_beside(const Scalar (&parameters)[kPack], const AnyBody& body) const {
    if constexpr (Body::kMayCopy) {
      if (base.has_low_half_or_copy) {
        StepPack<uint16_t, kPack> copy;
        MEZZO_UNROLL
        for (int i = 0; i < kPack; ++i) body.write_copy(parameters[i], &copy.element[i]);
        store_pack(copy, base.low_half_or_copy);
      }
    }
  }

  /// Steps the pack at `base`, whose first element has `number` in the parameter.
  __device__ void step_pack(const Body& step, uint32_t number, const RandomKey& key) const {
    Packs packs;
    load(packs);
    Scalar parameters[kPack];
    Scalar moments[kPack][Place::kMomentSlots];
    MEZZO_UNROLL
    for (int i = 0; i < kPack; ++i) step.compute(packs.place(i), parameters[i], moments[i]);
    MEZZO_UNROLL
    for (int i = 0; i < kPack; ++i) {
      step.write(packs.place(i), number + static_cast<uint32_t>(i), key, parameters[i], moments[i]);
    }
    store(packs);
    store_beside(parameters, step);
  }

  /// Steps element `at`, whose number in the parameter is `number`.
  __device__ void step_element(const Body& step, int at, uint32_t number,
                               const RandomKey& key) const {
    StepPack<typename StepGradient<Scalar>::Bits, 1> own;
    gradient.load(at, own);
    Place there = place(at);
    there.gradient = own.element;
    step(there, number, key);
  }

  __device__ void clear_gradients(int count) const {
    visit_slice(
        *this, count, [](const StepStreams& here, int) { here.gradient.template clear<kPack>(0); },
        [&](int at) { gradient.template clear<1>(at); });
  }
};

/// The numbers that all threads of a block need.
template <class Body>
struct BlockStep {
  Body body;
  RandomKey key;
};

/// Returns the numbers of a block's slice to each of its threads. Thread 0 computes them, in double
/// and hundreds of cycles; the body rounds them to the dtype of its arithmetic. All elements of a
/// slice have one random key: 2^32 is a multiple of a block's elements.
template <class Constants, class Body>
__device__ BlockStep<Body> block_step(const StepTable& table, const StepSlice& slice,
                                      const StepInputs& inputs) {
  static_assert((int64_t{1} << 32) % kStepBlock == 0);
  MEZZO_SHARED(BlockStep<Body>, of_block);
  if (threadIdx.x == 0) {
    const StepGroup& group = table.group(slice.group);
    const int64_t step = slice.count == nullptr ? 1 : static_cast<int64_t>(*slice.count) + 1;
    StepUse use{.copies_half = slice.copies_half};
    const bool clips = inputs.sum_of_squares != nullptr;
    use.multipliers =
        grad_multipliers(inputs.inv_scale != nullptr ? static_cast<double>(*inputs.inv_scale) : 1.0,
                         clips ? clip_coefficient(*inputs.sum_of_squares, inputs.max_norm) : 1.0);
    const auto constants = group.constants.as<Constants>();
    of_block = {Body(constants.at(group.lr * inputs.lr_factor(), step), use),
                random_key(group.seed, static_cast<uint64_t>(step), slice.number,
                           static_cast<uint64_t>(slice.begin >> 32))};
  }
  __syncthreads();
  return of_block;  // in registers, which no store can change
}

template <class Parameter, class Rule, class Weights>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(kStepThreads, kStepBlocks)
    optimizer_step_kernel(MEZZO_ARGUMENT(StepTable) table, const StepInputs inputs) {
  using Streams = StepStreams<Rule, Weights>;
  const StepSlice slice = table.slice_of(blockIdx.x);
  const Streams streams(slice);
  const auto count = static_cast<int>(slice.end - slice.begin);
  if (inputs.found_inf != nullptr && *inputs.found_inf != 0.0F) {
    if (inputs.clear) streams.clear_gradients(count);
    return;
  }
  const auto own =
      block_step<typename Rule::Constants, typename Streams::Body>(table, slice, inputs);
  const auto number = static_cast<uint32_t>(slice.begin);
  visit_slice(
      streams, count,
      [&](const Streams& here, int at) {
        here.step_pack(own.body, number + static_cast<uint32_t>(at), own.key);
      },
      [&](int at) {
        streams.step_element(own.body, at, number + static_cast<uint32_t>(at), own.key);
      });
  if (inputs.clear) streams.clear_gradients(count);
}

/// Counts a step, in a launch after the step, whose blocks all read the counters. Static, as every
/// kernel that is no template: several objects of one program may hold it.
static __global__ void count_steps_kernel(MEZZO_ARGUMENT(CounterTable) table,
                                          const float* found_inf) {
  if (found_inf != nullptr && *found_inf != 0.0F) return;
  for (int i = static_cast<int>(threadIdx.x); i < table.size; i += static_cast<int>(blockDim.x)) {
    *table.counter[i] += 1.0F;
  }
}

}  // namespace detail::cuda
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
