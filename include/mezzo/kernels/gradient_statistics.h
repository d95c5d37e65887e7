#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/dense_gradients.h>
#include <mezzo/kernels/gradient_element.h>
#include <mezzo/kernels/gradient_summary.h>
#include <mezzo/kernels/gradient_summary_loops.h>
#include <mezzo/kernels/which_kernels.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

// The richer read of gradients, which says how many underflow and which is the first bad one. Apart
// from the summary: its loops are the largest, and training alone does not need them.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// What a richer read gives.
struct GradientStatistics {
  GradientSummary summary;
  at::Tensor zeros;              ///< int64: gradients that are 0
  at::Tensor underflows;         ///< int64: not 0, but a product that the low-precision dtype loses
  at::Tensor scaled_underflows;  ///< int64: the same of the gradients as they lie, still scaled
  at::Tensor first_bad;          ///< int64 {which, element}: the first product that is inf or NaN
                                 ///< in the order of the list, then of memory; or {-1, -1}
};

namespace detail {

/// Lane counts of the richer read.
template <class Element, class Lanes>
struct StatisticsAccumulator {
  using Format = typename Lanes::Format;
  StatisticsElement<Format, typename Lanes::Value, typename Lanes::Bits> element;
  typename Lanes::Bits zeros{};
  typename Lanes::Bits underflows{};
  typename Lanes::Bits scaled_underflows{};

  C10_ALWAYS_INLINE explicit StatisticsAccumulator(const StatisticsQuery& query) {
    Lanes::broadcast(static_cast<typename Format::Value>(query.inv_scale), element.inv_scale);
    element.set_underflow(query.underflow);
  }
  C10_ALWAYS_INLINE int64_t add(const typename Format::Stored* data, int64_t begin, int64_t count) {
    int64_t i = begin;
    for (; i + Lanes::kWidth <= count; i += Lanes::kWidth) {
      typename Lanes::Bits bits;
      Lanes::load(data + i, bits);
      element(bits, zeros, underflows, scaled_underflows);
    }
    return i;
  }
  C10_ALWAYS_INLINE void finish(StatisticsPartial& partial) const {
    partial.zeros += sum_of_lanes(zeros);
    partial.underflows += sum_of_lanes(underflows);
    partial.scaled_underflows += sum_of_lanes(scaled_underflows);
  }

 private:
  C10_ALWAYS_INLINE static int64_t sum_of_lanes(const typename Lanes::Bits& lanes) {
    typename Format::Bits each[Lanes::kWidth];
    unpack(lanes, each);
    int64_t sum = 0;
    for (const auto lane : each) sum += static_cast<int64_t>(lane);
    return sum;
  }
};

template <class Element, class Lanes>
struct StatisticsKernel {
  C10_ALWAYS_INLINE static void run(const void* data, int64_t count, const StatisticsQuery& query,
                                    StatisticsPartial& partial) {
    SummaryKernel<Element, Lanes>::run(data, count, partial.summary);
    const auto* stored = static_cast<const typename Lanes::Format::Stored*>(data);
    StatisticsAccumulator<Element, Lanes> many(query);
    const int64_t done = many.add(stored, 0, count);
    many.finish(partial);
    StatisticsAccumulator<Element, ScalarLanes<Element>> one(query);
    one.add(stored, done, count);
    one.finish(partial);
    if (!FinishedSummary(partial.summary, query.inv_scale).found_inf) return;
    for (int64_t i = 0; i < count && partial.first_bad_element < 0; ++i) {
      typename Lanes::Format::Bits bits;
      ScalarLanes<Element>::load(stored + i, bits);
      if (one.element.is_bad(bits)) partial.first_bad_element = i;
    }
  }
};

using StatisticsLoop = void (*)(const void* data, int64_t count, const StatisticsQuery& query,
                                StatisticsPartial& partial);

template <class Element>
StatisticsLoop statistics_loop(CpuIsa isa) {
  return cpu_kernel<StatisticsKernel, Element>(isa);
}

inline StatisticsLoop statistics_loop(at::ScalarType dtype, CpuIsa isa) {
  return for_gradient_dtype(
      dtype, [isa]<class Element>(Element) { return statistics_loop<Element>(isa); });
}

// Held by mezzo::compiled (mezzo/optim/compiled.h).
#define MEZZO_COMPILED_STATISTICS(EXTERN)                            \
  EXTERN template StatisticsLoop statistics_loop<float>(CpuIsa);     \
  EXTERN template StatisticsLoop statistics_loop<double>(CpuIsa);    \
  EXTERN template StatisticsLoop statistics_loop<c10::Half>(CpuIsa); \
  EXTERN template StatisticsLoop statistics_loop<c10::BFloat16>(CpuIsa);

#ifdef MEZZO_LEFT_TO_LIBRARY
MEZZO_COMPILED_STATISTICS(extern)
#endif

inline std::vector<StatisticsPartial> statistics_cpu(const std::vector<SummaryStretch>& stretches,
                                                     const StatisticsQuery& query) {
  const auto work = [&](const SummaryStretch& stretch, const WorkChunks::Chunk& chunk,
                        StatisticsPartial& partial) {
    statistics_loop(stretch.dtype, best_isa())(stretch.data + chunk.begin * stretch.element_size,
                                               chunk.count, query, partial);
    if (partial.first_bad_element < 0) return;
    partial.first_bad_gradient = static_cast<int64_t>(chunk.item);
    partial.first_bad_element += chunk.begin;
  };
  return summarize_stretches<StatisticsPartial>(stretches, work);
}

struct AtenCounts {
  at::Tensor zeros;
  at::Tensor underflows;
  at::Tensor scaled_underflows;
  at::Tensor first_bad;
};

/// Several kernels a tensor: a diagnosis, not a step's work.
inline AtenCounts count_with_aten(const std::vector<at::Tensor>& gradients,
                                  const at::Tensor& inv_scale, double underflow) {
  const auto count = inv_scale.options().dtype(at::kLong);
  AtenCounts counts{at::zeros({}, count), at::zeros({}, count), at::zeros({}, count),
                    at::full({2}, -1, count)};
  const at::Tensor factor = inv_scale.reshape({});
  for (std::size_t i = gradients.size(); i-- > 0;) {  // backwards: the first bad one stays
    if (gradients[i].numel() == 0) continue;
    // In the order of memory, whatever the strides.
    const at::Tensor stored = gradients[i].as_strided({gradients[i].numel()}, {1});
    const bool is_double = stored.scalar_type() == at::kDouble;
    const at::Tensor value = is_double ? stored : stored.to(at::kFloat);
    const at::Tensor product = value.mul(is_double ? factor.to(at::kDouble) : factor);
    const at::Tensor is_not_zero = value.ne(0);
    counts.zeros.add_(is_not_zero.logical_not().sum());
    counts.underflows.add_(product.abs().le(underflow).logical_and(is_not_zero).sum());
    counts.scaled_underflows.add_(value.abs().le(underflow).logical_and(is_not_zero).sum());
    const at::Tensor is_bad = at::isfinite(product).logical_not();
    const at::Tensor found = at::stack({at::full({}, static_cast<int64_t>(i), count),
                                        is_bad.to(at::kByte).argmax().to(at::kLong)});
    counts.first_bad = at::where(is_bad.any(), found, counts.first_bad);
  }
  return counts;
}

inline GradientStatistics new_statistics(at::Device device) {
  const auto count = at::TensorOptions().device(device).dtype(at::kLong);
  return {new_summary(device), at::empty({}, count), at::empty({}, count), at::empty({}, count),
          at::empty({2}, count)};
}

/// Half the smallest subnormal: non-zero magnitudes up to here round to zero, ties going to even.
inline double underflow_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return std::ldexp(1.0, -25);
    case at::kBFloat16:
      return std::ldexp(1.0, -134);
    case at::kFloat8_e5m2:
      return std::ldexp(1.0, -17);
    case at::kFloat8_e4m3fn:
      return std::ldexp(1.0, -10);
    case at::kFloat:
      return std::ldexp(1.0, -150);
    default:
      TORCH_CHECK(false, "low_precision is ", dtype,
                  "; underflows are counted for half, bfloat16, float8_e5m2, float8_e4m3fn and "
                  "float");
  }
}

/// The richer read: about twice the work on the same bytes. `low_precision` is the dtype whose
/// underflows are counted.
inline GradientStatistics gradient_statistics(const std::vector<at::Tensor>& gradients,
                                              const at::Tensor& inv_scale,
                                              at::ScalarType low_precision) {
  check_summary_arguments(gradients, inv_scale);
  const double underflow = underflow_of(low_precision);
  const DenseGradients dense(gradients);
#ifdef MEZZO_WITH_CUDA
  if (has_cuda_kernels(inv_scale.device())) {
    const GradientStatistics statistics = new_statistics(inv_scale.device());
    const GradientSummary& summary = statistics.summary;
    cuda::statistics_(dense.tensors(), inv_scale, underflow,
                      {summary.found_inf, summary.sum_of_squares, summary.max_abs, statistics.zeros,
                       statistics.underflows, statistics.scaled_underflows, statistics.first_bad});
    return statistics;
  }
#endif
  if (!has_cpu_loops(inv_scale.device())) {
    const AtenSummary summary = summarize_with_aten(dense.tensors(), inv_scale);
    const AtenCounts counts = count_with_aten(dense.tensors(), inv_scale, underflow);
    return {{summary.found_inf, summary.sum_of_squares, summary.max_abs},
            counts.zeros,
            counts.underflows,
            counts.scaled_underflows,
            counts.first_bad};
  }
  const StatisticsQuery query{*inv_scale.const_data_ptr<float>(), underflow};
  const StatisticsPartial total = merged(statistics_cpu(summary_stretches(dense), query));
  GradientStatistics statistics = new_statistics(inv_scale.device());
  statistics.summary = finish_summary_cpu(total.summary, inv_scale);
  statistics.zeros.fill_(total.zeros);
  statistics.underflows.fill_(total.underflows);
  statistics.scaled_underflows.fill_(total.scaled_underflows);
  auto* first_bad = statistics.first_bad.mutable_data_ptr<int64_t>();
  first_bad[0] = total.first_bad_gradient;
  first_bad[1] = total.first_bad_element;
  return statistics;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
