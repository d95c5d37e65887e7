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
};

inline PlainSummary plain_summary(const std::vector<torch::Tensor>& gradients, float inv_scale) {
  PlainSummary summary;
  for (const torch::Tensor& gradient : gradients) {
    const auto stored = gradient.to(torch::kDouble).clone(torch::MemoryFormat::Contiguous);
    const bool is_double = gradient.scalar_type() == torch::kDouble;
    const double* values = stored.const_data_ptr<double>();
    for (int64_t j = 0; j < stored.numel(); ++j) {
      const double product = is_double
                                 ? values[j] * static_cast<double>(inv_scale)
                                 : static_cast<double>(static_cast<float>(values[j]) * inv_scale);
      const double magnitude = std::abs(product);
      summary.sum_of_squares += magnitude * magnitude;
      if (!(magnitude <= summary.max_abs) && !std::isnan(summary.max_abs)) {
        summary.max_abs = magnitude;
      }
      summary.found_inf = summary.found_inf || !std::isfinite(magnitude);
    }
  }
  return summary;
}
