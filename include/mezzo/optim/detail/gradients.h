#pragma once

#include <mezzo/base/detail/inference_tensors.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/gradient_summary.h>
#include <mezzo/kernels/unscale.h>
#include <mezzo/optim/fused_optimizer.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

// How any optimizer's gradients are read and how any optimizer takes a step.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// What steps by a report, where `optimizer` is mezzo's; null for any other. The one place that
/// asks.
inline optim::FusedOptimizer* as_fused(AnyOptimizer optimizer) {
  return dynamic_cast<optim::FusedOptimizer*>(optimizer.mezzos());
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
}

/// The dense tensor that holds `parameter`'s gradient values. A sparse gradient is coalesced first:
/// two finite entries of one place can add up to an inf.
inline at::Tensor gradient_values(const at::Tensor& parameter) {
  at::Tensor gradient = parameter.grad();
  const at::ScalarType dtype = gradient.scalar_type();
  TORCH_CHECK(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf,
      "GradScaler: the gradient of a parameter (", tensor_words(parameter), ") is ",
      tensor_words(gradient), "; it should be of float32, float64, bfloat16 or float16");
  TORCH_CHECK(gradient.device() == parameter.device(), "GradScaler: the gradient of a parameter (",
              tensor_words(parameter), ") is ", tensor_words(gradient),
              "; it should be on the parameter's device: move it there");
  if (!gradient.is_sparse()) {
    TORCH_CHECK(gradient.layout() == at::kStrided, "GradScaler: the gradient of a parameter (",
                tensor_words(parameter), ") is ", tensor_words(gradient),
                "; make it dense, or sparse in COO layout");
    return gradient;
  }
  if (!gradient.is_coalesced()) {
    gradient = gradient.coalesce();
    parameter.mutable_grad() = gradient;
  }
  return gradient._values();
}

inline void add_gradient(std::vector<DeviceGradientReport>& devices, at::Tensor values) {
  auto device = devices.begin();
  while (device != devices.end() && device->gradients.front().device() != values.device()) ++device;
  if (device == devices.end()) device = devices.emplace(device);
  device->gradients.push_back(std::move(values));
}

/// The gradients of tensors that have one, yet unread; of a tensor that is given twice (a tied
/// weight, which libtorch's `parameters()` names twice) once.
inline std::vector<DeviceGradientReport> gradients_by_device(
    const std::vector<at::Tensor>& holders) {
  std::vector<DeviceGradientReport> devices;
  std::unordered_set<const c10::TensorImpl*> known;
  known.reserve(holders.size());
  for (const at::Tensor& holder : holders) {
    if (!known.insert(holder.unsafeGetTensorImpl()).second) continue;
    add_gradient(devices, gradient_values(holder));
  }
  return devices;
}

/// What one read of a device's gradients found.
inline void note(const GradientSummary& summary, DeviceGradientReport& device) {
  device.found_inf = summary.found_inf;
  device.sum_of_squares = summary.sum_of_squares;
  device.max_abs = summary.max_abs;
}

/// Does not wait, unless for a device to tell the CPU.
inline at::Tensor on_device(const at::Tensor& value, at::Device device) {
  return value.to(device, value.scalar_type(), /*non_blocking=*/!device.is_cpu());
}

inline void read_gradients(std::vector<DeviceGradientReport>& devices, const at::Tensor& inv_scale,
                           TableMemory* memory = nullptr) {
  for (DeviceGradientReport& device : devices) {
    device.inv_scale = on_device(inv_scale, device.gradients.front().device());
    note(summarize_gradients(device.gradients, device.inv_scale, memory), device);
  }
}

/// The gradients of an optimizer that cannot read a report, for the time of its step: each is one
/// of its own, multiplied by `factor`. What the optimizer itself makes of a gradient stays.
class LentGradients {
 public:
  LentGradients(const torch::optim::Optimizer& optimizer, double factor) {
    if (factor == 1.0) return;
    std::vector<at::Tensor> gradients;
    for_each_parameter(optimizer, [&](std::size_t, const at::Tensor& parameter) {
      if (!parameter.grad().defined()) return;
      gradients.push_back(parameter.grad());
      all_.push_back({parameter, parameter.grad()});
    });
    GradientProducts products = multiply_gradients(gradients, factor);
    found_inf_ = products.found_inf;
    for (std::size_t i = 0; i < all_.size(); ++i) {
      Lent& one = all_[i];
      one.product = std::move(products.tensors[i]);
      one.parameter.mutable_grad() = one.product;
      one.version = one.product._version();
    }
  }
  ~LentGradients() {
    for (const Lent& one : all_) {
      const at::Tensor& now = one.parameter.grad();
      const bool is_as_lent = now.is_same(one.product) && now._version() == one.version;
      if (is_as_lent) one.parameter.mutable_grad() = one.own;
    }
  }
  LentGradients(const LentGradients&) = delete;
  LentGradients& operator=(const LentGradients&) = delete;

  /// Whether a product is inf or NaN. In half and bfloat16 it can be where in float, in which a
  /// report looks, it is finite: if `factor` is above 1.
  bool found_inf() const noexcept { return found_inf_; }

 private:
  struct Lent {
    at::Tensor parameter, own;
    at::Tensor product{};
    int64_t version = 0;
  };
  std::vector<Lent> all_;  // of a parameter that is given twice the last is lent
  bool found_inf_ = false;
};

/// How an optimizer's gradients are read, whichever kind it is.
class StepTaker {
 public:
  explicit StepTaker(AnyOptimizer optimizer) : any_(optimizer), fused_(as_fused(optimizer)) {}

  torch::optim::Optimizer& optimizer() const noexcept { return any_.optimizer(); }
  /// Null where it cannot read a report.
  optim::FusedOptimizer* fused() const noexcept { return fused_; }
  /// Its own step: that of what was passed, which may be more than the optimizer's whose groups
  /// are trained.
  at::Tensor step() const { return any_.step(); }

  void check_unscale() const {
    if (fused_ != nullptr) fused_->check_unscale();
  }
  bool keeps_master(std::size_t group, const at::Tensor& parameter) const {
    return fused_ != nullptr && fused_->keeps_master(group, parameter);
  }
  at::Tensor master_param(std::size_t group, const at::Tensor& parameter) const {
    return fused_ != nullptr ? fused_->master_param(group, parameter) : parameter;
  }

  GradientReport report(const at::Tensor& inv_scale, bool of_masters) const {
    return fused_ != nullptr ? fused_->report(inv_scale, of_masters)
                             : plain_report(inv_scale, of_masters, /*memory=*/nullptr);
  }

  /// That of an optimizer that stands on its parameter list.
  GradientReport plain_report(const at::Tensor& inv_scale, bool of_masters,
                              TableMemory* memory) const {
    GradientReport report{.of_masters = of_masters};
    std::vector<at::Tensor> holders;
    for_each_parameter(optimizer(), [&](std::size_t group, const at::Tensor& parameter) {
      const bool may_have_master = of_masters || parameter.scalar_type() == at::kHalf;
      const bool has_master = may_have_master && keeps_master(group, parameter);
      const at::Tensor holder =
          of_masters && has_master ? master_param(group, parameter) : parameter;
      if (!holder.grad().defined()) return;
      report.has_bare_half |= !has_master && holder.grad().scalar_type() == at::kHalf;
      holders.push_back(holder);
    });
    report.devices = gradients_by_device(holders);
    read_gradients(report.devices, inv_scale, memory);
    return report;
  }

 private:
  AnyOptimizer any_;
  optim::FusedOptimizer* fused_;
};

}  // namespace detail

inline GradientReport optim::FusedOptimizer::report(const at::Tensor& inv_scale, bool of_masters) {
  return detail::StepTaker(*this).plain_report(inv_scale, of_masters, &table_memory_);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
