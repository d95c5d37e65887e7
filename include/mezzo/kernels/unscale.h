#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/dense_gradients.h>
#include <mezzo/kernels/parallel_spans.h>
#include <mezzo/kernels/unscale_loops.h>
#include <mezzo/kernels/which_kernels.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/full_like.h>

#include <algorithm>
#include <unordered_set>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Below this many elements a thread of its own costs more than it brings.
inline constexpr int64_t kUnscaleGrain = 32768;

/// Runs `work` over all gradients, on several threads; true if it returned true for any stretch.
/// With kWrites a copy-on-write tensor gets memory of its own first; otherwise it stays shared.
template <bool kWrites, class Work>
bool any_span(const DenseGradients& gradients, const Work& work) {
  std::vector<Span<UnscaleLoops>> spans;
  for (const at::Tensor& tensor : gradients.tensors()) {
    void* const data =
        kWrites ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
    spans.push_back({static_cast<char*>(data), tensor.numel(),
                     static_cast<int64_t>(tensor.element_size()),
                     unscale_loops(tensor.scalar_type(), best_isa())});
  }
  auto parts = equal_parts(spans, kUnscaleGrain);
  parallel_for_each(parts, [&](Part<UnscaleLoops>& part) {
    bool found = false;
    for (const auto& span : part.spans) found |= work(span);
    part.found = found;
  });
  bool found = false;
  for (const auto& part : parts) found |= part.found;
  return found;
}

/// Whether any gradient has an inf or NaN. CPU tensors of any of the four floating dtypes.
inline bool any_nonfinite_cpu(const std::vector<at::Tensor>& gradients) {
  return any_span<false>(DenseGradients(gradients), [](const Span<UnscaleLoops>& span) {
    return span.loops.check(span.data, span.count);
  });
}

/// Multiplies all gradients, which are writable, by `inv_scale` in place; whether a product is inf
/// or NaN. An `inv_scale` of 1 writes nothing.
inline bool unscale_cpu_(const std::vector<at::Tensor>& gradients, float inv_scale) {
  if (inv_scale == 1.0F) return any_nonfinite_cpu(gradients);
  const DenseGradients dense(gradients);
  const bool found = any_span<true>(dense, [&](const Span<UnscaleLoops>& span) {
    return span.loops.unscale(span.data, span.count, inv_scale);
  });
  dense.written();
  return found;
}

/// ATen's kernel takes tensors of one dtype and tests what comes in.
inline void unscale_with_aten_(std::vector<at::Tensor> gradients, at::Tensor found_inf,
                               const at::Tensor& inv_scale) {
  while (!gradients.empty()) {
    const at::ScalarType dtype = gradients.front().scalar_type();
    const auto rest = std::stable_partition(
        gradients.begin(), gradients.end(),
        [&](const at::Tensor& gradient) { return gradient.scalar_type() == dtype; });
    const at::TensorList same_dtype(gradients.data(),
                                    static_cast<std::size_t>(rest - gradients.begin()));
    at::_amp_foreach_non_finite_check_and_unscale_(same_dtype, found_inf, inv_scale);
    gradients.erase(gradients.begin(), rest);
  }
}

/// Sets `found_inf` to 1 if a gradient is inf or NaN, and leaves it otherwise. All on one device.
inline void check_(const std::vector<at::Tensor>& gradients, at::Tensor& found_inf) {
  if (has_cpu_loops(found_inf.device())) {
    if (any_nonfinite_cpu(gradients)) found_inf.fill_(1.0);
    return;
  }
#ifdef MEZZO_WITH_CUDA
  if (has_cuda_kernels(found_inf.device())) {
    detail::cuda::check_(gradients, found_inf);
    return;
  }
#endif
  unscale_with_aten_(gradients, found_inf, at::full_like(found_inf, 1.0));
}

/// Tensors in their order, without repetitions.
inline std::vector<at::Tensor> each_once(std::vector<at::Tensor> tensors) {
  std::unordered_set<const c10::TensorImpl*> known;
  std::erase_if(tensors, [&known](const at::Tensor& tensor) {
    return !known.insert(tensor.unsafeGetTensorImpl()).second;
  });
  return tensors;
}

/// Whether `unscale_and_check_` takes them: gradients of several devices are checked before those
/// of the first are written. A factor of 1 writes nothing on the CPU.
/// \throws c10::Error if elements of a gradient share memory
inline void check_unscalable(const std::vector<at::Tensor>& gradients,
                             const at::Tensor& inv_scale) {
  if (has_cpu_loops(inv_scale.device()) && *inv_scale.const_data_ptr<float>() == 1.0F) return;
  check_writable(gradients);
}

/// Multiplies gradients by `inv_scale` in place; sets `found_inf` to 1 if a product is inf or NaN.
/// All on one device. A tensor that is the gradient of several parameters is multiplied once; two
/// tensors of one memory are each multiplied, as in torch. ATen's kernel tests before it
/// multiplies, so that its products are read once more.
/// \throws c10::Error, before any write, if elements of a gradient share memory
inline void unscale_and_check_(const std::vector<at::Tensor>& all, at::Tensor& found_inf,
                               const at::Tensor& inv_scale) {
  check_unscalable(all, inv_scale);
  const std::vector<at::Tensor> gradients = each_once(all);
  if (has_cpu_loops(found_inf.device())) {
    if (unscale_cpu_(gradients, *inv_scale.const_data_ptr<float>())) found_inf.fill_(1.0);
    return;
  }
#ifdef MEZZO_WITH_CUDA
  if (has_cuda_kernels(found_inf.device())) {
    detail::cuda::unscale_and_check_(gradients, found_inf, inv_scale);
    return;
  }
#endif
  unscale_with_aten_(gradients, found_inf, inv_scale);
  check_(gradients, found_inf);
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
