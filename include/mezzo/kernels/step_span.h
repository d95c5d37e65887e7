#pragma once

#include <mezzo/base/version.h>

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
      nullptr;              ///< SplitWeights: their lower halves. Floats: where to write a copy
  void* average = nullptr;  ///< of the parameter over the steps; null where none is kept
  int64_t first = 0;        ///< the number, in the parameter, of the first element
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
