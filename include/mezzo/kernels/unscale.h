#pragma once

#include <mezzo/base/detail/inference_mode.h>
#include <mezzo/base/detail/tensor_groups.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/compute_grad_stats.h>
#include <mezzo/kernels/cpu_isa.h>
#include <mezzo/kernels/dense_memory.h>
#include <mezzo/kernels/grad_stats_cpu.h>
#include <mezzo/kernels/kernel_dispatch.h>
#include <mezzo/kernels/simd.h>
#include <mezzo/kernels/unscale_functor.h>
#include <mezzo/kernels/work_chunks.h>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <c10/core/ScalarType.h>
#include <c10/macros/Macros.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Unscales the whole vectors of elements [begin, count), and sets `found_inf` if a product is inf
/// or NaN. Returns the index of the first remaining element.
template <class Vec>
C10_ALWAYS_INLINE int64_t unscale_vectors(const typename Vec::Format::Stored* from,
                                          typename Vec::Format::Stored* to, int64_t begin,
                                          int64_t count, typename Vec::Format::opmath_t inv_scale,
                                          bool& found_inf) {
  UnscaleFunctor<typename Vec::Format, typename Vec::Value> unscale;
  Vec::broadcast(inv_scale, unscale.inv_scale);
  typename Vec::Mask nonfinite{};
  int64_t i = begin;
  for (; i + Vec::kWidth <= count; i += Vec::kWidth) {
    typename Vec::Bits bits;
    Vec::load(from + i, bits);
    unscale(bits, nonfinite);
    Vec::store(bits, to + i);
  }
  found_inf |= Vec::any(nonfinite);
  return i;
}

/// Writes from[i] * inv_scale to to[i] for `count` elements of any alignment; `to` may be `from`.
/// Returns whether a product is inf or NaN. inv_scale is rounded to float32, except for float64.
template <class Element, class Vec>
struct UnscaleKernel {
  C10_ALWAYS_INLINE static bool run(const void* from, void* to, int64_t count, double inv_scale) {
    const auto* source = static_cast<const typename Vec::Format::Stored*>(from);
    auto* target = static_cast<typename Vec::Format::Stored*>(to);
    const auto factor = static_cast<typename Vec::Format::opmath_t>(inv_scale);
    bool found_inf = false;
    const int64_t done = unscale_vectors<Vec>(source, target, 0, count, factor, found_inf);
    unscale_vectors<ScalarVec<Element>>(source, target, done, count, factor, found_inf);
    return found_inf;
  }
};

using UnscaleKernelFn = bool (*)(const void* from, void* to, int64_t count, double inv_scale);

template <class Element>
UnscaleKernelFn get_unscale_kernel(CpuIsa isa) {
  return kernel_for_isa<UnscaleKernel, Element>(isa);
}

inline UnscaleKernelFn get_unscale_kernel(at::ScalarType dtype, CpuIsa isa) {
  return dispatch_gradient_dtype(
      dtype, [isa]<class Element>(Element) { return get_unscale_kernel<Element>(isa); });
}

// Compiled by mezzo::compiled (mezzo/optim/compiled.h).
#define MEZZO_COMPILED_UNSCALE_KERNELS(EXTERN)                           \
  EXTERN template UnscaleKernelFn get_unscale_kernel<float>(CpuIsa);     \
  EXTERN template UnscaleKernelFn get_unscale_kernel<double>(CpuIsa);    \
  EXTERN template UnscaleKernelFn get_unscale_kernel<c10::Half>(CpuIsa); \
  EXTERN template UnscaleKernelFn get_unscale_kernel<c10::BFloat16>(CpuIsa);

#ifdef MEZZO_COMPILED_LIB
MEZZO_COMPILED_UNSCALE_KERNELS(extern)
#endif

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
    return update_found_inf_(gradients, found_inf);  // of the products
  }
  if (is_one_on_cpu(inv_scale)) return update_found_inf_(gradients, found_inf);
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
