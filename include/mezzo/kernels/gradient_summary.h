#pragma once

#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/dense_gradients.h>
#include <mezzo/kernels/gradient_element.h>
#include <mezzo/kernels/gradient_summary_loops.h>
#include <mezzo/kernels/table_memory.h>
#include <mezzo/kernels/which_kernels.h>
#include <mezzo/kernels/work_chunks.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// One gradient's memory, to be read once.
struct SummaryStretch {
  const char* data;
  int64_t count;
  int64_t element_size;
  at::ScalarType dtype;
};

inline SummaryStretch summary_stretch(const at::Tensor& gradient) {
  return {static_cast<const char*>(gradient.const_data_ptr()), gradient.numel(),
          static_cast<int64_t>(gradient.element_size()), gradient.scalar_type()};
}

/// Reads all stretches; merges the partial results of their chunks in the order of the chunks.
inline GradientPartial summarize_cpu(const std::vector<SummaryStretch>& stretches) {
  WorkChunks chunks(kSummaryChunk);
  for (std::size_t i = 0; i < stretches.size(); ++i) chunks.add(i, stretches[i].count);
  std::vector<GradientPartial> of_chunk(chunks.size());
  chunks.for_each([&](std::size_t i) {
    const SummaryStretch& stretch = stretches[chunks[i].item];
    summary_loop(stretch.dtype, best_isa())(stretch.data + chunks[i].begin * stretch.element_size,
                                            chunks[i].count, of_chunk[i]);
  });
  GradientPartial total;
  for (const GradientPartial& partial : of_chunk) total.merge(partial);
  return total;
}

// The same questions asked of ATen's kernels, on devices for which mezzo has none of its own (CUDA
// without the target mezzo::cuda).

/// The norms of the gradients, one element each, in `dtype`. ATen's fast route wants one dtype.
inline at::Tensor foreach_norms(const std::vector<at::Tensor>& gradients, double order,
                                at::ScalarType dtype) {
  std::vector<at::Tensor> norms;
  for (const std::vector<at::Tensor>& same : by_dtype(gradients)) {
    for (at::Tensor& norm : at::_foreach_norm(same, order, dtype)) norms.push_back(std::move(norm));
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
  std::vector<at::Tensor> of_float, of_double;
  for (const at::Tensor& gradient : gradients) {
    (gradient.scalar_type() == at::kDouble ? of_double : of_float).push_back(gradient);
  }
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

namespace detail {

inline GradientSummary new_summary(at::Device device) {
  const auto options = at::TensorOptions().device(device);
  const auto wide = options.dtype(at::kDouble);
  return {at::empty({}, options.dtype(at::kFloat)), at::empty({}, wide), at::empty({}, wide)};
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
    return finish_summary_cpu(summarize_cpu(summary_stretches(dense)), inv_scale);
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

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
