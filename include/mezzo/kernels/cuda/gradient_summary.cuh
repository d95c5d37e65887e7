/// \file
/// One read of all gradients on CUDA: each block leaves a partial result in a place of its own, and
/// one more block merges them in their order. No atomics: the same gradients give the same bits.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/gradient_summary_partial.h>
#include <mezzo/kernels/gradient_summary_share.h>
#include <mezzo/kernels/gradient_summary_table.h>

#include <cuda_runtime.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail::cuda {

inline constexpr int kSummaryThreads = 512;
inline constexpr int kFinishThreads = 1024;

/// What one block reads: eight packs of 16 bytes a thread.
template <class Element>
inline constexpr int64_t kSummaryBlock =
    int64_t{kSummaryThreads} * 16 * 8 / int64_t{sizeof(Element)};

template <class Word>
__device__ Word shuffle_down(Word word, int lanes) {
  return __shfl_down_sync(0xFFFFFFFFU, word, lanes);
}

/// The partial result of the lane `lanes` further on.
__device__ inline GradientPartial shuffle_down(const GradientPartial& partial, int lanes) {
  GradientPartial other;
  other.sum_of_squares = shuffle_down(partial.sum_of_squares, lanes);
  other.max_double = shuffle_down(static_cast<unsigned long long>(partial.max_double), lanes);
  other.max_float = shuffle_down(partial.max_float, lanes);
  return other;
}

__device__ inline StatisticsPartial shuffle_down(const StatisticsPartial& partial, int lanes) {
  StatisticsPartial other;
  other.summary = shuffle_down(partial.summary, lanes);
  other.zeros = shuffle_down(static_cast<long long>(partial.zeros), lanes);
  other.underflows = shuffle_down(static_cast<long long>(partial.underflows), lanes);
  other.scaled_underflows = shuffle_down(static_cast<long long>(partial.scaled_underflows), lanes);
  other.first_bad_gradient =
      shuffle_down(static_cast<long long>(partial.first_bad_gradient), lanes);
  other.first_bad_element = shuffle_down(static_cast<long long>(partial.first_bad_element), lanes);
  return other;
}

/// The block's partial results as one, in thread 0. Shared memory is raw, since a partial result
/// begins with values of its own.
template <class Partial, int kThreads>
__device__ Partial merge_block(Partial partial) {
  constexpr int kWarps = kThreads / 32;
  __shared__ alignas(Partial) unsigned char of_warps[kWarps * sizeof(Partial)];
  auto* const of_warp = reinterpret_cast<Partial*>(of_warps);
  for (int lanes = 16; lanes > 0; lanes /= 2) partial.merge(shuffle_down(partial, lanes));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = partial;
  __syncthreads();
  if (threadIdx.x >= 32) return partial;
  if (threadIdx.x < kWarps) {
    partial = of_warp[threadIdx.x];
  } else {
    partial = Partial();
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) partial.merge(shuffle_down(partial, lanes));
  return partial;
}

template <class Element, class Table>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(kSummaryThreads)
    summary_kernel(const __grid_constant__ PagedTable<Table> table, GradientPartial* partials) {
  using Stored = typename FloatFormat<Element>::Stored;
  const SummarySlice slice = table.slice_of(blockIdx.x);
  const auto* const data = static_cast<const Stored*>(slice.data) + slice.begin;
  SummaryShare<Element> share;
  visit_share(data, slice.end - slice.begin, static_cast<int>(threadIdx.x), kSummaryThreads, share);
  const GradientPartial merged = merge_block<GradientPartial, kSummaryThreads>(share.partial());
  if (threadIdx.x == 0) partials[slice.partial] = merged;
}

template <class Element, class Table>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(kSummaryThreads)
    statistics_kernel(const __grid_constant__ PagedTable<Table> table, const float* inv_scale,
                      double underflow, StatisticsPartial* partials) {
  using Stored = typename FloatFormat<Element>::Stored;
  const SummarySlice slice = table.slice_of(blockIdx.x);
  const auto* const data = static_cast<const Stored*>(slice.data) + slice.begin;
  StatisticsShare<Element> share({*inv_scale, underflow}, slice.gradient, slice.begin);
  visit_share(data, slice.end - slice.begin, static_cast<int>(threadIdx.x), kSummaryThreads, share);
  const StatisticsPartial merged = merge_block<StatisticsPartial, kSummaryThreads>(share.partial());
  if (threadIdx.x == 0) partials[slice.partial] = merged;
}

/// Where the finished numbers go; `zeros` and what follows only of statistics.
struct SummaryOutputs {
  float* found_inf;
  double* sum_of_squares;
  double* max_abs;
  int64_t* zeros;
  int64_t* underflows;
  int64_t* scaled_underflows;
  int64_t* first_bad;
};

__device__ inline void write_summary(const GradientPartial& total, float inv_scale,
                                     const SummaryOutputs& outputs) {
  const FinishedSummary finished(total, inv_scale);
  *outputs.found_inf = finished.found_inf ? 1.0F : 0.0F;
  *outputs.sum_of_squares = finished.sum_of_squares;
  *outputs.max_abs = finished.max_abs;
}

__device__ inline void write_total(const GradientPartial& total, float inv_scale,
                                   const SummaryOutputs& outputs) {
  write_summary(total, inv_scale, outputs);
}

__device__ inline void write_total(const StatisticsPartial& total, float inv_scale,
                                   const SummaryOutputs& outputs) {
  write_summary(total.summary, inv_scale, outputs);
  *outputs.zeros = total.zeros;
  *outputs.underflows = total.underflows;
  *outputs.scaled_underflows = total.scaled_underflows;
  outputs.first_bad[0] = total.first_bad_gradient;
  outputs.first_bad[1] = total.first_bad_element;
}

/// One block.
template <class Partial>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(kFinishThreads)
    finish_summary_kernel(const Partial* partials, int64_t count, const float* inv_scale,
                          const SummaryOutputs outputs) {
  Partial own;
  for (int64_t i = threadIdx.x; i < count; i += kFinishThreads) own.merge(partials[i]);
  const Partial total = merge_block<Partial, kFinishThreads>(own);
  if (threadIdx.x == 0) write_total(total, *inv_scale, outputs);
}

}  // namespace detail::cuda
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
