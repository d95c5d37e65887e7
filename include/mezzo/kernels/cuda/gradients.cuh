/// \file
/// The kernels of gradients. One pass over all gradients unscales and checks them. One read of them
/// sums up: each block writes a partial result to its own place, and another block merges them in
/// order. There are no atomics: equal gradients give equal bits.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/cuda/device.h>
#include <mezzo/kernels/grad_stats_partial.h>
#include <mezzo/kernels/multi_tensor_metadata.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail::cuda {

inline constexpr int kGradThreads = 512;
inline constexpr int kMergeThreads = 1024;

/// Elements that one block reads: eight packs of 16 bytes for each thread.
template <class Element>
inline constexpr int kGradElementsPerBlock = kGradThreads * 16 * 8 / int{sizeof(Element)};

/// The number of packs that a thread reads at once.
inline constexpr int kUnroll = 4;

/// The largest number of elements whose squares are summed in float.
inline constexpr int kMaxFloat32Squares = kUnroll * GradientPack<uint16_t>::kSize;

/// Returns whether a float sum of squares of finite numbers is accurate: nothing overflowed, and
/// the squares below 2^-126 lost less than the rounding of the rest.
__device__ inline bool is_accurate(float sum) { return sum >= 0x1p-102F && sum <= 0x1p127F; }

/// Adds the squares of `values`. They are summed in float, within gamma(n) = n u / (1 - n u) of
/// their sum, u = 2^-24; or in double if float is too narrow (inf, NaN, very large and very small
/// numbers, which are rare).
template <int kCount>
__device__ void add_squares(const float (&values)[kCount], double& sum) {
  float own = 0;
  MEZZO_UNROLL
  for (int i = 0; i < kCount; ++i) ScalarVec<float>::fma(values[i], values[i], own, own);
  if (is_accurate(own)) {
    sum += static_cast<double>(own);
    return;
  }
  uint32_t all = 0;
  MEZZO_UNROLL
  for (int i = 0; i < kCount; ++i) {
    uint32_t bits;
    reinterpret_bits(values[i], bits);
    all |= bits << 1;
  }
  if (all == 0) return;
  MEZZO_UNROLL
  for (int i = 0; i < kCount; ++i) add_square(values[i], sum);
}

template <int kCount>
__device__ void add_squares(const double (&values)[kCount], double& sum) {
  MEZZO_UNROLL
  for (int i = 0; i < kCount; ++i) add_square(values[i], sum);
}

/// A slice of a gradient as packs, with the elements before and after them.
template <class Stored>
struct PackedSlice {
  using Pack = GradientPack<Stored>;

  Stored* data;
  int64_t before;  ///< number of elements before the first address that a pack may have
  int64_t packs;
  int64_t rest;  ///< number of elements before and after the packs

  __device__ PackedSlice(void* memory, int64_t begin, int64_t end)
      : data(static_cast<Stored*>(memory) + begin) {
    const auto beyond = reinterpret_cast<uintptr_t>(data) % sizeof(Pack) / sizeof(Stored);
    const int64_t own = beyond == 0 ? 0 : Pack::kSize - static_cast<int64_t>(beyond);
    before = own < end - begin ? own : end - begin;
    packs = (end - begin - before) / Pack::kSize;
    rest = end - begin - packs * Pack::kSize;
  }
  __device__ Pack* pack() const { return reinterpret_cast<Pack*>(data + before); }
  __device__ Stored& outside(int64_t i) const {
    return data[i < before ? i : i + packs * Pack::kSize];
  }
};

/// Calls `visit` on this thread's share of a slice: with arrays of packs, and with each element
/// outside of packs.
template <class Stored, class Visit>
__device__ void for_each_of_thread(const PackedSlice<Stored>& slice, int thread, int threads,
                                   Visit& visit) {
  using Pack = GradientPack<Stored>;
  const Pack* const pack = slice.pack();
  int64_t i = thread;
  for (; i + int64_t{kUnroll - 1} * threads < slice.packs; i += int64_t{kUnroll} * threads) {
    Pack values[kUnroll];
    MEZZO_UNROLL
    for (int k = 0; k < kUnroll; ++k) values[k] = pack[i + int64_t{k} * threads];
    visit(values);
  }
  for (; i < slice.packs; i += threads) {
    const Pack value[1] = {pack[i]};
    visit(value);
  }
  for (i = thread; i < slice.rest; i += threads) visit(slice.outside(i));
}

/// A thread's partial result.
template <class Element>
class ThreadGradStats {
 public:
  using Format = FloatFormat<Element>;
  using Stored = typename Format::Stored;
  using Pack = GradientPack<Stored>;

  template <int kPacks>
  __device__ void operator()(const Pack (&packs)[kPacks]) {
    typename Format::opmath_t values[kPacks * Pack::kSize];
    MEZZO_UNROLL
    for (int i = 0; i < kPacks * Pack::kSize; ++i) {
      const typename Format::Bits bits = packs[i / Pack::kSize].element[i % Pack::kSize];
      Format::to_opmath(bits, values[i]);
      keep_larger_magnitude<Format>(bits, largest_);
    }
    add_squares(values, norm_sq_);
  }
  __device__ void operator()(Stored stored) {
    const typename Format::Bits bits = stored;
    typename Format::opmath_t value;
    Format::to_opmath(bits, value);
    add_square(value, norm_sq_);
    keep_larger_magnitude<Format>(bits, largest_);
  }
  __device__ PartialGradStats partial() const {
    PartialGradStats result;
    result.norm_sq = norm_sq_;
    set_largest<Format>(largest_, result);
    return result;
  }

 private:
  double norm_sq_ = 0;
  typename Format::Bits largest_ = 0;
};

/// Returns the partial result of the lane `lanes` further on.
__device__ inline PartialGradStats shuffle_down(const PartialGradStats& partial, int lanes) {
  constexpr unsigned kAll = 0xFFFFFFFFU;
  const auto max_double = static_cast<unsigned long long>(partial.max_double);
  return {__shfl_down_sync(kAll, partial.norm_sq, lanes), __shfl_down_sync(kAll, max_double, lanes),
          __shfl_down_sync(kAll, partial.max_float, lanes)};
}

/// Merges the block's partial results; thread 0 gets the result.
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
    grad_stats_kernel(MEZZO_GRID_CONSTANT(GradListMetadata) table, PartialGradStats* partials) {
  using Stored = typename FloatFormat<Element>::Stored;
  const auto slice = table.get_chunk(blockIdx.x);
  ThreadGradStats<Element> share;
  for_each_of_thread(PackedSlice<Stored>(slice.data, slice.begin, slice.end),
                     static_cast<int>(threadIdx.x), kGradThreads, share);
  const PartialGradStats merged = merge_block<kGradThreads>(share.partial());
  if (threadIdx.x == 0) partials[slice.first_partial + slice.chunk_in_tensor] = merged;
}

/// Merges the partial results of all blocks. Runs as one block.
template <int kThreads>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(kThreads)
    merge_grad_stats_kernel(const PartialGradStats* partials, int64_t count, const float* inv_scale,
                            float* found_inf, double* norm_sq, double* max_abs) {
  PartialGradStats own;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) own.merge(partials[i]);
  const PartialGradStats total = merge_block<kThreads>(own);
  if (threadIdx.x != 0) return;
  const FinalGradStats finished(total, *inv_scale);
  *found_inf = finished.found_inf ? 1.0F : 0.0F;
  *norm_sq = finished.norm_sq;
  *max_abs = finished.max_abs;
}

/// Unscales and checks, in packs, but for the ends of a slice.
template <class Element>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(kGradThreads)
    unscale_kernel(MEZZO_GRID_CONSTANT(GradListMetadata) table, const float* inv_scale,
                   float* found_inf) {
  using Format = FloatFormat<Element>;
  using Stored = typename Format::Stored;
  const auto slice = table.get_chunk(blockIdx.x);
  const PackedSlice<Stored> packed(slice.data, slice.begin, slice.end);
  const UnscaleFunctor<Format, typename Format::opmath_t> multiply{
      static_cast<typename Format::opmath_t>(*inv_scale)};
  uint32_t nonfinite = 0;
  const auto unscale = [&](Stored& stored) {
    typename Format::Bits bits = stored;
    multiply(bits, nonfinite);
    stored = static_cast<Stored>(bits);
  };
  for (int64_t i = threadIdx.x; i < packed.packs; i += blockDim.x) {
    auto values = packed.pack()[i];
    MEZZO_UNROLL
    for (Stored& stored : values.element) unscale(stored);
    packed.pack()[i] = values;
  }
  for (int64_t i = threadIdx.x; i < packed.rest; i += blockDim.x) unscale(packed.outside(i));
  // Every block that finds an inf or NaN writes the same 1; no atomic is needed.
  const bool is_found = __syncthreads_or(nonfinite != 0) != 0;
  if (is_found && threadIdx.x == 0) *found_inf = 1.0F;
}

}  // namespace detail::cuda
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
