#pragma once

#include <mezzo/base/version.h>

#include <c10/macros/Macros.h>

#include <cmath>
#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline constexpr int kMaxMoments = 3;

/// A stretch of one parameter with what belongs to it, each of any alignment.
struct StepSpan {
  void* parameter;
  void* gradient;
  void* moments[kMaxMoments];  ///< null where there are fewer
  int64_t count;
  void* low_half_or_copy =
      nullptr;        ///< SplitWeights: their lower halves. Floats: where to write a copy
  int64_t first = 0;  ///< the number, in the parameter, of the first element
};

/// What a step does with its streams beside the update itself.
struct StepUse {
  double factor = 1.0;       ///< gradients are multiplied by it before use
  bool clear = false;        ///< and cleared after it
  bool copies_half = false;  ///< copies of floats are half's, not bfloat16's
  // Stochastic rounding only:
  uint64_t seed = 0;
  uint64_t step = 1;       ///< 1 in the first step
  uint64_t parameter = 0;  ///< its number in the optimizer
};

/// What clip_grad_norm_ multiplies gradients with, given the sum of their squares. A norm that is
/// NaN gives NaN, as there.
C10_HOST_DEVICE inline double clip_coefficient(double sum_of_squares, double max_norm) {
  if (max_norm == HUGE_VAL) return 1.0;
  const double coefficient = max_norm / (::sqrt(sum_of_squares) + 1e-6);
  return coefficient > 1.0 ? 1.0 : coefficient;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
