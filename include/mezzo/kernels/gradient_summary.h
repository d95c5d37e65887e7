#pragma once

#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/dense_memory.h>
#include <mezzo/kernels/devices.h>
#include <mezzo/kernels/gradient_element.h>
#include <mezzo/kernels/gradient_summary_loops.h>
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
#include <limits>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

// Summaries by ATen's kernels, for devices without kernels of mezzo (CUDA without the target
// mezzo::cuda).

/// Returns the norms of the gradients, one element each, in `dtype`. The gradients have one dtype,
/// which ATen's fast path requires.
inline at::Tensor foreach_norms(const std::vector<at::Tensor>& gradients, double order,
                                at::ScalarType dtype) {
  std::vector<at::Tensor> norms;
  for (const std::vector<at::Tensor>& same : by_dtype(gradients)) {
    for (at::Tensor& norm : at::_foreach_norm(same, order, dtype)) norms.push_back(std::move(norm));
  }
  return at::stack(norms);
}

/// Reads the gradients twice: once for the norm, and once for the largest magnitude, which decides
/// exactly whether a product overflows.
inline Verdict summarize_with_aten(std::vector<at::Tensor> gradients, const at::Tensor& inv_scale) {
  const at::ScalarType wide = inv_scale.is_mps() ? at::kFloat : at::kDouble;
  const auto options = inv_scale.options();
  std::erase_if(gradients, [](const at::Tensor& gradient) { return gradient.numel() == 0; });
  if (gradients.empty()) {
    return {inv_scale, at::zeros({}, options.dtype(at::kFloat)), at::zeros({}, options.dtype(wide)),
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
  return {inv_scale, found_inf.to(at::kFloat), at::where(found_inf, max_abs, norms.square().sum()),
          max_abs};
}

/// Reads dense gradients of one device once, writes nothing to them, and does not wait:
///
///   GradientRead read(inv_scale);
///   for (const at::Tensor& gradient : gradients) read.add(gradient);
///   const Verdict verdict = read.finish();
///
/// Gradients are float, double, bfloat16 or half, of any strides, offsets and sizes, and must stay
/// alive until `finish`. Squares are summed in double, in an order that depends on the sizes, and
/// on which gradients lie next to each other in one buffer, not on threads or (on the CPU) the
/// instruction set. CUDA's kernels add up to 32 squares of
/// floats and halves in float first, with a relative error of at most 2e-6. A double gradient above
/// 1e154 has a square beyond double: the sum is inf, and found_inf 0.
class GradientRead {
 public:
  explicit GradientRead(const at::Tensor& inv_scale)
      : inv_scale_(inv_scale), is_on_cpu_(has_cpu_loops(inv_scale.device())) {}

  /// Adds a gradient. Copies one that no loop can walk: with gaps, or with the negative bit.
  void add(const at::Tensor& gradient) {
    const bool is_dense = is_dense_memory(gradient);
    if (!is_dense || !is_on_cpu_) {
      tensors_.push_back(is_dense ? gradient : gradient.clone(at::MemoryFormat::Contiguous));
    }
    if (!is_on_cpu_) return;
    const at::Tensor& dense = is_dense ? gradient : tensors_.back();
    stretches_.add(dense, const_cast<void*>(dense.const_data_ptr()));
  }

  /// Returns the summary of all added gradients times inv_scale.
  Verdict finish() const {
    if (is_on_cpu_) return finish_on_cpu();
#ifdef MEZZO_WITH_CUDA
    if (has_cuda_kernels(inv_scale_.device())) {
      const Verdict verdict = new_verdict();
      cuda::summarize_(tensors_, inv_scale_, verdict.found_inf, verdict.sum_of_squares,
                       verdict.max_abs);
      return verdict;
    }
#endif
    return summarize_with_aten(tensors_, inv_scale_);
  }

 private:
  Verdict new_verdict() const {
    const auto options = at::TensorOptions().device(inv_scale_.device());
    const auto wide = options.dtype(at::kDouble);
    return {inv_scale_, at::empty({}, options.dtype(at::kFloat)), at::empty({}, wide),
            at::empty({}, wide)};
  }

  /// Merges the partial results of chunks in the order of the chunks.
  Verdict finish_on_cpu() const {
    const std::vector<Stretch>& stretches = stretches_.all();
    WorkChunks chunks(kSummaryChunk);
    for (std::size_t i = 0; i < stretches.size(); ++i) chunks.add(i, stretches[i].count);
    std::vector<GradientPartial> of_chunk(chunks.size());
    chunks.for_each([&](std::size_t i, const WorkChunks::Chunk& chunk) {
      const Stretch& stretch = stretches[chunk.item];
      const SummaryLoop loop = summary_loop(stretch.dtype, best_isa());
      loop(stretch.at(chunk.begin), chunk.count, of_chunk[i]);
    });
    GradientPartial total;
    for (const GradientPartial& partial : of_chunk) total.merge(partial);
    const FinishedSummary finished(total, *inv_scale_.const_data_ptr<float>());
    Verdict verdict = new_verdict();
    *verdict.found_inf.mutable_data_ptr<float>() = finished.found_inf ? 1.0F : 0.0F;
    *verdict.sum_of_squares.mutable_data_ptr<double>() = finished.sum_of_squares;
    *verdict.max_abs.mutable_data_ptr<double>() = finished.max_abs;
    return verdict;
  }

  at::Tensor inv_scale_;
  bool is_on_cpu_;
  std::vector<at::Tensor> tensors_;  // on the CPU the copies alone
  Stretches stretches_;              // on the CPU
};

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

/// Reads gradients of one device, after checking all of them.
inline Verdict summarize_gradients(const std::vector<at::Tensor>& gradients,
                                   const at::Tensor& inv_scale) {
  check_summary_arguments(gradients, inv_scale);
  GradientRead read(inv_scale);
  for (const at::Tensor& gradient : gradients) read.add(gradient);
  return read.finish();
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
