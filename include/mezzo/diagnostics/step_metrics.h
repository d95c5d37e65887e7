/// \file
/// StepMetrics: what a MetricsLogger passes to its callbacks.
#pragma once

#include <mezzo/base/version.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Metrics of one step. Optional values that were not passed or measured are unset.
struct StepMetrics {
  std::int64_t step = 0;                      ///< counted from the logger's first step
  double wall_time = 0;                       ///< of `record`, in seconds since 1970
  std::optional<double> loss = std::nullopt;  ///< as passed to `record`
  double scale = 1;                           ///< loss scale of the gradients
  bool skipped = false;                       ///< whether inf or NaN gradients skipped the step
  std::optional<double> grad_norm = std::nullopt;          ///< unscaled, before clipping
  std::optional<double> tokens_per_second = std::nullopt;  ///< since the previous `record`
  double step_seconds = 0;  ///< since the previous `record`; 0 for the first step
  std::optional<double> learning_rate = std::nullopt;  ///< as passed to `record`
  /// With a loss on a CUDA device, peak bytes allocated there by libtorch; with any other loss, the
  /// resident memory of the process (Linux); without a loss, unset.
  std::optional<double> memory_bytes = std::nullopt;

  /// Returns the scalars that writers store, with their names; `skipped` is 0 or 1.
  std::array<std::pair<const char*, std::optional<double>>, 7> scalars() const {
    return {{{"loss", loss},
             {"scale", scale},
             {"skipped", skipped ? 1.0 : 0.0},
             {"grad_norm", grad_norm},
             {"tokens_per_second", tokens_per_second},
             {"memory_bytes", memory_bytes},
             {"learning_rate", learning_rate}}};
  }
};

namespace detail {

/// Returns the current time, as StepMetrics::wall_time.
inline double wall_time_now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
