/// \file
/// SkippedStep, the argument of GradScaler's skip callback.
#pragma once

#include <mezzo/base/version.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// An iteration in which a GradScaler skipped a step. The `on_skip` callback is called with it in
/// `update`, or in a later `update` if the device decides.
struct SkippedStep {
  int64_t loss_id = 0;      ///< GradScalerOptions::loss_id
  float scale = 1.0F;       ///< the scale that overflowed
  float next_scale = 1.0F;  ///< the scale after it
  /// The number of consecutive skipped iterations with the scale at `min_scale`, including this
  /// one. If not 0, the scale is not the cause: look for an inf or NaN in the data, loss or
  /// weights.
  int64_t consecutive_skips_at_min_scale = 0;
  /// The number of consecutive skipped iterations, including this one. A scale that starts too high
  /// causes about ten; beyond ten look for an inf or NaN.
  int64_t consecutive_skips = 1;
  /// The optimizers whose gradients had an inf or NaN, in the order of their steps; a MasterWeights
  /// as the optimizer that it wraps. Addresses to compare: the optimizers may be destroyed.
  std::vector<const torch::optim::Optimizer*> optimizers = {};
  /// Describes `optimizers` if the scaler has stepped several: "optimizer 2 of 4 (Adam, 6
  /// parameters)", in the order of the steps of the iteration. Empty if it has stepped only one.
  std::string description = {};

  /// Returns whether `optimizer` skipped its step: `skipped.has_optimizer(actor)`.
  bool has_optimizer(const torch::optim::Optimizer& optimizer) const {
    return std::ranges::find(optimizers, &optimizer) != optimizers.end();
  }

  /// Returns Apex's message: "Gradient overflow or NaN.  Skipping step, loss scaler 0 reducing loss
  /// scale to 32768.0", or "... keeping loss scale at 128.0", and the description. OverflowReport
  /// distinguishes inf and NaN.
  std::string message() const;
};

namespace detail {

/// Formats a float as Python does: "32768.0", "3.0517578125e-05".
inline std::string format_python_float(double value) {
  char text[64];
  const bool is_fixed = value == 0 || (value >= 1e-4 && value < 1e16);
  const auto format = is_fixed ? std::chars_format::fixed : std::chars_format::scientific;
  const auto end = std::to_chars(std::begin(text), std::end(text), value, format).ptr;
  std::string result(text, end);
  if (is_fixed && result.find('.') == std::string::npos) result += ".0";
  return result;
}

/// Returns the message to print for a skip: for each of the first ten consecutive skips, for the
/// eleventh with advice, and then for every 1000th; at min_scale for the first and every 1000th.
/// Empty for the other skips.
inline std::string limited_skip_message(const SkippedStep& skipped) {
  const bool is_at_min_scale = skipped.consecutive_skips_at_min_scale > 0;
  const int64_t skips =
      is_at_min_scale ? skipped.consecutive_skips_at_min_scale : skipped.consecutive_skips;
  const int64_t first_with_advice = is_at_min_scale ? 1 : 11;
  if (skips < first_with_advice) return skipped.message();
  if (skips > first_with_advice && skips % 1000 != 0) return {};
  return skipped.message() + (is_at_min_scale ? ", which is min_scale" : "") +
         " (consecutive skips: " + std::to_string(skips) +
         "; from now on every 1000th is printed). No loss scale removes an inf or NaN in the data, "
         "the loss or the weights; mezzo::DivergenceMonitor (mezzo/diagnostics.h) finds it";
}

}  // namespace detail

inline std::string SkippedStep::message() const {
  const char* verb = next_scale < scale    ? " reducing loss scale to "
                     : next_scale == scale ? " keeping loss scale at "
                                           : " setting loss scale to ";
  return "Gradient overflow or NaN.  Skipping step, loss scaler " + std::to_string(loss_id) + verb +
         detail::format_python_float(next_scale) + (description.empty() ? "" : ": " + description);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
