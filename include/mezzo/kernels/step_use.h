#pragma once

#include <mezzo/base/version.h>

#include <c10/macros/Macros.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline constexpr int kMaxMoments = 3;

/// Names a rule to the host's code of the kernels; each has a loop or two (amsgrad, momentum).
enum class CudaRule : std::uint8_t { adam, sgd, lion, lamb };

/// The coefficients of one step of one parameter, or the constants of a group: a rule's own struct
/// of numbers, as memory of one size for all rules.
class StepNumbers {
 public:
  StepNumbers() = default;
  template <class Own>
  requires std::is_trivially_copyable_v<Own> StepNumbers(const Own& own) {
    static_assert(sizeof(Own) <= sizeof(bytes_) && alignof(Own) <= alignof(double));
    std::memcpy(bytes_, &own, sizeof(Own));
  }
  template <class Own>
  Own as() const {
    Own own;
    std::memcpy(&own, bytes_, sizeof(Own));
    return own;
  }

 private:
  alignas(double) std::byte bytes_[64] = {};
};

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

/// Which of its streams a pass reads and writes: one does all, LAMB's first learns the moments, and
/// its second moves the parameter.
enum class StepPass { whole, learn, move };

/// How a parameter is rounded whose loop takes a float in its place.
enum class StagedParameter : std::uint8_t { none, nearest, stochastic };

/// What a step does with its streams beside the update itself.
struct StepUse {
  double factor = 1.0;       ///< gradients are multiplied by it before use
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
