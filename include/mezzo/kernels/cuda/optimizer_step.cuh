/// \file
/// The multi-tensor kernel of the element-wise optimizers: unscale, clip, update and zero gradients
/// in one pass, or skip. Its arithmetic is that of the CPU kernels (mezzo/kernels/*_functor.h).
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/cuda/aligned_vector.cuh>
#include <mezzo/kernels/cuda/device.h>
#include <mezzo/kernels/float_format.h>
#include <mezzo/kernels/multi_tensor_metadata.h>
#include <mezzo/kernels/step_functor.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail::cuda {

inline constexpr int kStepThreads = 256;
/// Second argument of __launch_bounds__. Without it nvcc aims at more blocks per multiprocessor,
/// gives threads fewer registers, and spills.
inline constexpr int kStepMinBlocksPerSm = 2;
inline constexpr int kStepElementsPerBlock = kStepThreads * 32;

/// Elements per AlignedVector: 16 bytes of a float32 or 16-bit parameter.
template <class Stored>
inline constexpr int kStepVectorSize = sizeof(Stored) == 2 ? 8 : 4;

__device__ inline int bytes_per_element(at::ScalarType gradient_dtype) {
  return gradient_dtype == at::kDouble ? 8 : gradient_dtype == at::kFloat ? 4 : 2;
}

/// A gradient of a dtype known at run time. All threads of a block take the same branch.
template <class Scalar>
struct GradArray {
  char* data;
  at::ScalarType dtype;
  bool is_aligned = true;  ///< whether it is aligned for vectors where its parameter is

  /// Loads `kSize` elements.
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
  __device__ void zero() const {
    if (kSize > 1 && !is_aligned) {
      GradArray array = *this;
      for (int i = 0; i < kSize; ++i, array.advance(1)) array.template zero<1>();
      return;
    }
    const int bytes = bytes_per_element(dtype);
    if (bytes == 2) {
      *reinterpret_cast<AlignedVector<uint16_t, kSize>*>(data) = {};
    } else if (bytes == 4) {
      *reinterpret_cast<AlignedVector<uint32_t, kSize>*>(data) = {};
    } else {
      *reinterpret_cast<AlignedVector<uint64_t, kSize>*>(data) = {};
    }
  }

  __device__ int elements_before_vectors(int size) const {
    return cuda::elements_before_vectors(data, bytes_per_element(dtype), size);
  }
  __device__ void advance(int64_t elements) { data += elements * bytes_per_element(dtype); }

 private:
  template <class Element, int kSize>
  __device__ void load_as(Scalar (&values)[kSize]) const {
    using Format = FloatFormat<Element>;
    const auto* const stored = reinterpret_cast<const typename Format::Stored*>(data);
    typename Format::Bits bits[kSize];
    if (is_aligned) {
      load_vector(stored, bits);
    } else {
      MEZZO_UNROLL
      for (int i = 0; i < kSize; ++i) bits[i] = stored[i];
    }
    MEZZO_UNROLL
    for (int i = 0; i < kSize; ++i) {
      typename Format::opmath_t value;
      Format::to_opmath(bits[i], value);
      values[i] = static_cast<Scalar>(value);
    }
  }
};

/// Visits this thread's elements of a chunk of `count` elements. Calls
/// `visit.operator()<kVectorSize>(arrays, i)` for each of its vectors, the first of which begins at
/// element `head`, and `visit.operator()<1>(arrays, i)` for each of its elements before and after
/// all vectors. `arrays` is then advanced to element `i`.
template <int kVectorSize, class Arrays, class Visit>
__device__ void for_each_in_chunk(const Arrays& arrays, int head, int count, const Visit& visit) {
  constexpr int kStride = kStepThreads * kVectorSize;
  const int num_head = head < count ? head : count;
  const int num_vectorized = (count - num_head) / kVectorSize * kVectorSize;
  const auto thread = static_cast<int>(threadIdx.x);
  Arrays vector_arrays = arrays;  // advanced, since an index would cost instructions for each array
  vector_arrays.advance(num_head + thread * kVectorSize);
  // Not unrolled: a vector is enough work for an iteration, and copies compile slowly.
  MEZZO_NO_UNROLL
  for (int i = thread * kVectorSize; i < num_vectorized; i += kStride) {
    visit.template operator()<kVectorSize>(vector_arrays, num_head + i);
    vector_arrays.advance(kStride);
  }
  MEZZO_NO_UNROLL
  for (int k = thread; k < count - num_vectorized; k += kStepThreads) {
    const int i = k < num_head ? k : k + num_vectorized;
    Arrays scalar_arrays = arrays;
    scalar_arrays.advance(i);
    visit.template operator()<1>(scalar_arrays, i);
  }
}

/// The arrays of a chunk with their types.
template <class Functor, class WeightFormat>
struct ParamArrays {
  using Vec = ScalarVec<typename WeightFormat::Parameter>;
  using Scalar = typename Vec::Value;
  using Step = StepFunctor<Functor, WeightFormat, Vec>;
  using Stored = typename Vec::Stored;
  using StoredMoment = typename FloatFormat<typename WeightFormat::Moment>::Stored;
  static constexpr int kVectorSize = kStepVectorSize<Stored>;
  static constexpr unsigned kNumMoments = Functor::kNumMoments;

  Stored* parameter;
  StoredMoment* moments[kNumMoments > 0 ? kNumMoments : 1];
  uint16_t* low_bits_or_model_param;
  bool has_low_bits_or_model_param;  // a flag, since an advanced null pointer is not null
  GradArray<Scalar> gradient;

  __device__ explicit ParamArrays(const ParamListMetadata::Chunk& chunk)
      : parameter(static_cast<Stored*>(chunk.pointers.parameter)),
        moments{},
        low_bits_or_model_param(static_cast<uint16_t*>(chunk.pointers.low_bits_or_model_param)),
        has_low_bits_or_model_param(
            Step::kIsSplit || (Step::kMayHaveModelParam && low_bits_or_model_param != nullptr)),
        gradient{static_cast<char*>(chunk.pointers.gradient), chunk.gradient_dtype} {
    MEZZO_UNROLL
    for (unsigned k = 0; k != kNumMoments; ++k) {
      moments[k] = static_cast<StoredMoment*>(chunk.pointers.moments[k]);
    }
    advance(chunk.begin);
  }

  __device__ void advance(int64_t elements) {
    parameter += elements;
    MEZZO_UNROLL
    for (unsigned k = 0; k != kNumMoments; ++k) moments[k] += elements;
    if (has_low_bits_or_model_param) low_bits_or_model_param += elements;
    gradient.advance(elements);
  }

  /// Returns the number of elements before the first vector, and sets gradient.is_aligned. Returns
  /// `count` (no vectors) if another array is not aligned where the parameter is.
  __device__ int align(int count) {
    const int head = elements_before_vectors(parameter, sizeof(Stored), kVectorSize);
    ParamArrays first = *this;
    first.advance(head);
    gradient.is_aligned = first.gradient.elements_before_vectors(kVectorSize) == 0;
    bool is_aligned = !has_low_bits_or_model_param ||
                      elements_before_vectors(first.low_bits_or_model_param, 2, kVectorSize) == 0;
    MEZZO_UNROLL
    for (unsigned k = 0; k != kNumMoments; ++k) {
      is_aligned = is_aligned && elements_before_vectors(first.moments[k], sizeof(StoredMoment),
                                                         kVectorSize) == 0;
    }
    return is_aligned ? head : count;
  }

  /// Steps the first `kSize` elements, the first of which is element `index` of the parameter.
  template <int kSize>
  __device__ void step(const Step& functor, bool zero_grad, uint32_t index,
                       const RandomKey& key) const {
    typename Step::template Elements<kSize> elements;
    elements.has_low_bits_or_model_param = has_low_bits_or_model_param;
    gradient.load(elements.gradient);
    if (zero_grad) gradient.template zero<kSize>();
    load_vector(parameter, elements.parameter);
    MEZZO_UNROLL
    for (unsigned k = 0; k != kNumMoments; ++k) load_vector(moments[k], elements.moments[k]);
    if (has_low_bits_or_model_param) {
      load_vector(low_bits_or_model_param, elements.low_bits_or_model_param);
    }
    typename Vec::Bits seeds[kSize];
    MEZZO_UNROLL
    for (int i = 0; i < kSize; ++i) seeds[i] = (index + static_cast<uint32_t>(i)) ^ key;
    functor(elements, seeds);
    store_vector(elements.parameter, parameter);
    MEZZO_UNROLL
    for (unsigned k = 0; k != kNumMoments; ++k) store_vector(elements.moments[k], moments[k]);
    if (has_low_bits_or_model_param) {
      store_vector(elements.low_bits_or_model_param, low_bits_or_model_param);
    }
  }

  __device__ void zero_gradients(int count) const {
    const int head = gradient.elements_before_vectors(kVectorSize);
    for_each_in_chunk<kVectorSize>(
        gradient, head, count,
        [&]<int kSize>(const GradArray<Scalar>& array, int) { array.template zero<kSize>(); });
  }
};

/// Step functor and random key, shared by all threads of a block.
template <class Step>
struct BlockContext {
  Step functor;
  RandomKey key;
};

/// Returns the block's context to each thread. Thread 0 computes it, in double and hundreds of
/// cycles; Step rounds it to the opmath dtype. All elements of a chunk have one RandomKey, since
/// 2^32 is a multiple of a block's elements.
template <class HyperParams, class Step>
__device__ BlockContext<Step> make_block_context(const ParamListMetadata& metadata,
                                                 const ParamListMetadata::Chunk& chunk,
                                                 const DeviceStepArgs& step_args) {
  static_assert((int64_t{1} << 32) % kStepElementsPerBlock == 0);
  MEZZO_SHARED(BlockContext<Step>, shared_context);
  if (threadIdx.x == 0) {
    const DeviceGroupArgs& group = metadata.group(chunk.group);
    const int64_t step =
        chunk.state_step == nullptr ? 1 : static_cast<int64_t>(*chunk.state_step) + 1;
    const bool has_max_norm = step_args.norm_sq != nullptr;
    const GradMultipliers multipliers = grad_multipliers(
        step_args.inv_scale != nullptr ? static_cast<double>(*step_args.inv_scale) : 1.0,
        has_max_norm ? clip_coefficient(*step_args.norm_sq, step_args.max_norm) : 1.0);
    const auto hyper_params = group.functor_args.as<HyperParams>();
    shared_context = {Step(hyper_params.coefficients(group.lr * step_args.lr_factor(), step),
                           multipliers, chunk.model_param_is_fp16),
                      random_key(group.seed, static_cast<uint64_t>(step), chunk.param_index,
                                 static_cast<uint64_t>(chunk.begin >> 32))};
  }
  __syncthreads();
  return shared_context;  // a copy in registers, which stores cannot alias
}

template <class Parameter, class Functor, class WeightFormat>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(kStepThreads,
                                                                        kStepMinBlocksPerSm)
    optimizer_step_kernel(MEZZO_GRID_CONSTANT(ParamListMetadata) metadata,
                          const DeviceStepArgs step_args) {
  using Arrays = ParamArrays<Functor, WeightFormat>;
  const ParamListMetadata::Chunk chunk = metadata.get_chunk(blockIdx.x);
  Arrays arrays(chunk);
  const auto count = static_cast<int>(chunk.end - chunk.begin);
  if (step_args.found_inf != nullptr && *step_args.found_inf != 0.0F) {
    if (step_args.zero_grad) arrays.zero_gradients(count);
    return;
  }
  const auto context = make_block_context<typename Functor::HyperParams, typename Arrays::Step>(
      metadata, chunk, step_args);
  const int head = arrays.align(count);
  for_each_in_chunk<Arrays::kVectorSize>(
      arrays, head, count, [&]<int kSize>(const Arrays& arrays_at_i, int i) {
        arrays_at_i.template step<kSize>(context.functor, step_args.zero_grad,
                                         static_cast<uint32_t>(chunk.begin + i), context.key);
      });
}

/// Increments step counts unless *found_inf is not 0. Launched after the step, whose blocks read
/// them. Static like every kernel that is not a template: several objects of a program may contain
/// it.
static __global__ void increment_state_steps_kernel(MEZZO_GRID_CONSTANT(StateStepsMetadata)
                                                        metadata,
                                                    const float* found_inf) {
  if (found_inf != nullptr && *found_inf != 0.0F) return;
  for (int i = static_cast<int>(threadIdx.x); i < metadata.size;
       i += static_cast<int>(blockDim.x)) {
    *metadata.state_steps[i] += 1.0F;
  }
}

}  // namespace detail::cuda
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
