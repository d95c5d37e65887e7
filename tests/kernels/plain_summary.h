#pragma once

#include <torch/types.h>

#include <cmath>
#include <cstdint>
#include <vector>

/// What a summary should say, in plain loops over plain numbers.
struct PlainSummary {
  bool found_inf = false;
  double sum_of_squares = 0;
  double max_abs = 0;
  int64_t zeros = 0;
  int64_t underflows = 0;
  int64_t scaled_underflows = 0;
  int64_t bad_gradient = -1;
  int64_t bad_element = -1;
};

/// How many of `values` are lost in `dtype`, where `stored` is not 0.
inline int64_t count_lost(const torch::Tensor& values, const torch::Tensor& stored,
                          torch::ScalarType dtype) {
  const auto is_lost = (values.to(dtype).to(torch::kDouble) == 0) & (stored != 0);
  return is_lost.sum().item<int64_t>();
}

/// Elements in the order of memory of the contiguous tensor.
inline PlainSummary plain_summary(const std::vector<torch::Tensor>& gradients, float inv_scale,
                                  torch::ScalarType low_precision = torch::kHalf) {
  PlainSummary summary;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const auto stored = gradients[i].to(torch::kDouble).clone(torch::MemoryFormat::Contiguous);
    const bool is_double = gradients[i].scalar_type() == torch::kDouble;
    auto product = torch::empty_like(stored);
    const double* values = stored.const_data_ptr<double>();
    double* products = product.mutable_data_ptr<double>();
    for (int64_t j = 0; j < stored.numel(); ++j) {
      products[j] = is_double ? values[j] * static_cast<double>(inv_scale)
                              : static_cast<double>(static_cast<float>(values[j]) * inv_scale);
      const double magnitude = std::abs(products[j]);
      summary.sum_of_squares += magnitude * magnitude;
      summary.zeros += values[j] == 0;
      if (!(magnitude <= summary.max_abs) && !std::isnan(summary.max_abs)) {
        summary.max_abs = magnitude;
      }
      if (std::isfinite(magnitude) || summary.found_inf) continue;
      summary.found_inf = true;
      summary.bad_gradient = static_cast<int64_t>(i);
      summary.bad_element = j;
    }
    summary.underflows += count_lost(product, stored, low_precision);
    summary.scaled_underflows += count_lost(stored, stored, low_precision);
  }
  return summary;
}
