#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/dense_gradients.h>
#include <mezzo/kernels/gradient_summary_aten.h>
#include <mezzo/kernels/gradient_summary_cpu.h>
#include <mezzo/kernels/gradient_summary_partial.h>
#include <mezzo/kernels/table_memory.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <cstdint>
#include <vector>

#ifdef MEZZO_WITH_CUDA
#include <mezzo/kernels/cuda_launch.h>
#endif

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// What one read of the gradients of one device gives; one-element tensors on that device. All is
/// said of the gradients times inv_scale.
struct GradientSummary {
  at::Tensor found_inf;       ///< float: 1 if a product is inf or NaN, else 0
  at::Tensor sum_of_squares;  ///< double; when found_inf is 1, inf or NaN
  at::Tensor max_abs;         ///< double: the largest magnitude; NaN if there is a NaN
};

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

inline GradientSummary new_summary(at::Device device) {
  const auto options = at::TensorOptions().device(device);
  const auto wide = options.dtype(at::kDouble);
  return {at::empty({}, options.dtype(at::kFloat)), at::empty({}, wide), at::empty({}, wide)};
}

inline GradientStatistics new_statistics(at::Device device) {
  const auto count = at::TensorOptions().device(device).dtype(at::kLong);
  return {new_summary(device), at::empty({}, count), at::empty({}, count), at::empty({}, count),
          at::empty({2}, count)};
}

/// On the CPU: what the partial results of all gradients come to.
inline GradientSummary finish_summary_cpu(const GradientPartial& partial,
                                          const at::Tensor& inv_scale) {
  const FinishedSummary finished(partial, *inv_scale.const_data_ptr<float>());
  GradientSummary summary = new_summary(inv_scale.device());
  *summary.found_inf.mutable_data_ptr<float>() = finished.found_inf ? 1.0F : 0.0F;
  *summary.sum_of_squares.mutable_data_ptr<double>() = finished.sum_of_squares;
  *summary.max_abs.mutable_data_ptr<double>() = finished.max_abs;
  return summary;
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

inline void check_summary_arguments(const std::vector<at::Tensor>& gradients,
                                    const at::Tensor& inv_scale) {
  TORCH_CHECK(
      inv_scale.defined() && inv_scale.numel() == 1 && inv_scale.scalar_type() == at::kFloat,
      "inv_scale must be a float tensor of one element");
  for (const at::Tensor& gradient : gradients) {
    TORCH_CHECK(gradient.defined() && gradient.layout() == at::kStrided,
                "A gradient is undefined or not dense; leave it out, or give the values of a "
                "coalesced sparse one");
    TORCH_CHECK(gradient.device() == inv_scale.device(), "A gradient is on ", gradient.device(),
                " and inv_scale on ", inv_scale.device(), "; a summary is of one device");
    const at::ScalarType dtype = gradient.scalar_type();
    TORCH_CHECK(
        dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf,
        "A gradient has the dtype ", dtype, "; gradients are float, double, bfloat16 or half");
  }
}

inline std::vector<SummaryStretch> summary_stretches(const DenseGradients& gradients) {
  std::vector<SummaryStretch> stretches;
  stretches.reserve(gradients.tensors().size());
  for (const at::Tensor& tensor : gradients.tensors()) stretches.push_back(summary_stretch(tensor));
  return stretches;
}

/// Reads dense gradients (any of float, double, bfloat16, half; any strides, offsets, sizes) of one
/// device once; writes nothing to them; no host sync. Squares are summed in double, in an order
/// that depends on the sizes alone: not on threads, and on the CPU not on the instruction set.
/// A gradient of double above 1e154 has a square beyond double: inf, with found_inf 0.
/// On CUDA `memory` makes one launch of those that many tensors take.
inline GradientSummary summarize_gradients(const std::vector<at::Tensor>& gradients,
                                           const at::Tensor& inv_scale,
                                           [[maybe_unused]] TableMemory* memory = nullptr) {
  check_summary_arguments(gradients, inv_scale);
  const DenseGradients dense(gradients);
  if (inv_scale.is_cpu()) {
    return finish_summary_cpu(merged(summarize_cpu(summary_stretches(dense))), inv_scale);
  }
#ifdef MEZZO_WITH_CUDA
  if (inv_scale.is_cuda()) {
    const GradientSummary summary = new_summary(inv_scale.device());
    cuda::summarize_(dense.tensors(), inv_scale, summary.found_inf, summary.sum_of_squares,
                     summary.max_abs, memory);
    return summary;
  }
#endif
  const AtenSummary summary = summarize_with_aten(dense.tensors(), inv_scale);
  return {summary.found_inf, summary.sum_of_squares, summary.max_abs};
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
  if (inv_scale.is_cuda()) {
    const GradientStatistics statistics = new_statistics(inv_scale.device());
    const GradientSummary& summary = statistics.summary;
    cuda::statistics_(dense.tensors(), inv_scale, underflow,
                      {summary.found_inf, summary.sum_of_squares, summary.max_abs, statistics.zeros,
                       statistics.underflows, statistics.scaled_underflows, statistics.first_bad});
    return statistics;
  }
#endif
  if (!inv_scale.is_cpu()) {
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
