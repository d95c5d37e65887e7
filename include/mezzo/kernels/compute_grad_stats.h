#pragma once

#include <mezzo/base/detail/tensor_groups.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/dense_memory.h>
#include <mezzo/kernels/grad_stats.h>
#include <mezzo/kernels/grad_stats_cpu.h>
#include <mezzo/kernels/kernel_dispatch.h>
#include <mezzo/kernels/partial_grad_stats.h>
#include <mezzo/kernels/work_chunks.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <cstddef>
#include <limits>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Implementation by ATen ops, for devices without mezzo kernels. Reads the gradients twice: for
/// the norm, and for the largest magnitude, which decides exactly whether a product overflows.
inline GradStats compute_grad_stats_aten(at::TensorList gradients, const at::Tensor& inv_scale) {
  const at::ScalarType wide = inv_scale.is_mps() ? at::kFloat : at::kDouble;
  const at::Tensor factor = inv_scale.reshape({});
  const at::Tensor none = at::zeros({1}, factor.options().dtype(wide));
  std::vector<at::Tensor> max_products{none}, norms{none};
  for (const auto& group : group_tensors(gradients)) {
    std::vector<at::Tensor> tensors = group.value;
    std::erase_if(tensors, [](const at::Tensor& gradient) { return gradient.numel() == 0; });
    if (tensors.empty()) continue;
    const auto opmath_dtype = group.dtype == at::kDouble ? at::kDouble : at::kFloat;
    const auto scaled_norms = [&](double order, at::ScalarType dtype) {
      return at::stack(at::_foreach_norm(tensors, order, dtype)).mul(factor.to(dtype)).to(wide);
    };
    max_products.push_back(scaled_norms(std::numeric_limits<double>::infinity(), opmath_dtype));
    norms.push_back(scaled_norms(2.0, wide));
  }
  const at::Tensor products = at::cat(max_products);
  const at::Tensor found_inf = at::isfinite(products).all().logical_not();
  const at::Tensor max_abs = products.abs().max();
  return {inv_scale, found_inf.to(at::kFloat),
          at::where(found_inf, max_abs, at::cat(norms).square().sum()), max_abs};
}

/// CPU implementation. Merges the partial results of chunks in order.
inline void compute_grad_stats_cpu(const std::vector<ContiguousRange>& ranges,
                                   const GradStats& stats) {
  WorkChunks chunks(kGradStatsChunkElements);
  for (std::size_t i = 0; i < ranges.size(); ++i) chunks.add(i, ranges[i].numel);
  std::vector<PartialGradStats> partials(chunks.size());
  chunks.for_each([&](std::size_t i, const WorkChunks::Chunk& chunk) {
    const ContiguousRange& range = ranges[chunk.tensor_index];
    const GradStatsKernelFn kernel = get_grad_stats_kernel(range.dtype, best_isa());
    kernel(range.at(chunk.begin), chunk.numel, partials[i]);
  });
  PartialGradStats total;
  for (const PartialGradStats& partial : partials) total.merge(partial);
  const FinalGradStats result(total, *stats.inv_scale.const_data_ptr<float>());
  *stats.found_inf.mutable_data_ptr<float>() = result.found_inf ? 1.0F : 0.0F;
  *stats.norm_sq.mutable_data_ptr<double>() = result.norm_sq;
  *stats.max_abs.mutable_data_ptr<double>() = result.max_abs;
}

/// Like compute_grad_stats, for the memory of gradients.
inline GradStats compute_grad_stats_of_ranges(const std::vector<ContiguousRange>& ranges,
                                              const at::Tensor& inv_scale) {
  const auto options = at::TensorOptions().device(inv_scale.device());
  const auto wide = options.dtype(at::kDouble);
  GradStats stats{inv_scale, at::empty({}, options.dtype(at::kFloat)), at::empty({}, wide),
                  at::empty({}, wide)};
  if (kernel_backend(inv_scale.device()) == KernelBackend::cuda) {
    cuda_kernels()->compute_grad_stats_(ranges, stats);
  } else {
    compute_grad_stats_cpu(ranges, stats);
  }
  return stats;
}

/// Returns statistics of gradients times `inv_scale`, from one read of the gradients. Does not
/// synchronize with the host.
///
/// Squares are summed in float64, in an order that depends on the sizes and on which gradients are
/// adjacent in one buffer, not on the number of threads or the CPU's instruction set. CUDA kernels
/// first add up to 32 squares in float32, except of float64, with a relative error of at most 2e-6.
/// The square of a float64 gradient above 1e154 overflows: norm_sq is inf, and found_inf 0.
/// \param gradients  on one device; float32, float64, bfloat16 or float16. Those that are not dense
///   are copied.
/// \param inv_scale  a float32 of one element on that device
inline GradStats compute_grad_stats(at::TensorList gradients, const at::Tensor& inv_scale) {
  if (kernel_backend(inv_scale.device()) == KernelBackend::aten) {
    return compute_grad_stats_aten(gradients, inv_scale);
  }
  ContiguousRanges memory;
  std::vector<at::Tensor> copies;
  for (const at::Tensor& gradient : gradients) {
    const bool is_dense = is_dense_memory(gradient);
    if (!is_dense) copies.push_back(gradient.clone(at::MemoryFormat::Contiguous));
    const at::Tensor& dense = is_dense ? gradient : copies.back();
    memory.add(dense, const_cast<void*>(dense.const_data_ptr()));
  }
  return compute_grad_stats_of_ranges(memory.ranges(), inv_scale);
}

/// Sets `found_inf`, a float32 of one element, to 1 if a gradient is inf or NaN. All tensors are on
/// one device.
inline void update_found_inf_(const std::vector<at::Tensor>& gradients, at::Tensor& found_inf) {
  const GradStats stats = compute_grad_stats(gradients, at::ones_like(found_inf));
  found_inf.copy_(at::maximum(found_inf, stats.found_inf.reshape_as(found_inf)));
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
