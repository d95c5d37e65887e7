#pragma once

#include <mezzo/base/detail/inference_tensors.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/detail/rank_sum.h>
#include <mezzo/optim/fused_optimizer.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The gradients of one optimizer that lie on one device, of any mix of dtypes.
struct DeviceGradients {
  at::Device device;
  std::vector<at::Tensor> tensors;
};

/// The dense tensor that holds `parameter`'s gradient values. A sparse gradient is coalesced first:
/// two finite entries of one place can add up to an inf.
inline at::Tensor gradient_values(const at::Tensor& parameter) {
  at::Tensor gradient = parameter.grad();
  if (!gradient.is_sparse()) {
    TORCH_CHECK(gradient.layout() == at::kStrided, "A gradient has the layout ", gradient.layout(),
                "; GradScaler takes dense (strided) and sparse (COO) gradients");
    return gradient;
  }
  if (!gradient.is_coalesced()) {
    gradient = gradient.coalesce();
    parameter.mutable_grad() = gradient;
  }
  return gradient._values();
}

inline void check_gradient_dtype(at::ScalarType dtype, bool allow_fp16) {
  TORCH_CHECK(allow_fp16 || dtype != at::kHalf, "Attempting to unscale FP16 gradients.");
  TORCH_CHECK(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf,
      "A gradient has the dtype ", dtype, "; GradScaler takes float, double, bfloat16 and half");
}

/// mezzo's, with its groups as they are now; null for any other optimizer.
inline optim::FusedOptimizer* refreshed(torch::optim::Optimizer& optimizer) {
  auto* const fused = dynamic_cast<optim::FusedOptimizer*>(&optimizer);
  if (fused != nullptr) fused->refresh_groups();
  return fused;
}

/// Calls `visit(group number, parameter)` for all parameters of `optimizer`, in order.
template <class Visit>
void for_each_parameter(const torch::optim::Optimizer& optimizer, const Visit& visit) {
  std::size_t number = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) visit(number, parameter);
    ++number;
  }
}

inline void zero_gradients(const torch::optim::Optimizer& optimizer) {
  for_each_parameter(optimizer, [](std::size_t, const at::Tensor& parameter) {
    if (parameter.grad().defined()) clear_gradient(parameter.grad());
  });
  for (const auto& group : optimizer.param_groups()) forget_rank_sums(group.params());
}

/// For whoever goes on to read the gradients as they are.
inline void average_rank_sums(const torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) average_rank_sums(group.params());
}

/// The parameters that have a gradient. Half is refused unless it is to be unscaled in half, or is
/// unscaled in float on its way to a master.
inline std::vector<at::Tensor> with_gradient(const torch::optim::Optimizer& optimizer,
                                             bool allow_fp16) {
  const auto* const fused = dynamic_cast<const optim::FusedOptimizer*>(&optimizer);
  std::vector<at::Tensor> parameters;
  for_each_parameter(optimizer, [&](std::size_t group, const at::Tensor& parameter) {
    if (!parameter.grad().defined()) return;
    const at::ScalarType dtype = parameter.grad().scalar_type();
    const bool is_widened =
        dtype == at::kHalf && fused != nullptr && fused->keeps_master(group, parameter);
    check_gradient_dtype(dtype, allow_fp16 || is_widened);
    parameters.push_back(parameter);
  });
  return parameters;
}

/// The gradients of tensors that have one; of a tensor that is given twice (a tied weight, which
/// libtorch's `parameters()` names twice) once.
inline std::vector<DeviceGradients> gradients_by_device(const std::vector<at::Tensor>& holders) {
  std::vector<DeviceGradients> by_device;
  std::unordered_set<const c10::TensorImpl*> known;
  for (const at::Tensor& holder : holders) {
    if (!known.insert(holder.unsafeGetTensorImpl()).second) continue;
    at::Tensor values = gradient_values(holder);
    auto group = by_device.begin();
    while (group != by_device.end() && group->device != values.device()) ++group;
    if (group == by_device.end()) group = by_device.insert(group, {values.device(), {}});
    group->tensors.push_back(std::move(values));
  }
  return by_device;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
