/// \file
/// Gradient accumulation that drops micro-batches whose gradients are inf or NaN.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/gradient_summary.h>
#include <mezzo/scaling/detail/set_aside.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Runs `backward` for one micro-batch of several and adds its gradients to those accumulated in
/// `.grad`. If one of its gradients is inf or NaN, the micro-batch is dropped and what was
/// accumulated stays.
///
///     optimizer.zero_grad();
///     for (auto& micro_batch : batch) {
///       mezzo::accumulate_if_finite(model->parameters(),
///                                   [&] { scaler.scale(loss(model, micro_batch)).backward(); });
///     }
///     scaler.step(optimizer);
///
/// If all micro-batches of a step are bad, the gradients of the last one stay, and the step's own
/// check finds them. Gradients of zero count as accumulated, so begin with `zero_grad()`, which
/// leaves none. Costs one read of the new gradients and one of the accumulated, and memory for
/// both. If ranks reduce gradients, call it for the micro-batches before the last, under
/// `no_sync()`, and call `backward()` of the last one as usual.
/// \param parameters  every parameter that `backward` may reach
/// \param backward  computes the loss of the micro-batch and runs its backward pass
/// \return a bool of one element: whether the micro-batch was dropped. On the CPU if all parameters
///   are there; otherwise on the first parameter's device, without a host sync: a parameter that
///   only dropped micro-batches reached then has a gradient of zeros
/// \throws whatever `backward` throws, and c10::Error for an undefined parameter, a gradient that
///   cannot be added, or a sparse gradient where a parameter is on a device other than the CPU.
///   Gradients are then what they were before the call.
at::Tensor accumulate_if_finite(const std::vector<at::Tensor>& parameters,
                                const std::function<void()>& backward);

namespace detail {

/// Returns whether any gradient is inf or NaN, as a bool of one element on the device of `flag`.
/// \param gradients  dense or sparse, on any devices; undefined ones are left out
inline at::Tensor any_bad(const std::vector<at::Tensor>& gradients, const at::Tensor& flag) {
  at::Tensor is_bad = at::zeros({}, flag.options());
  std::vector<at::Device> devices;
  for (const at::Tensor& gradient : gradients) {
    if (!gradient.defined()) continue;
    const at::Device device = gradient.device();
    if (std::find(devices.begin(), devices.end(), device) == devices.end()) {
      devices.push_back(device);
    }
  }
  for (const at::Device device : devices) {
    std::vector<at::Tensor> dense;
    for (const at::Tensor& gradient : gradients) {
      if (!gradient.defined() || gradient.device() != device) continue;
      dense.push_back(gradient.is_sparse() ? gradient.coalesce()._values() : gradient);
    }
    const auto one = at::ones({}, at::TensorOptions().device(device).dtype(at::kFloat));
    const at::Tensor found = summarize_gradients(dense, one).found_inf.ne(0);
    is_bad.logical_or_(found.to(flag.device(), at::kBool, /*non_blocking=*/!flag.is_cpu()));
  }
  return is_bad;
}

/// Returns what becomes of one parameter's gradient, decided on its device: `gradient` if
/// `holds_bad`, else `before` if `is_bad`, else their sum. `before` and `gradient` may be
/// undefined.
inline at::Tensor selected_gradient(const at::Tensor& before, const at::Tensor& gradient,
                                    const at::Tensor& is_bad, const at::Tensor& holds_bad) {
  if (!gradient.defined() && !before.defined()) return {};
  const at::Tensor& any = gradient.defined() ? gradient : before;
  const at::ScalarType dtype =
      c10::promoteTypes(any.scalar_type(), (before.defined() ? before : any).scalar_type());
  const at::Tensor old = (before.defined() ? before : at::zeros_like(any)).to(dtype);
  const at::Tensor own = (gradient.defined() ? gradient : at::zeros_like(any)).to(dtype);
  const at::Tensor result = at::where(holds_bad, own, at::where(is_bad, old, old.add(own)));
  return own.is_same(gradient) ? gradient.copy_(result) : result;
}

}  // namespace detail

inline at::Tensor accumulate_if_finite(const std::vector<at::Tensor>& parameters,
                                       const std::function<void()>& backward) {
  TORCH_CHECK(
      backward != nullptr,
      "accumulate_if_finite: backward is an empty function; pass one that calls backward()");
  bool on_host = true;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    TORCH_CHECK(parameters[i].defined(), "accumulate_if_finite: parameter ", i,
                " is undefined; leave it out");
    on_host = on_host && parameters[i].is_cpu();
  }
  detail::SetAside before(parameters);
  backward();

  const c10::NoGradGuard no_grad;
  const at::Device device = on_host ? at::Device(at::kCPU) : parameters.front().device();
  const at::Tensor flag = at::ones({}, at::TensorOptions().device(device).dtype(at::kBool));
  std::vector<at::Tensor> gradients;
  bool has_accumulated = false;
  for (std::size_t i = 0; i < before.parameters().size(); ++i) {
    const at::Tensor& old = before.aside()[i];
    gradients.push_back(before.parameters()[i].grad());
    has_accumulated = has_accumulated || old.defined();
    for (const at::Tensor& one : {old, gradients.back()}) {
      TORCH_CHECK(on_host || !one.defined() || !one.is_sparse(),
                  "accumulate_if_finite: a sparse gradient cannot be dropped without asking the "
                  "device; use dense gradients, or run backward() of the micro-batch itself");
    }
  }
  const at::Tensor is_bad = detail::any_bad(gradients, flag);
  // With nothing accumulated yet, the new gradients stay, bad ones too.
  const at::Tensor holds_bad = has_accumulated ? detail::any_bad(before.aside(), flag) : flag;
  if (on_host) {
    if (holds_bad.item<bool>()) {
      before.drop();
    } else if (!is_bad.item<bool>()) {
      before.add_back();
    }
    return is_bad;  // where the micro-batch is dropped, `before` puts back what was there
  }
  std::vector<at::Tensor> results;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const at::Device own = before.parameters()[i].device();
    const auto there = [&](const at::Tensor& value) {
      return value.to(own, at::kBool, /*non_blocking=*/!own.is_cpu());
    };
    results.push_back(detail::selected_gradient(before.aside()[i], gradients[i], there(is_bad),
                                                there(holds_bad)));
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    before.parameters()[i].mutable_grad() = results[i];
  }
  before.drop();
  return is_bad;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
