#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/dense_gradients.h>
#include <mezzo/kernels/parallel_spans.h>
#include <mezzo/kernels/unscale_loops.h>

#include <ATen/core/Tensor.h>

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

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
