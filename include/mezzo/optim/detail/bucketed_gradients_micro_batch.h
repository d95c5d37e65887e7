#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/gradient_summary.h>
#include <mezzo/optim/detail/bucketed_gradients.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/logical_or.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// `accumulated` and a micro-batch's gradient, either of which may be undefined, as one; decided on
/// the host.
inline at::Tensor accumulated_on_host(const at::Tensor& accumulated, const at::Tensor& gradient,
                                      bool is_bad, bool holds_bad) {
  if (is_bad && !holds_bad) return accumulated;
  if (holds_bad || !accumulated.defined()) return gradient;
  if (!gradient.defined()) return accumulated;
  return accumulated.is_sparse() && !gradient.is_sparse() ? gradient.add(accumulated)
                                                          : accumulated.add_(gradient);
}

/// The same, decided on the device: the two are bools of one element there.
inline at::Tensor accumulated_on_device(const at::Tensor& accumulated, const at::Tensor& gradient,
                                        const at::Tensor& is_bad, const at::Tensor& holds_bad) {
  if (!gradient.defined() && !accumulated.defined()) return {};
  const at::Tensor before = accumulated.defined() ? accumulated : at::zeros_like(gradient);
  const at::Tensor own = gradient.defined() ? gradient : at::zeros_like(accumulated);
  const at::Tensor if_bad = at::where(holds_bad, own, before);
  const at::Tensor if_good = at::where(holds_bad, own, before.add(own));
  const at::Tensor result = at::where(is_bad, if_bad, if_good);
  return accumulated.defined() ? accumulated.copy_(result) : result;
}

/// The host reads at once, a device in order.
inline at::Tensor flag_on(at::Device device, const at::Tensor& flag) {
  return flag.to(device, at::kBool, /*non_blocking=*/!device.is_cpu());
}

inline at::Tensor BucketedGradients::accumulate_if_finite(const std::function<void()>& backward) {
  TORCH_CHECK(is_flat(),
              "accumulate_if_finite: it needs flat storage, whose buffer holds what is "
              "accumulated; make the buckets with GradBucketsOptions().storage(GradStorage::flat)");
  TORCH_CHECK(
      backward != nullptr,
      "accumulate_if_finite: backward is an empty function; pass one that calls backward()");
  reattach_gradients();
  std::vector<at::Tensor> accumulated;
  for (GradientSlot& slot : slots_) {
    accumulated.push_back(slot.gradient().defined()
                              ? std::exchange(slot.parameter.mutable_grad(), at::Tensor())
                              : at::Tensor());
  }
  const auto put_back = [&] {
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (!accumulated[i].defined() && !slots_[i].gradient().defined()) continue;
      slots_[i].parameter.mutable_grad() = accumulated[i];
    }
  };
  at::Tensor is_bad;
  add_no_sync(1);
  const auto ends_no_sync = c10::make_scope_exit([&] { add_no_sync(-1); });
  try {
    backward();
    const c10::NoGradGuard no_grad;
    is_bad = accumulate(accumulated);
  } catch (...) {
    put_back();
    throw;
  }
  put_back();
  reattach_gradients();
  return is_bad;
}

/// \throws c10::Error before anything is accumulated, if something cannot be
inline void BucketedGradients::check_micro_batch(const std::vector<at::Tensor>& accumulated,
                                                 bool on_host) const {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const at::Tensor& gradient = slots_[i].gradient();
    if (gradient.defined()) check_gradient(slots_[i], i);
    const bool is_sparse = (gradient.defined() && gradient.is_sparse()) ||
                           (accumulated[i].defined() && accumulated[i].is_sparse());
    TORCH_CHECK(
        on_host || !is_sparse,
        "accumulate_if_finite: a sparse gradient cannot be dropped without asking the device; give "
        "its parameter a GradBuckets of its own on the CPU, or dense gradients");
  }
}

inline std::vector<at::Device> BucketedGradients::devices() const {
  std::vector<at::Device> all;
  for (const GradBucket& bucket : buckets_) {
    if (std::find(all.begin(), all.end(), bucket.device) == all.end()) all.push_back(bucket.device);
  }
  return all;
}

/// Whether any gradient, dense or sparse, on whatever device, is inf or NaN.
inline at::Tensor BucketedGradients::any_bad(const at::TensorOptions& flag) const {
  at::Tensor is_bad = at::zeros({}, flag);
  for (const at::Device device : devices()) {
    std::vector<at::Tensor> tensors;
    for (const GradientSlot& slot : slots_) {
      const at::Tensor& gradient = slot.gradient();
      if (!gradient.defined() || gradient.device() != device) continue;
      tensors.push_back(gradient.is_sparse() ? gradient.coalesce()._values() : gradient);
    }
    const auto one = at::ones({}, at::TensorOptions().device(device).dtype(at::kFloat));
    const at::Tensor found = summarize_gradients(tensors, one).found_inf.ne(0);
    is_bad = at::logical_or(is_bad, flag_on(flag.device(), found));
  }
  return is_bad;
}

/// Adds the parameters' gradients to those accumulated, or does not.
inline at::Tensor BucketedGradients::accumulate(std::vector<at::Tensor>& accumulated) {
  const auto device = parameters_.empty() ? at::Device(at::kCPU) : parameters_.front().device();
  const auto flag = at::TensorOptions().device(device).dtype(at::kBool);
  const std::vector<at::Device> all = devices();
  const bool on_host = all.empty() || (all.size() == 1 && all.front().is_cpu());
  check_micro_batch(accumulated, on_host);
  at::Tensor is_bad = any_bad(flag);
  bool has_any = false;
  for (const at::Tensor& gradient : accumulated) has_any |= gradient.defined();
  // With nothing accumulated yet, whatever comes replaces it, a bad one too.
  const at::Tensor holds_bad = !has_any               ? at::ones({}, flag)
                               : holds_bad_.defined() ? holds_bad_
                                                      : at::zeros({}, flag);
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const at::Tensor& gradient = slots_[i].gradient();
    const at::Device own_device = slots_[i].parameter.device();
    const at::Tensor own = gradient.defined() ? gradient.detach() : gradient;
    accumulated[i] =
        on_host
            ? accumulated_on_host(accumulated[i], own, is_bad.item<bool>(), holds_bad.item<bool>())
            : accumulated_on_device(accumulated[i], own, flag_on(own_device, is_bad),
                                    flag_on(own_device, holds_bad));
  }
  holds_bad_ = at::logical_and(holds_bad, is_bad);
  return is_bad;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
