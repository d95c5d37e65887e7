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

/// Reads elements at an address that a pack of them may have.
template <class Stored, class Bits, int kSize>
__device__ void load_pack(const Stored* from, Bits (&bits)[kSize]) {
  const auto pack = *reinterpret_cast<const StepPack<Stored, kSize>*>(from);
  MEZZO_UNROLL
  for (int i = 0; i < kSize; ++i) bits[i] = pack.element[i];
}

template <class Stored, class Bits, int kSize>
__device__ void store_pack(const Bits (&bits)[kSize], Stored* to) {
  StepPack<Stored, kSize> pack;
  MEZZO_UNROLL
  for (int i = 0; i < kSize; ++i) pack.element[i] = static_cast<Stored>(bits[i]);
  *reinterpret_cast<StepPack<Stored, kSize>*>(to) = pack;
}

/// Returns the number of elements before the first at an address that a pack may have.
__device__ inline int elements_before_packs(const void* data, int bytes, int pack) {
  const int alignment = bytes * pack < 16 ? bytes * pack : 16;
  const auto beyond = static_cast<int>(reinterpret_cast<uintptr_t>(data) % alignment);
  return beyond == 0 ? 0 : (alignment - beyond) / bytes;
}

__device__ inline int bytes_of(at::ScalarType gradient_dtype) {
  return gradient_dtype == at::kDouble ? 8 : gradient_dtype == at::kFloat ? 4 : 2;
}

/// A gradient's elements in memory, of the dtype that it happens to have. All threads of a block
/// take the same branch.
template <class Scalar>
struct StepGradient {
  char* data;
  at::ScalarType dtype;
  bool is_aligned = true;  ///< whether packs of it are where those of the parameter are

  /// Reads `kSize` elements.
  template <int kSize>
  __device__ void load(Scalar (&values)[kSize]) const {
    if constexpr (sizeof(Scalar) == sizeof(double)) {
      if (dtype == at::kDouble) return load_as<double>(values);
      load_as<float>(values);
    } else {
      if (dtype == at::kFloat) return load_as<float>(values);
      dtype == at::kHalf ? load_as<c10::Half>(values) : load_as<c10::BFloat16>(values);
    }
  }

  /// Sets `kSize` elements to zero.
  template <int kSize>
  __device__ void clear() const {
    if (kSize > 1 && !is_aligned) {
      StepGradient here = *this;
      for (int i = 0; i < kSize; ++i, here.advance(1)) here.template clear<1>();
      return;
    }
    const int bytes = bytes_of(dtype);
    if (bytes == 2) {
      *reinterpret_cast<StepPack<uint16_t, kSize>*>(data) = {};
    } else if (bytes == 4) {
      *reinterpret_cast<StepPack<uint32_t, kSize>*>(data) = {};
    } else {
      *reinterpret_cast<StepPack<uint64_t, kSize>*>(data) = {};
    }
  }

  __device__ int elements_before_packs(int pack) const {
    return cuda::elements_before_packs(data, bytes_of(dtype), pack);
  }
  __device__ void advance(int64_t by) { data += by * bytes_of(dtype); }

 private:
  template <class Element, int kSize>
  __device__ void load_as(Scalar (&values)[kSize]) const {
    using Format = FloatFormat<Element>;
    const auto* const from = reinterpret_cast<const typename Format::Stored*>(data);
    typename Format::Bits bits[kSize];
    if (is_aligned) {
      load_pack(from, bits);
    } else {
      MEZZO_UNROLL
      for (int i = 0; i < kSize; ++i) bits[i] = from[i];
    }
    MEZZO_UNROLL
    for (int i = 0; i < kSize; ++i) {
      typename Format::Value value;
      Format::widen(bits[i], value);
      values[i] = static_cast<Scalar>(value);
    }
  }
};

/// Calls `visit.operator()<kPack>(streams, at)` for each of this thread's packs of a slice of
/// `count` elements, the first of which begins after `head` elements, and `visit.operator()<1>` for
/// each of its elements outside of packs. The streams that `visit` gets begin at element `at`.
template <int kPack, class Streams, class Visit>
__device__ void visit_slice(const Streams& streams, int head, int count, const Visit& visit) {
  constexpr int kStride = kStepThreads * kPack;
  const int before = head < count ? head : count;
  const int packed = (count - before) / kPack * kPack;
  const auto thread = static_cast<int>(threadIdx.x);
  Streams here = streams;  // pointers advance: an index would cost instructions for each stream
  here.advance(before + thread * kPack);
  // Not unrolled: a pack is enough work for one turn, and copies of it compile slowly.
  MEZZO_NO_UNROLL
  for (int at = thread * kPack; at < packed; at += kStride) {
    visit.template operator()<kPack>(here, before + at);
    here.advance(kStride);
  }
  MEZZO_NO_UNROLL
  for (int i = thread; i < count - packed; i += kStepThreads) {
    const int at = i < before ? i : i + packed;
    Streams there = streams;
    there.advance(at);
    visit.template operator()<1>(there, at);
  }
}

/// The streams of one slice, typed.
template <class Rule, class Weights>
struct StepStreams {
  using Lanes = ScalarLanes<typename Weights::Parameter>;
  using Scalar = typename Lanes::Value;
  using Body = StepBody<Rule, Weights, Lanes>;
  using Stored = typename Lanes::Stored;
  using StoredMoment = typename FloatFormat<typename Weights::Moment>::Stored;
  static constexpr int kPack = kStepPack<Stored>;
  static constexpr unsigned kMoments = Rule::kMoments;

  Stored* parameter;
  StoredMoment* moments[kMoments > 0 ? kMoments : 1];
  uint16_t* low_half_or_copy;
  bool has_low_half_or_copy;  // as a flag: advanced, null would not be null
  StepGradient<Scalar> gradient;

  __device__ explicit StepStreams(const StepTable::Slice& slice)
      : parameter(static_cast<Stored*>(slice.span.parameter)),
        moments{},
        low_half_or_copy(static_cast<uint16_t*>(slice.span.low_half_or_copy)),
        has_low_half_or_copy(Body::kIsSplit || (Body::kMayCopy && low_half_or_copy != nullptr)),
        gradient{static_cast<char*>(slice.span.gradient), slice.gradient_dtype} {
    MEZZO_UNROLL
    for (unsigned k = 0; k != kMoments; ++k) {
      moments[k] = static_cast<StoredMoment*>(slice.span.moments[k]);
    }
    advance(slice.begin);
  }

  __device__ void advance(int64_t by) {
    parameter += by;
    MEZZO_UNROLL
    for (unsigned k = 0; k != kMoments; ++k) moments[k] += by;
    if (has_low_half_or_copy) low_half_or_copy += by;
    gradient.advance(by);
  }

  /// Returns the number of elements before the first pack, and marks a gradient whose packs are
  /// elsewhere. If any other stream's are, no element is in a pack.
  __device__ int align(int count) {
    const int head = elements_before_packs(parameter, sizeof(Stored), kPack);
    StepStreams first = *this;
    first.advance(head);
    gradient.is_aligned = first.gradient.elements_before_packs(kPack) == 0;
    bool agree =
        !has_low_half_or_copy || elements_before_packs(first.low_half_or_copy, 2, kPack) == 0;
    MEZZO_UNROLL
    for (unsigned k = 0; k != kMoments; ++k) {
      agree = agree && elements_before_packs(first.moments[k], sizeof(StoredMoment), kPack) == 0;
    }
    return agree ? head : count;
  }

  /// Steps the first `kSize` elements, which have numbers from `number` on in the parameter.
  template <int kSize>
  __device__ void step(const Body& body, bool clears, uint32_t number, const RandomKey& key) const {
    typename Body::template Places<kSize> places;
    places.has_low_half_or_copy = has_low_half_or_copy;
    gradient.load(places.gradient);
    if (clears) gradient.template clear<kSize>();
    load_pack(parameter, places.parameter);
    MEZZO_UNROLL
    for (unsigned k = 0; k != kMoments; ++k) load_pack(moments[k], places.moments[k]);
    if (has_low_half_or_copy) load_pack(low_half_or_copy, places.low_half_or_copy);
    typename Lanes::Bits seeds[kSize];
    MEZZO_UNROLL
    for (int i = 0; i < kSize; ++i) seeds[i] = (number + static_cast<uint32_t>(i)) ^ key;
    body(places, seeds);
    store_pack(places.parameter, parameter);
    MEZZO_UNROLL
    for (unsigned k = 0; k != kMoments; ++k) store_pack(places.moments[k], moments[k]);
    if (has_low_half_or_copy) store_pack(places.low_half_or_copy, low_half_or_copy);
  }

  __device__ void clear_gradients(int count) const {
    const int head = gradient.elements_before_packs(kPack);
    visit_slice<kPack>(
        gradient, head, count,
        [&]<int kSize>(const StepGradient<Scalar>& here, int) { here.template clear<kSize>(); });
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
__device__ BlockStep<Body> block_step(const StepTable& table, const StepTable::Slice& slice,
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
  const StepTable::Slice slice = table.slice_of(blockIdx.x);
  Streams streams(slice);
  const auto count = static_cast<int>(slice.end - slice.begin);
  if (inputs.found_inf != nullptr && *inputs.found_inf != 0.0F) {
    if (inputs.clear) streams.clear_gradients(count);
    return;
  }
  const auto own =
      block_step<typename Rule::Constants, typename Streams::Body>(table, slice, inputs);
  const int head = streams.align(count);
  visit_slice<Streams::kPack>(streams, head, count, [&]<int kSize>(const Streams& here, int at) {
    here.template step<kSize>(own.body, inputs.clear, static_cast<uint32_t>(slice.begin + at),
                              own.key);
  });
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
