#pragma once

#include <mezzo/detail/kernels/cpu_isa.h>
#include <mezzo/detail/kernels/parallel_spans.h>
#include <mezzo/version.h>

#include <ATen/core/Tensor.h>

#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Below this many elements a thread of its own costs more than it brings.
inline constexpr int64_t kUnscaleGrain = 32768;

/// Whether a tensor's values are exactly its numel() elements from data_ptr on, in whatever order.
inline bool is_one_span(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && !tensor.is_neg() && !tensor.is_conj();
}

using UnscaleSpans = std::vector<Span<UnscaleLoops>>;

inline Span<UnscaleLoops> span_of(const at::Tensor& tensor, void* data) {
  return {static_cast<char*>(data), tensor.numel(), static_cast<int64_t>(tensor.element_size()),
          unscale_loops(tensor.scalar_type(), best_isa())};
}

template <class Work>
bool any_part(const UnscaleSpans& spans, const Work& work) {
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
  UnscaleSpans spans;
  std::vector<at::Tensor> copies;  // of what lies in memory with gaps
  for (const at::Tensor& gradient : gradients) {
    const bool is_span = is_one_span(gradient);
    if (!is_span) copies.push_back(gradient.clone(at::MemoryFormat::Contiguous));
    const at::Tensor& values = is_span ? gradient : copies.back();
    spans.push_back(span_of(values, const_cast<void*>(values.const_data_ptr())));
  }
  return any_part(spans, [](const Span<UnscaleLoops>& span) {
    return span.loops.check(span.data, span.count);
  });
}

/// Multiplies all gradients by `inv_scale` in place; whether a product is inf or NaN. An
/// `inv_scale` of 1 writes nothing.
inline bool unscale_cpu_(const std::vector<at::Tensor>& gradients, float inv_scale) {
  if (inv_scale == 1.0F) return any_nonfinite_cpu(gradients);
  UnscaleSpans spans;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // (gradient with gaps, its dense copy)
  for (const at::Tensor& gradient : gradients) {
    at::Tensor values = gradient;
    if (!is_one_span(gradient)) {
      values = gradient.clone(at::MemoryFormat::Contiguous);
      copies.emplace_back(gradient, values);
    } else {
      gradient.unsafeGetTensorImpl()->bump_version();  // autograd does not see raw writes
    }
    spans.push_back(span_of(values, values.mutable_data_ptr()));
  }
  const bool found = any_part(spans, [&](const Span<UnscaleLoops>& span) {
    return span.loops.unscale(span.data, span.count, inv_scale);
  });
  for (const auto& [gradient, copy] : copies) gradient.copy_(copy);
  return found;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
