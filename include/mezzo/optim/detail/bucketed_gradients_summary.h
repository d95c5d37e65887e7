#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/gradient_summary.h>
#include <mezzo/kernels/which_kernels.h>
#include <mezzo/optim/detail/bucketed_gradients.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// All gradients there: dense ones, and the values of sparse ones.
inline GradientsToRead BucketedGradients::gradients_on(at::Device device) {
  reattach_gradients();
  GradientsToRead to_read;
  for (std::size_t number = 0; number < slots_.size(); ++number) {
    const GradientSlot& slot = slots_[number];
    if (!slot.gradient().defined() || slot.gradient().device() != device) continue;
    if (slot.gradient().is_sparse() && !slot.gradient().is_coalesced()) {
      slot.parameter.mutable_grad() = slot.gradient().coalesce();
    }
    const at::Tensor& gradient = slot.gradient();
    to_read.numbers.push_back(number);
    to_read.tensors.push_back(gradient.is_sparse() ? gradient._values() : gradient);
  }
  return to_read;
}

inline void BucketedGradients::forget_reads() {
  reattach_gradients();
  for (GradientSlot& slot : slots_) slot.mark.clear();
}

inline GradientSummary BucketedGradients::summarize(const at::Tensor& inv_scale) {
  const c10::NoGradGuard no_grad;
  check_summary_arguments({}, inv_scale);
  const GradientsToRead to_read = gradients_on(inv_scale.device());
  if (has_cpu_loops(inv_scale.device())) return summarize_on_cpu(to_read, inv_scale);
#ifdef MEZZO_WITH_CUDA
  if (has_cuda_kernels(inv_scale.device()) && options_.check_during_backward()) {
    return summarize_on_cuda(to_read, inv_scale);
  }
#endif
  return summarize_gradients(to_read.tensors, inv_scale);
}

/// Merges parameter by parameter, read by a hook or now: the same bits either way.
inline GradientSummary BucketedGradients::summarize_on_cpu(const GradientsToRead& to_read,
                                                           const at::Tensor& inv_scale) {
  std::vector<at::Tensor> unread;
  const auto is_read = [&](std::size_t number) {
    const GradientSlot& slot = slots_[number];
    return slot.has_dense_gradient() && slot.mark.holds_for(slot.gradient(), flat_of(slot));
  };
  for (std::size_t i = 0; i < to_read.numbers.size(); ++i) {
    if (!is_read(to_read.numbers[i])) unread.push_back(to_read.tensors[i]);
  }
  const DenseGradients dense(unread);
  const std::vector<GradientPartial> partials = summarize_cpu(summary_stretches(dense));
  auto next_unread = partials.begin();
  GradientPartial total;
  for (const std::size_t number : to_read.numbers) {
    total.merge(is_read(number) ? slots_[number].partial : *next_unread++);
  }
  return finish_summary_cpu(total, inv_scale);
}

#ifdef MEZZO_WITH_CUDA

inline GradientSummary BucketedGradients::summarize_on_cuda(const GradientsToRead& to_read,
                                                            const at::Tensor& inv_scale) {
  cuda::begin_step_(inv_scale.device(), table_memory_);
  std::vector<at::Tensor> partials;
  std::vector<at::Tensor> unread;
  std::vector<int64_t> first{0};
  for (std::size_t i = 0; i < to_read.numbers.size(); ++i) {
    const GradientSlot& slot = slots_[to_read.numbers[i]];
    if (slot.has_dense_gradient() && slot.mark.holds_for(slot.gradient(), flat_of(slot))) {
      partials.push_back(slot.device_partials);
    } else {
      unread.push_back(to_read.tensors[i]);
      first.push_back(first.back() + cuda::partial_count(unread.back()));
    }
  }
  const DenseGradients dense(unread);
  const auto bytes = inv_scale.options().dtype(at::kByte);
  partials.push_back(at::empty({first.back() * cuda::partial_bytes()}, bytes));
  cuda::write_partials_(dense.tensors(), first, partials.back(), &table_memory_);
  const GradientSummary summary = new_summary(inv_scale.device());
  cuda::finish_partials_(partials.size() == 1 ? partials.front() : at::cat(partials), inv_scale,
                         summary.found_inf, summary.sum_of_squares, summary.max_abs);
  return summary;
}

#endif

inline GradientStatistics BucketedGradients::statistics(const at::Tensor& inv_scale,
                                                        at::ScalarType low_precision) {
  const c10::NoGradGuard no_grad;
  check_summary_arguments({}, inv_scale);
  const GradientsToRead to_read = gradients_on(inv_scale.device());
  GradientStatistics statistics = gradient_statistics(to_read.tensors, inv_scale, low_precision);
  if (to_read.numbers.empty()) return statistics;
  // From a place in the list to the parameter's number.
  const std::vector<int64_t> numbers(to_read.numbers.begin(), to_read.numbers.end());
  const at::Tensor place = statistics.first_bad.narrow(0, 0, 1);
  const at::Tensor number =
      at::tensor(numbers, place.options()).index_select(0, place.clamp_min(0));
  statistics.first_bad.narrow(0, 0, 1).copy_(at::where(place.ge(0), number, place));
  return statistics;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
