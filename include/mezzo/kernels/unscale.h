#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/cpu_isa.h>
#include <mezzo/kernels/cpu_lanes.h>
#include <mezzo/kernels/dense_memory.h>
#include <mezzo/kernels/devices.h>
#include <mezzo/kernels/gradient_element.h>
#include <mezzo/kernels/gradient_summary.h>
#include <mezzo/kernels/work_chunks.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones_like.h>

#include <cstddef>
#include <cstdint>
#include <unordered_set>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Handles the whole vectors of [begin, count), and adds inf and NaN to `found`. Returns the index
/// of the first element that is left.
template <class Lanes>
C10_ALWAYS_INLINE int64_t unscale_lanes(const typename Lanes::Format::Stored* from,
                                        typename Lanes::Format::Stored* to, int64_t begin,
                                        int64_t count, typename Lanes::Format::Value inv_scale,
                                        bool& found) {
  UnscaleElement<typename Lanes::Format, typename Lanes::Value> unscale;
  Lanes::broadcast(inv_scale, unscale.inv_scale);
  typename Lanes::Flags nonfinite{};
  int64_t i = begin;
  for (; i + Lanes::kWidth <= count; i += Lanes::kWidth) {
    typename Lanes::Bits bits;
    Lanes::load(from + i, bits);
    unscale(bits, nonfinite);
    Lanes::store(bits, to + i);
  }
  found |= Lanes::any(nonfinite);
  return i;
}

/// Writes from[i] * inv_scale to `to`, for `count` elements of any alignment, and returns whether a
/// product is inf or NaN. `to` may be `from`. For all dtypes but double, inv_scale is rounded to
/// float.
template <class Element, class Lanes>
struct UnscaleKernel {
  C10_ALWAYS_INLINE static bool run(const void* from, void* to, int64_t count, double inv_scale) {
    const auto* source = static_cast<const typename Lanes::Format::Stored*>(from);
    auto* target = static_cast<typename Lanes::Format::Stored*>(to);
    const auto factor = static_cast<typename Lanes::Format::Value>(inv_scale);
    bool found = false;
    const int64_t done = unscale_lanes<Lanes>(source, target, 0, count, factor, found);
    unscale_lanes<ScalarLanes<Element>>(source, target, done, count, factor, found);
    return found;
  }
};

/// Multiplies `count` elements; see UnscaleKernel.
using UnscaleLoop = bool (*)(const void* from, void* to, int64_t count, double inv_scale);

template <class Element>
UnscaleLoop unscale_loop(CpuIsa isa) {
  return cpu_kernel<UnscaleKernel, Element>(isa);
}

inline UnscaleLoop unscale_loop(at::ScalarType dtype, CpuIsa isa) {
  return for_gradient_dtype(dtype,
                            [isa]<class Element>(Element) { return unscale_loop<Element>(isa); });
}

// Held by mezzo::compiled (mezzo/optim/compiled.h).
#define MEZZO_COMPILED_UNSCALES(EXTERN)                        \
  EXTERN template UnscaleLoop unscale_loop<float>(CpuIsa);     \
  EXTERN template UnscaleLoop unscale_loop<double>(CpuIsa);    \
  EXTERN template UnscaleLoop unscale_loop<c10::Half>(CpuIsa); \
  EXTERN template UnscaleLoop unscale_loop<c10::BFloat16>(CpuIsa);

#ifdef MEZZO_LEFT_TO_LIBRARY
MEZZO_COMPILED_UNSCALES(extern)
#endif

/// Sets `found_inf`, a float of one element, to 1 if a gradient is inf or NaN, and leaves it
/// otherwise. Only reads. All on one device.
inline void check_(const std::vector<at::Tensor>& gradients, at::Tensor& found_inf) {
  GradientRead read(at::ones_like(found_inf));
  for (const at::Tensor& gradient : gradients) read.add(gradient);
  found_inf.copy_(at::maximum(found_inf, read.finish().found_inf.reshape_as(found_inf)));
}

/// Multiplies all gradients, which must be writable, by `inv_scale` in place. Returns whether a
/// product is inf or NaN.
inline bool unscale_cpu_(const std::vector<at::Tensor>& gradients, float inv_scale) {
  const DenseGradients dense(gradients);
  const std::vector<Stretch> stretches = dense.stretches();
  WorkChunks chunks(kThreadGrain);
  for (std::size_t i = 0; i < stretches.size(); ++i) chunks.add(i, stretches[i].count);
  const bool found = chunks.any([&](const WorkChunks::Chunk& chunk) {
    const Stretch& stretch = stretches[chunk.item];
    void* const data = stretch.at(chunk.begin);
    return unscale_loop(stretch.dtype, best_isa())(data, data, chunk.count, inv_scale);
  });
  dense.written();
  return found;
}

/// Unscales by ATen's kernel, which takes tensors of one dtype and tests values before it
/// multiplies.
inline void unscale_with_aten_(const std::vector<at::Tensor>& gradients, at::Tensor found_inf,
                               const at::Tensor& inv_scale) {
  for (const std::vector<at::Tensor>& same : by_dtype(gradients)) {
    at::_amp_foreach_non_finite_check_and_unscale_(same, found_inf, inv_scale);
  }
}

/// Returns the tensors in their order, without repetitions.
inline std::vector<at::Tensor> each_once(std::vector<at::Tensor> tensors) {
  std::unordered_set<const c10::TensorImpl*> known;
  std::erase_if(tensors, [&known](const at::Tensor& tensor) {
    return !known.insert(tensor.unsafeGetTensorImpl()).second;
  });
  return tensors;
}

/// Checks that `unscale_and_check_` accepts these gradients, so that those of all devices are
/// checked before any is written. A factor of 1 writes nothing on the CPU.
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
    const float factor = *inv_scale.const_data_ptr<float>();
    if (factor == 1.0F) return check_(gradients, found_inf);
    if (unscale_cpu_(gradients, factor)) found_inf.fill_(1.0);
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
