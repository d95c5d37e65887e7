#pragma once

#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/dense_gradients.h>
#include <mezzo/kernels/gradient_element.h>
#include <mezzo/kernels/gradient_summary_cpu.h>
#include <mezzo/kernels/table_memory.h>
#include <mezzo/kernels/which_kernels.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

namespace detail {

// The same questions asked of ATen's kernels, on devices for which mezzo has none of its own (CUDA
// without the target mezzo::cuda).

/// The norms of the gradients, one element each, in `dtype`. ATen's fast route wants one dtype.
inline at::Tensor foreach_norms(std::vector<at::Tensor> gradients, double order,
                                at::ScalarType dtype) {
  std::vector<at::Tensor> norms;
  while (!gradients.empty()) {
    const at::ScalarType first = gradients.front().scalar_type();
    const auto rest = std::stable_partition(
        gradients.begin(), gradients.end(),
        [&](const at::Tensor& gradient) { return gradient.scalar_type() == first; });
    const at::TensorList same(gradients.data(), static_cast<std::size_t>(rest - gradients.begin()));
    for (at::Tensor& norm : at::_foreach_norm(same, order, dtype)) norms.push_back(std::move(norm));
    gradients.erase(gradients.begin(), rest);
  }
  return at::stack(norms);
}

struct AtenSummary {
  at::Tensor found_inf;
  at::Tensor sum_of_squares;
  at::Tensor max_abs;
};

/// Two reads: the norm says how large the gradients are together, and only the largest of them says
/// exactly whether a product overflows.
inline AtenSummary summarize_with_aten(std::vector<at::Tensor> gradients,
                                       const at::Tensor& inv_scale) {
  const at::ScalarType wide = inv_scale.is_mps() ? at::kFloat : at::kDouble;
  const auto options = inv_scale.options();
  std::erase_if(gradients, [](const at::Tensor& gradient) { return gradient.numel() == 0; });
  if (gradients.empty()) {
    return {at::zeros({}, options.dtype(at::kFloat)), at::zeros({}, options.dtype(wide)),
            at::zeros({}, options.dtype(wide))};
  }
  const auto doubles = std::stable_partition(
      gradients.begin(), gradients.end(),
      [](const at::Tensor& gradient) { return gradient.scalar_type() != at::kDouble; });
  const std::vector<at::Tensor> of_float(gradients.begin(), doubles);
  const std::vector<at::Tensor> of_double(doubles, gradients.end());
  const at::Tensor factor = inv_scale.reshape({});
  std::vector<at::Tensor> products;  // of the largest magnitudes, each in what it is computed in
  const double infinity = std::numeric_limits<double>::infinity();
  if (!of_float.empty()) {
    products.push_back(foreach_norms(of_float, infinity, at::kFloat).mul(factor).to(wide));
  }
  if (!of_double.empty()) {
    products.push_back(foreach_norms(of_double, infinity, at::kDouble).mul(factor.to(wide)));
  }
  const at::Tensor largest = at::cat(products);
  const at::Tensor norms = foreach_norms(gradients, 2.0, wide).mul(factor.to(wide));
  const at::Tensor found_inf = at::isfinite(largest).all().logical_not();
  const at::Tensor max_abs = largest.abs().max();
  return {found_inf.to(at::kFloat), at::where(found_inf, max_abs, norms.square().sum()), max_abs};
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

}  // namespace detail

/// What one read of the gradients of one device gives; one-element tensors on that device. All is
/// said of the gradients times inv_scale.
struct GradientSummary {
  at::Tensor found_inf;  ///< float: 1 if a product is inf or NaN, else 0
  /// Double; when found_inf is 1, inf or NaN. CUDA's kernels add up to 32 squares of floats and
  /// halves in float before they add in double, so that it is within 2e-6 of itself there.
  at::Tensor sum_of_squares;
  at::Tensor max_abs;  ///< double: the largest magnitude; NaN if there is a NaN
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
      "inv_scale is ", tensor_words(inv_scale), "; it should be float32 of one element");
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const at::Tensor& gradient = gradients[i];
    TORCH_CHECK(gradient.defined() && gradient.layout() == at::kStrided, "Gradient ", i, " is ",
                tensor_words(gradient),
                "; leave undefined ones out, and give the values of a coalesced sparse one");
    TORCH_CHECK(gradient.device() == inv_scale.device(), "Gradient ", i, " is on ",
                gradient.device(), " and inv_scale on ", inv_scale.device(),
                "; give the gradients of one device at a time");
    TORCH_CHECK(is_training_dtype(gradient.scalar_type()), "Gradient ", i, " is ",
                tensor_words(gradient), "; it should be of float32, float64, bfloat16 or float16");
  }
}

inline std::vector<SummaryStretch> summary_stretches(const DenseGradients& gradients) {
  std::vector<SummaryStretch> stretches;
  stretches.reserve(gradients.tensors().size());
  for (const at::Tensor& tensor : gradients.tensors()) stretches.push_back(summary_stretch(tensor));
  return stretches;
}

/// Reads dense gradients (any of float, double, bfloat16, half; any strides, offsets, sizes) of one
/// device once; writes nothing to them; no host sync. Squares are summed in double (see
/// GradientSummary for what CUDA does before), in an order
/// that depends on the sizes alone: not on threads, and on the CPU not on the instruction set.
/// A gradient of double above 1e154 has a square beyond double: inf, with found_inf 0.
/// On CUDA `memory` makes one launch of those that many tensors take.
inline GradientSummary summarize_gradients(const std::vector<at::Tensor>& gradients,
                                           const at::Tensor& inv_scale,
                                           [[maybe_unused]] TableMemory* memory = nullptr) {
  check_summary_arguments(gradients, inv_scale);
  const DenseGradients dense(gradients);
  if (has_cpu_loops(inv_scale.device())) {
    return finish_summary_cpu(merged(summarize_cpu(summary_stretches(dense))), inv_scale);
  }
#ifdef MEZZO_WITH_CUDA
  if (has_cuda_kernels(inv_scale.device())) {
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
