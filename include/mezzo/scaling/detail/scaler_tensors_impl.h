#pragma once

#include <mezzo/scaling/scaler_tensors.h>

#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <string_view>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline bool is_count_of_scaler(std::string_view key) {
  constexpr std::array<std::string_view, 5> kCounts{
      "growth_interval", "_growth_tracker", "hysteresis", "_hysteresis_left", "_loss_scale_kind"};
  return std::find(kCounts.begin(), kCounts.end(), key) != kCounts.end();
}

}  // namespace detail

inline std::map<std::string, at::Tensor> scaler_tensors(const GradScaler::StateDict& state) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [key, value] : state) {
    const auto dtype = detail::is_count_of_scaler(key) ? at::kLong : at::kDouble;
    tensors[key] = at::scalar_tensor(value, dtype);
  }
  return tensors;
}

inline GradScaler::StateDict scaler_state(const std::map<std::string, at::Tensor>& tensors) {
  GradScaler::StateDict state;
  for (const auto& [key, tensor] : tensors) {
    TORCH_CHECK(tensor.defined() && tensor.numel() == 1, "scaler_state: \"", key,
                "\" should be a tensor of one element");
    TORCH_CHECK(at::isFloatingType(tensor.scalar_type()) ||
                    at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false),
                "scaler_state: \"", key, "\" is a tensor of ", tensor.scalar_type(),
                "; it should be of real numbers");
    state[key] = tensor.item<double>();
  }
  return state;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
