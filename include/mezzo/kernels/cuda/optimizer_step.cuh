/// \file
/// The multi-tensor kernel behind mezzo's optimizers on CUDA: unscale, clip, update and clear, or
/// nothing, in one pass. The arithmetic is that of the CPU's loops (mezzo/kernels/*_element.h).
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/cuda/device.h>
#include <mezzo/kernels/float_format.h>
#include <mezzo/kernels/multi_tensor_metadata.h>
#include <mezzo/kernels/step_functor.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail::cuda {

inline constexpr int kStepThreads = 256;
/// Blocks that a multiprocessor has room for. Without this number nvcc aims at more blocks, gives
/// threads fewer registers, and spills the rest to memory.
inline constexpr int kStepMinBlocksPerSm = 2;
inline constexpr int kStepElementsPerBlock = kStepThreads * 32;

/// Elements that a thread reads of each stream at once: 16 bytes of a float or 16-bit parameter.
template <class Stored>
inline constexpr int kStepVectorSize = sizeof(Stored) == 2 ? 8 : 4;

template <class Stored, int kSize>
struct alignas(sizeof(Stored) * kSize < 16 ? sizeof(Stored) * kSize : 16) StepPack {
  Stored element[kSize];
};

/// Reads elements at an address that a pack of them may have.
template <class Stored, class Bits, int kSize>
__device__ void load_vector(const Stored* from, Bits (&bits)[kSize]) {
  const auto pack = *reinterpret_cast<const StepPack<Stored, kSize>*>(from);
  MEZZO_UNROLL
  for (int i = 0; i < kSize; ++i) bits[i] = pack.element[i];
}

template <class Stored, class Bits, int kSize>
__device__ void store_vector(const Bits (&bits)[kSize], Stored* to) {
  StepPack<Stored, kSize> pack;
  MEZZO_UNROLL
  for (int i = 0; i < kSize; ++i) pack.element[i] = static_cast<Stored>(bits[i]);
  *reinterpret_cast<StepPack<Stored, kSize>*>(to) = pack;
}

/// Returns the number of elements before the first at an address that a pack may have.
__device__ inline int elements_before_vectors(const void* data, int bytes, int pack) {
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

  __device__ int elements_before_vectors(int pack) const {
    return cuda::elements_before_vectors(data, bytes_of(dtype), pack);
  }
  __device__ void advance(int64_t by) { data += by * bytes_of(dtype); }

 private:
  template <class Element, int kSize>
  __device__ void load_as(Scalar (&values)[kSize]) const {
    using Format = FloatFormat<Element>;
    const auto* const from = reinterpret_cast<const typename Format::Stored*>(data);
    typename Format::Bits bits[kSize];
    if (is_aligned) {
      load_vector(from, bits);
    } else {
      MEZZO_UNROLL
      for (int i = 0; i < kSize; ++i) bits[i] = from[i];
    }
    MEZZO_UNROLL
    for (int i = 0; i < kSize; ++i) {
      typename Format::opmath_t value;
      Format::to_opmath(bits[i], value);
      values[i] = static_cast<Scalar>(value);
    }
  }
};

/// Calls `visit.operator()<kVectorSize>(streams, at)` for each of this thread's packs of a slice of
/// `count` elements, the first of which begins after `head` elements, and `visit.operator()<1>` for
/// each of its elements outside of packs. The streams that `visit` gets begin at element `at`.
template <int kVectorSize, class Streams, class Visit>
__device__ void for_each_in_chunk(const Streams& streams, int head, int count, const Visit& visit) {
  constexpr int kStride = kStepThreads * kVectorSize;
  const int before = head < count ? head : count;
  const int packed = (count - before) / kVectorSize * kVectorSize;
  const auto thread = static_cast<int>(threadIdx.x);
  Streams here = streams;  // pointers advance: an index would cost instructions for each stream
  here.advance(before + thread * kVectorSize);
  // Not unrolled: a pack is enough work for one turn, and copies of it compile slowly.
  MEZZO_NO_UNROLL
  for (int at = thread * kVectorSize; at < packed; at += kStride) {
    visit.template operator()<kVectorSize>(here, before + at);
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
template <class Functor, class WeightFormat>
struct ParamArrays {
  using Vec = ScalarVec<typename WeightFormat::Parameter>;
  using Scalar = typename Vec::Value;
  using Body = StepFunctor<Functor, WeightFormat, Vec>;
  using Stored = typename Vec::Stored;
  using StoredMoment = typename FloatFormat<typename WeightFormat::Moment>::Stored;
  static constexpr int kVectorSize = kStepVectorSize<Stored>;
  static constexpr unsigned kNumMoments = Functor::kNumMoments;

  Stored* parameter;
  StoredMoment* moments[kNumMoments > 0 ? kNumMoments : 1];
  uint16_t* low_bits_or_model_param;
  bool has_low_bits_or_model_param;  // as a flag: advanced, null would not be null
  StepGradient<Scalar> gradient;

  __device__ explicit ParamArrays(const ParamListMetadata::Chunk& slice)
      : parameter(static_cast<Stored*>(slice.pointers.parameter)),
        moments{},
        low_bits_or_model_param(static_cast<uint16_t*>(slice.pointers.low_bits_or_model_param)),
        has_low_bits_or_model_param(
            Body::kIsSplit || (Body::kMayHaveModelParam && low_bits_or_model_param != nullptr)),
        gradient{static_cast<char*>(slice.pointers.gradient), slice.gradient_dtype} {
    MEZZO_UNROLL
    for (unsigned k = 0; k != kNumMoments; ++k) {
      moments[k] = static_cast<StoredMoment*>(slice.pointers.moments[k]);
    }
    advance(slice.begin);
  }

  __device__ void advance(int64_t by) {
    parameter += by;
    MEZZO_UNROLL
    for (unsigned k = 0; k != kNumMoments; ++k) moments[k] += by;
    if (has_low_bits_or_model_param) low_bits_or_model_param += by;
    gradient.advance(by);
  }

  /// Returns the number of elements before the first pack, and marks a gradient whose packs are
  /// elsewhere. If any other stream's are, no element is in a pack.
  __device__ int align(int count) {
    const int head = elements_before_vectors(parameter, sizeof(Stored), kVectorSize);
    ParamArrays first = *this;
    first.advance(head);
    gradient.is_aligned = first.gradient.elements_before_vectors(kVectorSize) == 0;
    bool agree = !has_low_bits_or_model_param ||
                 elements_before_vectors(first.low_bits_or_model_param, 2, kVectorSize) == 0;
    MEZZO_UNROLL
    for (unsigned k = 0; k != kNumMoments; ++k) {
      agree = agree &&
              elements_before_vectors(first.moments[k], sizeof(StoredMoment), kVectorSize) == 0;
    }
    return agree ? head : count;
  }

  /// Steps the first `kSize` elements, which have numbers from `number` on in the parameter.
  template <int kSize>
  __device__ void step(const Body& body, bool zeroes_grad, uint32_t number,
                       const RandomKey& key) const {
    typename Body::template Elements<kSize> elements;
    elements.has_low_bits_or_model_param = has_low_bits_or_model_param;
    gradient.load(elements.gradient);
    if (zeroes_grad) gradient.template clear<kSize>();
    load_vector(parameter, elements.parameter);
    MEZZO_UNROLL
    for (unsigned k = 0; k != kNumMoments; ++k) load_vector(moments[k], elements.moments[k]);
    if (has_low_bits_or_model_param)
      load_vector(low_bits_or_model_param, elements.low_bits_or_model_param);
    typename Vec::Bits seeds[kSize];
    MEZZO_UNROLL
    for (int i = 0; i < kSize; ++i) seeds[i] = (number + static_cast<uint32_t>(i)) ^ key;
    body(elements, seeds);
    store_vector(elements.parameter, parameter);
    MEZZO_UNROLL
    for (unsigned k = 0; k != kNumMoments; ++k) store_vector(elements.moments[k], moments[k]);
    if (has_low_bits_or_model_param)
      store_vector(elements.low_bits_or_model_param, low_bits_or_model_param);
  }

  __device__ void clear_gradients(int count) const {
    const int head = gradient.elements_before_vectors(kVectorSize);
    for_each_in_chunk<kVectorSize>(
        gradient, head, count,
        [&]<int kSize>(const StepGradient<Scalar>& here, int) { here.template clear<kSize>(); });
  }
};

/// The numbers that all threads of a block need.
template <class Body>
struct BlockContext {
  Body body;
  RandomKey key;
};

/// Returns the numbers of a block's slice to each of its threads. Thread 0 computes them, in double
/// and hundreds of cycles; the body rounds them to the dtype of its arithmetic. All elements of a
/// slice have one random key: 2^32 is a multiple of a block's elements.
template <class HyperParams, class Body>
__device__ BlockContext<Body> make_block_context(const ParamListMetadata& table,
                                                 const ParamListMetadata::Chunk& slice,
                                                 const DeviceStepArgs& step_args) {
  static_assert((int64_t{1} << 32) % kStepElementsPerBlock == 0);
  MEZZO_SHARED(BlockContext<Body>, shared_context);
  if (threadIdx.x == 0) {
    const DeviceGroupArgs& group = table.group(slice.group);
    const int64_t step =
        slice.state_step == nullptr ? 1 : static_cast<int64_t>(*slice.state_step) + 1;
    StepArgs use{.model_param_is_fp16 = slice.model_param_is_fp16};
    const bool has_max_norm = step_args.norm_sq != nullptr;
    use.multipliers = grad_multipliers(
        step_args.inv_scale != nullptr ? static_cast<double>(*step_args.inv_scale) : 1.0,
        has_max_norm ? clip_coefficient(*step_args.norm_sq, step_args.max_norm) : 1.0);
    const auto hyper_params = group.functor_args.as<HyperParams>();
    shared_context = {Body(hyper_params.coefficients(group.lr * step_args.lr_factor(), step), use),
                      random_key(group.seed, static_cast<uint64_t>(step), slice.param_index,
                                 static_cast<uint64_t>(slice.begin >> 32))};
  }
  __syncthreads();
  return shared_context;  // in registers, which no store can change
}

template <class Parameter, class Functor, class WeightFormat>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(kStepThreads,
                                                                        kStepMinBlocksPerSm)
    optimizer_step_kernel(MEZZO_GRID_CONSTANT(ParamListMetadata) table,
                          const DeviceStepArgs step_args) {
  using Streams = ParamArrays<Functor, WeightFormat>;
  const ParamListMetadata::Chunk slice = table.get_chunk(blockIdx.x);
  Streams streams(slice);
  const auto count = static_cast<int>(slice.end - slice.begin);
  if (step_args.found_inf != nullptr && *step_args.found_inf != 0.0F) {
    if (step_args.zero_grad) streams.clear_gradients(count);
    return;
  }
  const auto own = make_block_context<typename Functor::HyperParams, typename Streams::Body>(
      table, slice, step_args);
  const int head = streams.align(count);
  for_each_in_chunk<Streams::kVectorSize>(
      streams, head, count, [&]<int kSize>(const Streams& here, int at) {
        here.template step<kSize>(own.body, step_args.zero_grad,
                                  static_cast<uint32_t>(slice.begin + at), own.key);
      });
}

/// Counts a step, in a launch after the step, whose blocks all read the state_steps. Static, as
/// every kernel that is no template: several objects of one program may hold it.
static __global__ void increment_state_steps_kernel(MEZZO_GRID_CONSTANT(StateStepsMetadata) table,
                                                    const float* found_inf) {
  if (found_inf != nullptr && *found_inf != 0.0F) return;
  for (int i = static_cast<int>(threadIdx.x); i < table.size; i += static_cast<int>(blockDim.x)) {
    *table.counter[i] += 1.0F;
  }
}

}  // namespace detail::cuda
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
