#pragma once

#include <mezzo/version.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline constexpr int kMaxMoments = 3;

/// A stretch of one parameter with what belongs to it, each of any alignment.
struct StepSpan {
  void* parameter;
  void* gradient;
  void* moments[kMaxMoments];  ///< of the parameter's dtype; null where there are fewer
  int64_t count;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
