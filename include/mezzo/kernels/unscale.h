#pragma once

#include <mezzo/base/detail/inference_mode.h>
#include <mezzo/base/detail/tensor_groups.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/compute_grad_stats.h>
#include <mezzo/kernels/dense_memory.h>
#include <mezzo/kernels/kernel_dispatch.h>
#include <mezzo/kernels/unscale_cpu.h>
#include <mezzo/kernels/work_chunks.h>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>

#include <algorithm>
#include <cstddef>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// CPU implementation. Returns whether a product is inf or NaN.
inline bool unscale_cpu_(const std::vector<ContiguousRange>& ranges, float inv_scale) {
  WorkChunks chunks(kThreadGrain);
  for (std::size_t i = 0; i < ranges.size(); ++i) chunks.add(i, ranges[i].numel);
  return chunks.any([&](const WorkChunks::Chunk& chunk) {
    const ContiguousRange& range = ranges[chunk.tensor_index];
    void* const data = range.at(chunk.begin);
    return get_unscale_kernel(range.dtype, best_isa())(data, data, chunk.numel, inv_scale);
  });
}

/// Implementation by ATen's kernel, which takes tensors of one dtype and checks gradients, not
/// products.
inline void unscale_aten_(const std::vector<at::Tensor>& gradients, at::Tensor found_inf,
                          const at::Tensor& inv_scale) {
  for (const auto& [device, dtype, same] : group_tensors(gradients)) {
    at::_amp_foreach_non_finite_check_and_unscale_(same, found_inf, inv_scale);
  }
}

/// Returns whether no two tensors share a storage.
inline bool have_distinct_storages(const std::vector<at::Tensor>& tensors) {
  std::unordered_set<const c10::StorageImpl*> seen;
  seen.reserve(tensors.size());
  return std::all_of(tensors.begin(), tensors.end(), [&seen](const at::Tensor& tensor) {
    return tensor.has_storage() && seen.insert(tensor.storage().unsafeGetStorageImpl()).second;
  });
}

/// Returns whether `inv_scale` is a CPU tensor of the value 1.
inline bool is_one_on_cpu(const at::Tensor& inv_scale) {
  return kernel_backend(inv_scale.device()) == KernelBackend::cpu &&
         *inv_scale.const_data_ptr<float>() == 1.0F;
}

/// Returns whether `unscale_and_check_` accepts a gradient: its elements do not share memory, or
/// nothing is written since `inv_scale` is 1.
inline bool can_unscale(const at::Tensor& gradient, const at::Tensor& inv_scale) {
  if (is_one_on_cpu(inv_scale)) return true;
  return at::has_internal_overlap(gradient) != at::MemOverlap::Yes;
}

/// Multiplies gradients by `inv_scale` in place and sets `found_inf` to 1 if a product is inf or
/// NaN. All tensors are on one device. A tensor that occurs twice is multiplied once; distinct
/// tensors that share memory are multiplied one after the other, as in torch.
/// \throws c10::Error, before any write, unless can_unscale accepts every gradient
inline void unscale_and_check_(const std::vector<at::Tensor>& all, at::Tensor& found_inf,
                               const at::Tensor& inv_scale) {
  for (const at::Tensor& gradient : all) {
    TORCH_CHECK(can_unscale(gradient, inv_scale),
                "unsupported operation: more than one element of the written-to tensor refers to a "
                "single memory location: a gradient of shape ",
                gradient.sizes(), "; clone() it before unscaling");
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
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // (gradient that is not dense, copy)
  for (const at::Tensor& gradient : gradients) {
    const bool is_dense = is_dense_memory(gradient);
    if (!is_dense) copies.emplace_back(gradient, gradient.clone(at::MemoryFormat::Contiguous));
    const at::Tensor& dense = is_dense ? gradient : copies.back().second;
    memory.add(dense, dense.mutable_data_ptr());
  }
  if (backend == KernelBackend::cuda) {
    cuda_kernels()->unscale_and_check_(memory.ranges(), found_inf, inv_scale);
  } else if (unscale_cpu_(memory.ranges(), *inv_scale.const_data_ptr<float>())) {
    found_inf.fill_(1.0);
  }
  for (const at::Tensor& gradient : gradients) bump_version(gradient);
  for (const auto& [gradient, copy] : copies) {
    const NoGradInferenceGuard no_grad(gradient.is_inference());
    gradient.copy_(copy);
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
