/// \file
/// Multi-tensor kernels of gradients. unscale_kernel multiplies and checks them in place.
/// grad_stats_kernel reads them: each block writes a partial result, and one block of
/// merge_grad_stats_kernel merges these in order. No atomics: results are deterministic.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/cuda/aligned_vector.cuh>
#include <mezzo/kernels/cuda/device.h>
#include <mezzo/kernels/multi_tensor_metadata.h>
#include <mezzo/kernels/partial_grad_stats.h>
#include <mezzo/kernels/unscale_functor.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail::cuda {

inline constexpr int kGradThreads = 512;
inline constexpr int kMergeThreads = 1024;

/// Elements per block: eight vectors of 16 bytes per thread.
template <class Element>
inline constexpr int kGradElementsPerBlock = kGradThreads * 16 * 8 / int{sizeof(Element)};

/// Vectors that a thread loads at once.
inline constexpr int kUnroll = 4;

/// 16 bytes of gradients.
template <class Stored>
using GradVector = AlignedVector<Stored, 16 / int{sizeof(Stored)}>;

template <class Stored>
inline constexpr int kGradVectorSize = 16 / int{sizeof(Stored)};

/// The most squares that are summed in float32.
inline constexpr int kMaxFloat32Squares = kUnroll * kGradVectorSize<uint16_t>;

/// Returns whether a float32 sum of squares is accurate: nothing overflowed, and squares below
/// 2^-126 lost less than the rounding errors of the rest.
__device__ inline bool is_accurate(float sum) { return sum >= 0x1p-102F && sum <= 0x1p127F; }

/// Adds the squares of `values`. They are summed in float32, with a relative error of at most
/// gamma(n) = n u / (1 - n u), u = 2^-24; or in float64 where float32 is too narrow (inf, NaN, very
/// large or very small values, which are rare).
template <int kCount>
__device__ void add_squares(const float (&values)[kCount], double& sum) {
  float float_sum = 0;
  MEZZO_UNROLL
  for (int i = 0; i < kCount; ++i) {
    ScalarVec<float>::fma(values[i], values[i], float_sum, float_sum);
  }
  if (is_accurate(float_sum)) {
    sum += static_cast<double>(float_sum);
    return;
  }
  uint32_t magnitudes = 0;
  MEZZO_UNROLL
  for (int i = 0; i < kCount; ++i) {
    uint32_t bits;
    reinterpret_bits(values[i], bits);
    magnitudes |= bits << 1;
  }
  if (magnitudes == 0) return;
  MEZZO_UNROLL
  for (int i = 0; i < kCount; ++i) add_square(values[i], sum);
}

template <int kCount>
__device__ void add_squares(const double (&values)[kCount], double& sum) {
  MEZZO_UNROLL
  for (int i = 0; i < kCount; ++i) add_square(values[i], sum);
}

/// A chunk of a gradient as vectors, and the elements before and after them.
template <class Stored>
struct AlignedChunk {
  using Vector = GradVector<Stored>;
  static constexpr int kSize = kGradVectorSize<Stored>;

  Stored* data;
  int64_t num_head;  ///< elements before the first vector
  int64_t num_vectors;
  int64_t num_scalars;  ///< elements before and after the vectors

  __device__ AlignedChunk(void* tensor, int64_t begin, int64_t end)
      : data(static_cast<Stored*>(tensor) + begin) {
    const int64_t head = elements_before_vectors(data, sizeof(Stored), kSize);
    num_head = head < end - begin ? head : end - begin;
    num_vectors = (end - begin - num_head) / kSize;
    num_scalars = end - begin - num_vectors * kSize;
  }
  __device__ Vector* vectors() const { return reinterpret_cast<Vector*>(data + num_head); }
  __device__ Stored& scalar(int64_t i) const {
    return data[i < num_head ? i : i + num_vectors * kSize];
  }
};

/// Calls `visit` with arrays of this thread's vectors, and with each of its other elements.
template <class Stored, class Visit>
__device__ void for_each_in_thread(const AlignedChunk<Stored>& chunk, int thread, int threads,
                                   Visit& visit) {
  using Vector = GradVector<Stored>;
  const Vector* const vectors = chunk.vectors();
  int64_t i = thread;
  for (; i + int64_t{kUnroll - 1} * threads < chunk.num_vectors; i += int64_t{kUnroll} * threads) {
    Vector loaded[kUnroll];
    MEZZO_UNROLL
    for (int k = 0; k < kUnroll; ++k) loaded[k] = vectors[i + int64_t{k} * threads];
    visit(loaded);
  }
  for (; i < chunk.num_vectors; i += threads) {
    const Vector loaded[1] = {vectors[i]};
    visit(loaded);
  }
  for (i = thread; i < chunk.num_scalars; i += threads) visit(chunk.scalar(i));
}

/// Accumulates a thread's partial result.
template <class Element>
class ThreadGradStats {
 public:
  using Format = FloatFormat<Element>;
  using Stored = typename Format::Stored;
  using Vector = GradVector<Stored>;
  static constexpr int kSize = kGradVectorSize<Stored>;

  template <int kVectors>
  __device__ void operator()(const Vector (&vectors)[kVectors]) {
    typename Format::opmath_t values[kVectors * kSize];
    MEZZO_UNROLL
    for (int i = 0; i < kVectors * kSize; ++i) {
      const typename Format::Bits bits = vectors[i / kSize].element[i % kSize];
      Format::to_opmath(bits, values[i]);
      update_max_abs<Format>(bits, max_bits_);
    }
    add_squares(values, norm_sq_);
  }
  __device__ void operator()(Stored stored) {
    const typename Format::Bits bits = stored;
    typename Format::opmath_t value;
    Format::to_opmath(bits, value);
    add_square(value, norm_sq_);
    update_max_abs<Format>(bits, max_bits_);
  }
  __device__ PartialGradStats partial() const {
    PartialGradStats result;
    result.norm_sq = norm_sq_;
    set_max_abs<Format>(max_bits_, result);
    return result;
  }

 private:
  double norm_sq_ = 0;
  typename Format::Bits max_bits_ = 0;
};

/// __shfl_down_sync of a partial result.
__device__ inline PartialGradStats shuffle_down(const PartialGradStats& partial, int lanes) {
  constexpr unsigned kAll = 0xFFFFFFFFU;
  const auto max_double = static_cast<unsigned long long>(partial.max_double);
  return {__shfl_down_sync(kAll, partial.norm_sq, lanes), __shfl_down_sync(kAll, max_double, lanes),
          __shfl_down_sync(kAll, partial.max_float, lanes)};
}

/// Returns the merged partial results of the block to thread 0.
template <int kThreads>
__device__ PartialGradStats merge_block(PartialGradStats partial) {
  constexpr int kWarps = kThreads / 32;
  using WarpPartials = PartialGradStats[kWarps];
  MEZZO_SHARED(WarpPartials, warp_partials);
  for (int lanes = 16; lanes > 0; lanes /= 2) partial.merge(shuffle_down(partial, lanes));
  if (threadIdx.x % 32 == 0) warp_partials[threadIdx.x / 32] = partial;
  __syncthreads();
  if (threadIdx.x >= 32) return partial;
  partial = threadIdx.x < kWarps ? warp_partials[threadIdx.x] : PartialGradStats();
  for (int lanes = 16; lanes > 0; lanes /= 2) partial.merge(shuffle_down(partial, lanes));
  return partial;
}

template <class Element>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(kGradThreads)
    grad_stats_kernel(MEZZO_GRID_CONSTANT(GradListMetadata) metadata, PartialGradStats* partials) {
  using Stored = typename FloatFormat<Element>::Stored;
  const auto chunk = metadata.get_chunk(blockIdx.x);
  ThreadGradStats<Element> thread_stats;
  for_each_in_thread(AlignedChunk<Stored>(chunk.data, chunk.begin, chunk.end),
                     static_cast<int>(threadIdx.x), kGradThreads, thread_stats);
  const PartialGradStats merged = merge_block<kGradThreads>(thread_stats.partial());
  if (threadIdx.x == 0) partials[chunk.first_partial + chunk.chunk_in_tensor] = merged;
}

/// Merges the partial results of all blocks. One block.
template <int kThreads>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(kThreads)
    merge_grad_stats_kernel(const PartialGradStats* partials, int64_t count, const float* inv_scale,
                            float* found_inf, double* norm_sq, double* max_abs) {
  PartialGradStats thread_stats;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) thread_stats.merge(partials[i]);
  const PartialGradStats total = merge_block<kThreads>(thread_stats);
  if (threadIdx.x != 0) return;
  const FinalGradStats result(total, *inv_scale);
  *found_inf = result.found_inf ? 1.0F : 0.0F;
  *norm_sq = result.norm_sq;
  *max_abs = result.max_abs;
}

template <class Element>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(kGradThreads)
    unscale_kernel(MEZZO_GRID_CONSTANT(GradListMetadata) metadata, const float* inv_scale,
                   float* found_inf) {
  using Format = FloatFormat<Element>;
  using Stored = typename Format::Stored;
  const auto tensor_chunk = metadata.get_chunk(blockIdx.x);
  const AlignedChunk<Stored> chunk(tensor_chunk.data, tensor_chunk.begin, tensor_chunk.end);
  const UnscaleFunctor<Format, typename Format::opmath_t> functor{
      static_cast<typename Format::opmath_t>(*inv_scale)};
  uint32_t nonfinite = 0;
  const auto unscale = [&](Stored& stored) {
    typename Format::Bits bits = stored;
    functor(bits, nonfinite);
    stored = static_cast<Stored>(bits);
  };
  for (int64_t i = threadIdx.x; i < chunk.num_vectors; i += blockDim.x) {
    auto vector = chunk.vectors()[i];
    MEZZO_UNROLL
    for (Stored& stored : vector.element) unscale(stored);
    chunk.vectors()[i] = vector;
  }
  for (int64_t i = threadIdx.x; i < chunk.num_scalars; i += blockDim.x) unscale(chunk.scalar(i));
  // All blocks that find an inf or NaN write 1: no atomic is needed.
  const bool is_nonfinite = __syncthreads_or(nonfinite != 0) != 0;
  if (is_nonfinite && threadIdx.x == 0) *found_inf = 1.0F;
}

}  // namespace detail::cuda
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
