#pragma once

#include <mezzo/version.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

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

/// All gradients that there are, of all parameter groups. Checks all before it coalesces any.
inline std::vector<DeviceGradients> gradients_by_device(const torch::optim::Optimizer& optimizer,
                                                        bool allow_fp16) {
  std::vector<at::Tensor> with_gradient;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      check_gradient_dtype(parameter.grad().scalar_type(), allow_fp16);
      with_gradient.push_back(parameter);
    }
  }
  std::vector<DeviceGradients> by_device;
  for (const at::Tensor& parameter : with_gradient) {
    at::Tensor values = gradient_values(parameter);
    auto group = by_device.begin();
    while (group != by_device.end() && group->device != values.device()) ++group;
    if (group == by_device.end()) group = by_device.insert(group, {values.device(), {}});
    group->tensors.push_back(std::move(values));
  }
  return by_device;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
