/// \file
/// What a GradScaler tells about a skipped step.
#pragma once

#include <mezzo/base/version.h>

#include <charconv>
#include <cstdint>
#include <iterator>
#include <string>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// An iteration in which a GradScaler skipped a step, as its `on_skip` callback gets it: at
/// `update` or, where a device decides, at one of the next.
struct SkippedStep {
  int64_t loss_id = 0;      ///< GradScalerOptions::loss_id
  float scale = 1.0F;       ///< the scale that overflowed
  float next_scale = 1.0F;  ///< the scale from here on
  /// The number of skipped iterations in a row, this one included, that found the scale at
  /// `min_scale`, where it stays. Above 0 the scale is not the cause: look for an inf or NaN in the
  /// data, loss or weights.
  int64_t consecutive_skips_at_min_scale = 0;
  /// The number of iterations in a row that skipped a step, this one included. A scale that starts
  /// too high makes about ten; beyond them look for an inf or NaN.
  int64_t consecutive_skips = 1;

  /// Returns one line: "Gradient overflow or NaN.  Skipping step, loss scaler 0 reducing loss scale
  /// to 32768.0", or "... keeping loss scale at 128.0" where the scale did not move. Apex says
  /// "overflow" for either; the scaler cannot tell which it was, an OverflowReport can.
  std::string message() const;
};

namespace detail {

/// Returns a scale as Python prints it: "32768.0", "3.0517578125e-05".
inline std::string python_float(double value) {
  char text[64];
  const bool is_fixed = value == 0 || (value >= 1e-4 && value < 1e16);
  const auto format = is_fixed ? std::chars_format::fixed : std::chars_format::scientific;
  const auto end = std::to_chars(std::begin(text), std::end(text), value, format).ptr;
  std::string result(text, end);
  if (is_fixed && result.find('.') == std::string::npos) result += ".0";
  return result;
}

/// Returns the line to print for a skip; empty for most skips of a long series. Each of the first
/// ten consecutive skips has a line, the eleventh one with advice, and then every 1000th. At
/// min_scale the first skip and every 1000th have a line.
inline std::string limited_skip_message(const SkippedStep& skipped) {
  const bool is_at_min_scale = skipped.consecutive_skips_at_min_scale > 0;
  const int64_t times =
      is_at_min_scale ? skipped.consecutive_skips_at_min_scale : skipped.consecutive_skips;
  const int64_t advised = is_at_min_scale ? 1 : 11;  // a scale that starts too high makes about ten
  if (times < advised) return skipped.message();
  if (times > advised && times % 1000 != 0) return {};
  return skipped.message() + (is_at_min_scale ? ", the lowest allowed" : "") + " (step " +
         std::to_string(times) + " in a row that was skipped" + (is_at_min_scale ? " there" : "") +
         "; from here on one in 1000 is printed): " +
         (is_at_min_scale
              ? "look for an inf or NaN in the data, the loss or the weights"
              : "no loss scale cures an inf or NaN in the data, the loss or the weights; "
                "mezzo::DivergenceMonitor (mezzo/diagnostics.h) tells which it is");
}

}  // namespace detail

inline std::string SkippedStep::message() const {
  const char* verb = next_scale < scale    ? " reducing loss scale to "
                     : next_scale == scale ? " keeping loss scale at "
                                           : " setting loss scale to ";
  return "Gradient overflow or NaN.  Skipping step, loss scaler " + std::to_string(loss_id) + verb +
         detail::python_float(next_scale);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
