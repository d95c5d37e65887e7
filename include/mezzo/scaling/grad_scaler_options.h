/// \file
/// What a GradScaler is made of, and what it tells of a skipped step.
#pragma once

#include <mezzo/base/loss_scale.h>
#include <mezzo/base/version.h>

#include <c10/util/Exception.h>
#include <torch/arg.h>

#include <charconv>
#include <cstdint>
#include <iterator>
#include <string>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// The options of a GradScaler, in libtorch's option style. Defaults are torch.amp's but for
/// `min_scale` (torch has no floor) and `recheck` (torch does not look again).
struct GradScalerOptions {
  GradScalerOptions() = default;

  /// A scaler that follows `rule`: `GradScaler(LossScale::fixed(128.))`.
  GradScalerOptions(const LossScale& rule);

  /// The scale before the first iteration, and for good when `loss_scale` is fixed.
  TORCH_ARG(double, init_scale) = kDefaultInitScale;
  /// The scale is multiplied by this after `growth_interval` clean iterations in a row; > 1.
  TORCH_ARG(double, growth_factor) = kDefaultGrowthFactor;
  /// The scale is multiplied by this after an iteration with an inf or NaN; between 0 and 1.
  TORCH_ARG(double, backoff_factor) = kDefaultBackoffFactor;
  TORCH_ARG(int64_t, growth_interval) = kDefaultGrowthInterval;
  /// `false`: every call passes through, `get_scale()` is 1 and `step` just steps.
  TORCH_ARG(bool, enabled) = true;
  /// The scale never goes below. 0 is torch's behaviour: a scale that reaches 0 stays there.
  TORCH_ARG(double, min_scale) = kDefaultMinScale;
  /// The scale never goes above; `kApexMaxScale` is Apex's 2^24.
  TORCH_ARG(double, max_scale) = kNoMaxScale;
  /// How many overflows in a row it takes to back off (all of them skip their step).
  TORCH_ARG(int64_t, hysteresis) = 1;
  /// `step` after an explicit `unscale_` looks at the gradients once more, since clipping or the
  /// user may have broken them meanwhile: one read of them. `false` is torch's behaviour.
  TORCH_ARG(bool, recheck) = true;
  /// `none` and `fixed` keep the scale (1, or init_scale) and still skip a step with inf or NaN.
  TORCH_ARG(LossScaleKind, loss_scale) = LossScaleKind::dynamic;
  /// Unscale fp16 gradients too (parameters in fp16 without master weights); they underflow easily,
  /// which is why torch.amp refuses them.
  TORCH_ARG(bool, allow_fp16_gradients) = false;
  /// The number that the line about a skipped step names, for programs with several scalers.
  TORCH_ARG(int64_t, loss_id) = 0;

 public:
  /// The rule that these options describe.
  /// \throws c10::Error naming the option, its value and what is allowed
  LossScale rule() const;
};

/// What the scaler tells about an iteration in which it skipped a step, at its `update` or, where a
/// device decides, at one of the next.
struct SkippedStep {
  int64_t loss_id = 0;
  float scale = 1.0F;       ///< the scale that overflowed
  float next_scale = 1.0F;  ///< the scale from here on
  /// How many skipped iterations in a row, this one included, found the scale at `min_scale`, where
  /// it stays. Then it is not the scale: look for an inf or NaN in the data, loss or weights.
  int64_t times_at_floor = 0;
  /// How many iterations in a row skipped a step, this one included; an iteration without a skip
  /// ends the row. A scale that starts too high makes about ten. Beyond them look for an inf or
  /// NaN.
  int64_t times_in_a_row = 1;

  /// One line: "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0"
  /// (Apex's words), or "... keeping loss scale at 128.0" where the scale did not move.
  std::string message() const;
};

namespace detail {

/// A scale as Python prints it: "32768.0", "3.0517578125e-05".
inline std::string python_float(double value) {
  char text[64];
  const bool is_fixed = value == 0 || (value >= 1e-4 && value < 1e16);
  const auto format = is_fixed ? std::chars_format::fixed : std::chars_format::scientific;
  const auto end = std::to_chars(std::begin(text), std::end(text), value, format).ptr;
  std::string result(text, end);
  if (is_fixed && result.find('.') == std::string::npos) result += ".0";
  return result;
}

}  // namespace detail

inline GradScalerOptions::GradScalerOptions(const LossScale& rule)
    : init_scale_(rule.init_scale()),
      growth_factor_(rule.growth_factor()),
      backoff_factor_(rule.backoff_factor()),
      growth_interval_(rule.growth_interval()),
      min_scale_(rule.min_scale()),
      max_scale_(rule.max_scale()),
      hysteresis_(rule.hysteresis()),
      loss_scale_(rule.kind()) {}

inline LossScale GradScalerOptions::rule() const {
  const LossScale dynamic = LossScale::dynamic({.init_scale = init_scale_,
                                                .growth_factor = growth_factor_,
                                                .backoff_factor = backoff_factor_,
                                                .growth_interval = growth_interval_,
                                                .min_scale = min_scale_,
                                                .max_scale = max_scale_,
                                                .hysteresis = hysteresis_});
  switch (loss_scale_) {
    case LossScaleKind::none:
      return LossScale::none();
    case LossScaleKind::fixed:
      return LossScale::fixed(init_scale_, min_scale_, max_scale_);
    case LossScaleKind::dynamic:
      return dynamic;
  }
  TORCH_CHECK(false, "loss_scale is no LossScaleKind; use LossScaleKind::none, fixed or dynamic");
}

inline std::string SkippedStep::message() const {
  const char* verb = next_scale < scale    ? " reducing loss scale to "
                     : next_scale == scale ? " keeping loss scale at "
                                           : " setting loss scale to ";
  return "Gradient overflow.  Skipping step, loss scaler " + std::to_string(loss_id) + verb +
         detail::python_float(next_scale);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
