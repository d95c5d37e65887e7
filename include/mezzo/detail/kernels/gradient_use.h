#pragma once

#include <mezzo/version.h>

#include <c10/macros/Macros.h>

#include <cmath>
#include <limits>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// What a step does to every gradient: multiply it before use; clear it after.
struct GradientUse {
  double factor = 1.0;
  bool clear = false;
};

/// What clip_grad_norm_ multiplies gradients with, given the sum of their squares. A norm that is
/// NaN gives NaN, as there.
C10_HOST_DEVICE inline double clip_coefficient(double sum_of_squares, double max_norm) {
  if (max_norm == std::numeric_limits<double>::infinity()) return 1.0;
  const double coefficient = max_norm / (::sqrt(sum_of_squares) + 1e-6);
  return coefficient > 1.0 ? 1.0 : coefficient;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
