/// \file
/// One read of all gradients on CUDA: each block leaves a partial result in a place of its own, and
/// one more block merges them in their order. No atomics: the same gradients give the same bits.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/cuda/device.h>
#include <mezzo/kernels/gradient_element.h>
#include <mezzo/kernels/gradient_table.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail::cuda {

inline constexpr int kSummaryThreads = 512;
inline constexpr int kFinishThreads = 1024;

/// What one block reads: eight packs of 16 bytes a thread.
template <class Element>
inline constexpr int64_t kSummaryBlock =
    int64_t{kSummaryThreads} * 16 * 8 / int64_t{sizeof(Element)};

/// How many packs a thread reads at once.
inline constexpr int kPacksAtOnce = 4;

/// Of so many elements at most the squares are summed in float.
inline constexpr int kSquaresInFloat = kPacksAtOnce * GradientPack<uint16_t>::kSize;

/// Whether a sum of squares in float is to be trusted, of finite numbers: nothing overflowed, and
/// what was lost of squares below 2^-126 is less than the roundings of the rest.
__device__ inline bool is_exact_enough(float sum) { return sum >= 0x1p-102F && sum <= 0x1p127F; }

/// Adds the squares of `values`, summed in float: within gamma(n) = n u / (1 - n u) of their sum, u
/// = 2^-24. In double where a float does not do, which is the rare case: inf, NaN, very large and
/// very small numbers.
template <int kCount>
__device__ void add_squares(const float (&values)[kCount], double& sum) {
  float own = 0;
  MEZZO_UNROLL
  for (int i = 0; i < kCount; ++i) ScalarLanes<float>::fma(values[i], values[i], own, own);
  if (is_exact_enough(own)) {
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

/// Calls `visit` on the elements of `data` that are `thread`'s among `threads`: with an array of
/// packs, the first one's index and how far the others lie apart; and with each element that is in
/// no pack, and its index.
template <class Stored, class Visit>
__device__ void visit_share(const Stored* data, int64_t count, int thread, int threads,
                            Visit& visit) {
  using Pack = GradientPack<Stored>;
  const bool is_aligned = reinterpret_cast<uintptr_t>(data) % sizeof(Pack) == 0;
  const int64_t packs = is_aligned ? count / Pack::kSize : 0;
  const auto* const pack = reinterpret_cast<const Pack*>(data);
  int64_t i = thread;
  for (; i + int64_t{kPacksAtOnce - 1} * threads < packs; i += int64_t{kPacksAtOnce} * threads) {
    Pack values[kPacksAtOnce];
    MEZZO_UNROLL
    for (int k = 0; k < kPacksAtOnce; ++k) values[k] = pack[i + int64_t{k} * threads];
    visit(values, i * Pack::kSize, threads * Pack::kSize);
  }
  for (; i < packs; i += threads) {
    const Pack value[1] = {pack[i]};
    visit(value, i * Pack::kSize, 0);
  }
  for (i = packs * Pack::kSize + thread; i < count; i += threads) visit(data[i], i);
}

/// What a thread gathers of its share.
template <class Element>
class SummaryShare {
 public:
  using Format = FloatFormat<Element>;
  using Stored = typename Format::Stored;
  using Pack = GradientPack<Stored>;

  template <int kPacks>
  __device__ void operator()(const Pack (&packs)[kPacks], int64_t /*index*/, int64_t /*stride*/) {
    typename Format::Value values[kPacks * Pack::kSize];
    MEZZO_UNROLL
    for (int i = 0; i < kPacks * Pack::kSize; ++i) {
      const typename Format::Bits bits = packs[i / Pack::kSize].element[i % Pack::kSize];
      Format::widen(bits, values[i]);
      keep_larger_magnitude<Format>(bits, largest_);
    }
    add_squares(values, sum_of_squares_);
  }
  __device__ void operator()(Stored stored, int64_t /*index*/) {
    const typename Format::Bits bits = stored;
    typename Format::Value value;
    Format::widen(bits, value);
    add_square(value, sum_of_squares_);
    keep_larger_magnitude<Format>(bits, largest_);
  }
  __device__ GradientPartial partial() const {
    GradientPartial result;
    result.sum_of_squares = sum_of_squares_;
    set_largest<Format>(largest_, result);
    return result;
  }

 private:
  double sum_of_squares_ = 0;
  typename Format::Bits largest_ = 0;
};

template <class Element>
class StatisticsShare {
 public:
  using Format = FloatFormat<Element>;
  using Value = typename Format::Value;
  using Bits = typename Format::Bits;
  using Stored = typename Format::Stored;

  /// `first_index` is what stands before the block's first element in its tensor.
  __device__ StatisticsShare(const StatisticsQuery& query, int32_t gradient, int64_t first_index)
      : first_index_(first_index) {
    partial_.first_bad_gradient = gradient;
    element_.inv_scale = static_cast<Value>(query.inv_scale);
    element_.set_underflow(query.underflow);
  }
  template <int kPacks>
  __device__ void operator()(const GradientPack<Stored> (&packs)[kPacks], int64_t index,
                             int64_t stride) {
    summary_(packs, index, stride);
    MEZZO_UNROLL
    for (int k = 0; k < kPacks; ++k) {
      MEZZO_UNROLL
      for (int lane = 0; lane < GradientPack<Stored>::kSize; ++lane) {
        count(packs[k].element[lane], index + k * stride + lane);
      }
    }
  }
  __device__ void operator()(Stored stored, int64_t index) {
    summary_(stored, index);
    count(stored, index);
  }
  __device__ StatisticsPartial partial() const {
    StatisticsPartial result = partial_;
    result.summary = summary_.partial();
    result.zeros = static_cast<int64_t>(zeros_);
    result.underflows = static_cast<int64_t>(underflows_);
    result.scaled_underflows = static_cast<int64_t>(scaled_underflows_);
    if (result.first_bad_element < 0) result.first_bad_gradient = -1;
    return result;
  }

 private:
  __device__ void count(Stored stored, int64_t index) {
    const Bits bits = stored;
    element_(bits, zeros_, underflows_, scaled_underflows_);
    if (partial_.first_bad_element < 0 && element_.is_bad(bits)) {
      partial_.first_bad_element = first_index_ + index;
    }
  }

  SummaryShare<Element> summary_;
  StatisticsElement<Format, Value, Bits> element_;
  Bits zeros_ = 0;
  Bits underflows_ = 0;
  Bits scaled_underflows_ = 0;
  StatisticsPartial partial_;
  int64_t first_index_;
};

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

/// The block's partial results as one, in thread 0.
template <class Partial, int kThreads>
__device__ Partial merge_block(Partial partial) {
  constexpr int kWarps = kThreads / 32;
  using OfWarps = Partial[kWarps];
  MEZZO_SHARED(OfWarps, of_warp);
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
    summary_kernel(MEZZO_ARGUMENT(PagedTable<Table>) table, GradientPartial* partials) {
  using Stored = typename FloatFormat<Element>::Stored;
  const SummarySlice slice = table.slice_of(blockIdx.x);
  const auto* const data = static_cast<const Stored*>(slice.data) + slice.begin;
  SummaryShare<Element> share;
  visit_share(data, slice.end - slice.begin, static_cast<int>(threadIdx.x), kSummaryThreads, share);
  const GradientPartial merged = merge_block<GradientPartial, kSummaryThreads>(share.partial());
  if (threadIdx.x == 0) partials[slice.partial] = merged;
}

template <class Element, class Table>
__attribute__((visibility("hidden"))) __global__ void __launch_bounds__(kSummaryThreads, 1)
    statistics_kernel(MEZZO_ARGUMENT(PagedTable<Table>) table, const float* inv_scale,
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

__device__ inline void write_total(const GradientPartial& total, float inv_scale,
                                   const SummaryOutputs& outputs) {
  const FinishedSummary finished(total, inv_scale);
  *outputs.found_inf = finished.found_inf ? 1.0F : 0.0F;
  *outputs.sum_of_squares = finished.sum_of_squares;
  *outputs.max_abs = finished.max_abs;
}

__device__ inline void write_total(const StatisticsPartial& total, float inv_scale,
                                   const SummaryOutputs& outputs) {
  write_total(total.summary, inv_scale, outputs);
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
