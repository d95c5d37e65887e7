#pragma once

#include <mezzo/base/detail/inference_mode.h>
#include <mezzo/base/detail/tensor_groups.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/dense_memory.h>
#include <mezzo/kernels/grad_stats.h>
#include <mezzo/kernels/grad_stats_cpu.h>
#include <mezzo/kernels/grad_stats_partial.h>
#include <mezzo/kernels/kernel_dispatch.h>
#include <mezzo/kernels/work_chunks.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <unordered_set>
#include <utility>
#include <vector>

// The passes over gradients of one device: one reads them and sums up, one unscales in place.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Summarises by ATen's kernels, on devices without kernels of mezzo (CUDA without the target
/// mezzo::cuda). Reads the gradients twice: once for the norm, and once for the largest magnitude,
/// which decides exactly whether a product overflows.
inline GradStats compute_grad_stats_aten(at::TensorList gradients, const at::Tensor& inv_scale) {
  const at::ScalarType wide = inv_scale.is_mps() ? at::kFloat : at::kDouble;
  const at::Tensor factor = inv_scale.reshape({});
  const at::Tensor none = at::zeros({1}, factor.options().dtype(wide));
  std::vector<at::Tensor> largest{none}, norms{none};  // of products
  for (const auto& group : group_tensors(gradients)) {
    std::vector<at::Tensor> same = group.value;
    std::erase_if(same, [](const at::Tensor& gradient) { return gradient.numel() == 0; });
    if (same.empty()) continue;
    const auto own = group.dtype == at::kDouble ? at::kDouble : at::kFloat;
    const auto norms_of = [&](double order, at::ScalarType dtype) {
      return at::stack(at::_foreach_norm(same, order, dtype)).mul(factor.to(dtype)).to(wide);
    };
    largest.push_back(norms_of(std::numeric_limits<double>::infinity(), own));
    norms.push_back(norms_of(2.0, wide));
  }
  const at::Tensor products = at::cat(largest);
  const at::Tensor found_inf = at::isfinite(products).all().logical_not();
  const at::Tensor max_abs = products.abs().max();
  return {inv_scale, found_inf.to(at::kFloat),
          at::where(found_inf, max_abs, at::cat(norms).square().sum()), max_abs};
}

/// Merges the partial results of chunks in the order of the chunks.
inline void compute_grad_stats_cpu(const std::vector<ContiguousRange>& stretches,
                                   const GradStats& stats) {
  WorkChunks chunks(kGradStatsChunkElements);
  for (std::size_t i = 0; i < stretches.size(); ++i) chunks.add(i, stretches[i].count);
  std::vector<PartialGradStats> of_chunk(chunks.size());
  chunks.for_each([&](std::size_t i, const WorkChunks::Chunk& chunk) {
    const ContiguousRange& stretch = stretches[chunk.tensor_index];
    const GradStatsKernelFn loop = get_grad_stats_kernel(stretch.dtype, best_isa());
    loop(stretch.at(chunk.begin), chunk.count, of_chunk[i]);
  });
  PartialGradStats total;
  for (const PartialGradStats& partial : of_chunk) total.merge(partial);
  const FinalGradStats finished(total, *stats.inv_scale.const_data_ptr<float>());
  *stats.found_inf.mutable_data_ptr<float>() = finished.found_inf ? 1.0F : 0.0F;
  *stats.norm_sq.mutable_data_ptr<double>() = finished.norm_sq;
  *stats.max_abs.mutable_data_ptr<double>() = finished.max_abs;
}

/// Returns the summary of gradients whose memory is known; see compute_grad_stats.
inline GradStats compute_grad_stats_of_ranges(const std::vector<ContiguousRange>& stretches,
                                              const at::Tensor& inv_scale) {
  const auto options = at::TensorOptions().device(inv_scale.device());
  const auto wide = options.dtype(at::kDouble);
  GradStats stats{inv_scale, at::empty({}, options.dtype(at::kFloat)), at::empty({}, wide),
                  at::empty({}, wide)};
  if (kernel_backend(inv_scale.device()) == KernelBackend::cuda) {
    cuda_kernels()->compute_grad_stats_(stretches, stats);
  } else {
    compute_grad_stats_cpu(stretches, stats);
  }
  return stats;
}

/// Reads gradients of one device once, writes nothing to them, and does not wait. Returns their
/// summary times `inv_scale`, a float of one element there.
///
/// Gradients are float, double, bfloat16 or half, of any strides, offsets and sizes; with gaps they
/// are copied. Squares are summed in double, in an order that depends on the sizes, and on which
/// gradients lie next to each other in one buffer, not on threads or (on the CPU) the instruction
/// set. CUDA's kernels add up to 32 squares of floats and halves in float first, with a relative
/// error of at most 2e-6. A double gradient above 1e154 has a square beyond double: the sum is inf,
/// and found_inf 0.
inline GradStats compute_grad_stats(at::TensorList gradients, const at::Tensor& inv_scale) {
  if (kernel_backend(inv_scale.device()) == KernelBackend::aten) {
    return compute_grad_stats_aten(gradients, inv_scale);
  }
  ContiguousRanges memory;
  std::vector<at::Tensor> copies;  // of those that no loop can walk
  for (const at::Tensor& gradient : gradients) {
    const bool is_dense = is_dense_memory(gradient);
    if (!is_dense) copies.push_back(gradient.clone(at::MemoryFormat::Contiguous));
    const at::Tensor& dense = is_dense ? gradient : copies.back();
    memory.add(dense, const_cast<void*>(dense.const_data_ptr()));
  }
  return compute_grad_stats_of_ranges(memory.all(), inv_scale);
}

/// Sets `found_inf`, a float of one element, to 1 if a gradient is inf or NaN, and leaves it
/// otherwise. Only reads. All on one device.
inline void check_nonfinite_(const std::vector<at::Tensor>& gradients, at::Tensor& found_inf) {
  const GradStats stats = compute_grad_stats(gradients, at::ones_like(found_inf));
  found_inf.copy_(at::maximum(found_inf, stats.found_inf.reshape_as(found_inf)));
}

/// Multiplies gradients by `inv_scale` in place. Returns whether a product is inf or NaN.
inline bool unscale_cpu_(const std::vector<ContiguousRange>& stretches, float inv_scale) {
  WorkChunks chunks(kThreadGrain);
  for (std::size_t i = 0; i < stretches.size(); ++i) chunks.add(i, stretches[i].count);
  return chunks.any([&](const WorkChunks::Chunk& chunk) {
    const ContiguousRange& stretch = stretches[chunk.tensor_index];
    void* const data = stretch.at(chunk.begin);
    return get_unscale_kernel(stretch.dtype, best_isa())(data, data, chunk.count, inv_scale);
  });
}

/// Unscales by ATen's kernel, which takes tensors of one dtype and tests values before it
/// multiplies.
inline void unscale_aten_(const std::vector<at::Tensor>& gradients, at::Tensor found_inf,
                          const at::Tensor& inv_scale) {
  for (const auto& [device, dtype, same] : group_tensors(gradients)) {
    at::_amp_foreach_non_finite_check_and_unscale_(same, found_inf, inv_scale);
  }
}

/// Returns whether no two tensors have the same storage.
inline bool have_distinct_storages(const std::vector<at::Tensor>& tensors) {
  std::unordered_set<const c10::StorageImpl*> known;
  known.reserve(tensors.size());
  return std::all_of(tensors.begin(), tensors.end(), [&known](const at::Tensor& tensor) {
    return tensor.has_storage() && known.insert(tensor.storage().unsafeGetStorageImpl()).second;
  });
}

/// Returns the tensors in their order, without repetitions.
inline std::vector<at::Tensor> unique_tensors(std::vector<at::Tensor> tensors) {
  std::unordered_set<const c10::TensorImpl*> known;
  std::erase_if(tensors, [&known](const at::Tensor& tensor) {
    return !known.insert(tensor.unsafeGetTensorImpl()).second;
  });
  return tensors;
}

/// Returns whether the host knows that `inv_scale` changes nothing.
inline bool is_one_on_cpu(const at::Tensor& inv_scale) {
  return kernel_backend(inv_scale.device()) == KernelBackend::cpu &&
         *inv_scale.const_data_ptr<float>() == 1.0F;
}

/// Returns whether `unscale_and_check_` accepts a gradient: no two of its elements share memory. A
/// factor of 1 writes nothing on the CPU.
inline bool can_unscale(const at::Tensor& gradient, const at::Tensor& inv_scale) {
  if (is_one_on_cpu(inv_scale)) return true;
  return at::has_internal_overlap(gradient) != at::MemOverlap::Yes;
}

/// Multiplies gradients by `inv_scale` in place; sets `found_inf` to 1 if a product is inf or NaN.
/// All on one device. A tensor that is the gradient of several parameters is multiplied once; two
/// tensors of one memory are each multiplied, one after the other, as in torch.
/// \throws c10::Error, before any write, for a gradient that can_unscale refuses
inline void unscale_and_check_(const std::vector<at::Tensor>& all, at::Tensor& found_inf,
                               const at::Tensor& inv_scale) {
  for (const at::Tensor& gradient : all) {
    TORCH_CHECK(can_unscale(gradient, inv_scale), "a gradient of the shape ", gradient.sizes(),
                " has elements that share memory, and cannot be multiplied in place; clone() it");
  }
  const KernelBackend backend = kernel_backend(found_inf.device());
  const bool may_overlap = !have_distinct_storages(all);
  const std::vector<at::Tensor> gradients = may_overlap ? unique_tensors(all) : all;
  if (may_overlap && gradients.size() > 1 && find_overlap(gradients)) {
    for (const at::Tensor& gradient : gradients) {
      unscale_and_check_({gradient}, found_inf, inv_scale);
    }
    return;
  }
  if (backend == KernelBackend::aten) {
    unscale_aten_(gradients, found_inf, inv_scale);
    return check_nonfinite_(gradients, found_inf);  // of the products
  }
  if (is_one_on_cpu(inv_scale)) return check_nonfinite_(gradients, found_inf);
  ContiguousRanges memory;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // (gradient that no loop can walk, its)
  for (const at::Tensor& gradient : gradients) {
    const bool is_dense = is_dense_memory(gradient);
    if (!is_dense) copies.emplace_back(gradient, gradient.clone(at::MemoryFormat::Contiguous));
    const at::Tensor& dense = is_dense ? gradient : copies.back().second;
    memory.add(dense, dense.mutable_data_ptr());
  }
  if (backend == KernelBackend::cuda) {
    cuda_kernels()->unscale_and_check_(memory.all(), found_inf, inv_scale);
  } else if (unscale_cpu_(memory.all(), *inv_scale.const_data_ptr<float>())) {
    found_inf.fill_(1.0);
  }
  for (const at::Tensor& gradient : gradients) bump_version(gradient);  // of copies again, below
  for (const auto& [gradient, copy] : copies) {
    const NoGradInferenceGuard no_graph(gradient.is_inference());
    gradient.copy_(copy);
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
