/// \file
/// Loss scaling as a value: the options of a loss scale, and the options by which it moves. It
/// knows no tensor, optimizer or device, and runs on the host and in a kernel.
#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>

#include <c10/macros/Macros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// The smallest floor at which the scale and its reciprocal are both normal, finite floats: 2^-126.
inline constexpr double kDefaultMinScale = std::numeric_limits<float>::min();

/// No ceiling other than kMaxGrownScale.
inline constexpr double kNoMaxScale = std::numeric_limits<double>::infinity();

/// The largest scale that growth reaches, 2^126: its reciprocal is the smallest normal float. A
/// subnormal reciprocal loses bits, and is 0 if subnormals are flushed.
inline constexpr float kMaxGrownScale = 1 / std::numeric_limits<float>::min();

/// The ceiling of Apex's dynamic loss scale, 2^24.
inline constexpr double kApexMaxScale = 16777216.0;

/// How a loss scale moves.
enum class LossScaleMode : uint8_t {
  none,    ///< constant 1
  fixed,   ///< constant
  dynamic  ///< up after clean iterations, down after an inf or NaN
};

namespace detail {

/// A number without a name. Constructors refuse it, since it could be any of the options.
template <class T>
concept BareNumber = std::is_arithmetic_v<T>;

}  // namespace detail

/// The part of a loss scale that changes from one iteration to the next.
struct LossScaleState {
  float scale = 1.0F;              ///< factor of the loss, positive and finite
  int32_t growth_tracker = 0;      ///< clean iterations since the scale last moved
  int32_t hysteresis_tracker = 1;  ///< overflows in a row, from now, until the scale backs off

  friend bool operator==(const LossScaleState&, const LossScaleState&) = default;
};

/// The options of a loss scale, and of the GradScaler that moves it: torch.amp's arguments in their
/// order, then mezzo's own. An aggregate: `GradScaler({.init_scale = 1024, .enabled = is_half})`.
/// Defaults are those of torch.amp.GradScaler, except `min_scale`.
///
/// The options by which the scale moves is `next`:
/// \code
///   auto options = mezzo::GradScalerOptions::dynamic({.init_scale = 1024, .growth_interval = 100});
///   auto state = options.initial_state();
///   state = options.next(state, /*found_inf=*/true);  // 512
/// \endcode
struct GradScalerOptions {
  /// The scale before the first iteration, or the constant scale if `mode` is fixed; above 0.
  double init_scale = 65536.0;
  /// The scale is multiplied by this after `growth_interval` clean iterations in a row; above 1.
  double growth_factor = 2.0;
  /// The scale is multiplied by this after an iteration with an inf or NaN; between 0 and 1.
  double backoff_factor = 0.5;
  /// The number of clean iterations in a row after which the scale grows; at least 1.
  int64_t growth_interval = 2000;
  /// If `false`, the scale is 1, nothing is checked, and `step` always steps.
  bool enabled = true;

  /// The floor of the scale. 0 means no floor, as in torch: after 150 backoffs from 1 the scale is
  /// 0, and stays 0.
  double min_scale = kDefaultMinScale;
  /// The ceiling of the scale.
  double max_scale = kNoMaxScale;
  /// The number of overflows in a row after which the scale backs off; each of them skips its step.
  /// At least 1.
  int64_t hysteresis = 1;
  /// `none` and `fixed` keep the scale at 1 or init_scale, and still skip a step with inf or NaN.
  LossScaleMode mode = LossScaleMode::dynamic;

  /// Whether `unscale_` accepts fp16 gradients (of fp16 parameters without master weights). They
  /// underflow easily, so torch.amp refuses them.
  bool allow_fp16_gradients = false;
  /// The number of this scaler in the line about a skipped step, for programs with several scalers.
  int64_t loss_id = 0;

  /// Returns a scale that stays 1.
  static GradScalerOptions none() { return {.init_scale = 1.0, .mode = LossScaleMode::none}; }

  /// Returns a constant scale, such as 128. The bounds apply to a scale that is set by hand
  /// (GradScaler::update). \throws c10::Error as `validated` does
  static GradScalerOptions fixed(double scale, double min_scale = kDefaultMinScale,
                                 double max_scale = kNoMaxScale) {
    return GradScalerOptions{.init_scale = scale,
                             .min_scale = min_scale,
                             .max_scale = max_scale,
                             .mode = LossScaleMode::fixed}
        .validated();
  }

  /// Returns a scale that backs off on overflow and grows after `growth_interval` clean iterations
  /// in a row. \throws c10::Error as `validated` does
  static GradScalerOptions dynamic(const GradScalerOptions& options) {
    TORCH_CHECK(options.mode == LossScaleMode::dynamic,
                "GradScalerOptions::dynamic: mode is another; leave it out, or give it to "
                "GradScaler({...})");
    return options.validated();
  }
  /// Returns torch.amp's default.
  static GradScalerOptions dynamic() { return {}; }

  /// Returns these options, with the scale and its bounds rounded to float, and 1 for
  /// LossScaleMode::none. Whoever takes a GradScalerOptions calls it.
  /// \throws c10::Error for a number out of range, even one that `mode` does not use, naming it and
  ///   its range
  GradScalerOptions validated() const;

  /// Returns the state before the first iteration.
  LossScaleState initial_state() const noexcept;

  /// Returns the state after an iteration. Bit-equal to `at::_amp_update_scale_`, except that torch
  /// has no min_scale, max_scale or hysteresis, and grows beyond kMaxGrownScale. For a dynamic
  /// scale:
  ///
  ///     if found_inf:
  ///         growth_tracker = 0
  ///         if hysteresis_tracker > 1: hysteresis_tracker -= 1
  ///         else:                   scale = clamp(float(scale * backoff_factor))
  ///     else:
  ///         hysteresis_tracker = hysteresis
  ///         growth_tracker += 1
  ///         if growth_tracker == growth_interval:
  ///             growth_tracker = 0
  ///             grown = float(scale * growth_factor)
  ///             if isfinite(grown): scale = clamp(min(grown, max(scale, kMaxGrownScale)))
  ///
  /// Products are computed in double and rounded to float. As in torch, the tracker is compared for
  /// equality: an interval lowered below the present tracker takes effect after the next overflow.
  /// The tracker stops at 2^31 - 1.
  C10_HOST_DEVICE LossScaleState next(LossScaleState state, bool found_inf) const noexcept;

  /// Returns `scale` forced into [min_scale, max_scale]; NaN stays NaN.
  C10_HOST_DEVICE float clamp(float scale) const noexcept {
    if (scale < min_scale) scale = static_cast<float>(min_scale);
    return scale > max_scale ? static_cast<float>(max_scale) : scale;
  }

  friend bool operator==(const GradScalerOptions&, const GradScalerOptions&) = default;
};

namespace detail {

inline constexpr double kFloatMax = std::numeric_limits<float>::max();

/// Whether `value` is neither inf nor NaN. Reads the bits, since under -ffast-math the compiler may
/// assume that there is no NaN. Callers test this before they compare.
inline bool is_finite(double value) noexcept { return !is_nonfinite(value); }

/// Whether `value` rounds to a positive float.
inline bool is_positive_float(double value) noexcept {
  return value >= std::numeric_limits<float>::denorm_min();
}

inline void check_scale_value(const char* name, double value, double low, double high) {
  TORCH_CHECK(is_finite(value) && is_positive_float(value) && value >= low && value <= high, name,
              " is ", value, "; it must be positive and finite as a float, and between min_scale (",
              low, ") and max_scale (", high, ")");
}

}  // namespace detail

inline GradScalerOptions GradScalerOptions::validated() const {
  using detail::is_finite, detail::is_positive_float, detail::kFloatMax;
  TORCH_CHECK(is_finite(growth_factor) && growth_factor > 1.0,
              "The growth factor must be > 1.0. (growth_factor is ", growth_factor,
              "; 2 is usual)");
  TORCH_CHECK(is_finite(backoff_factor) && backoff_factor > 0.0 && backoff_factor < 1.0,
              "The backoff factor must be < 1.0. (backoff_factor is ", backoff_factor,
              "; it must be > 0.0 too: 0.5 is usual)");
  constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
  TORCH_CHECK(growth_interval >= 1 && growth_interval <= kInt32Max, "growth_interval is ",
              growth_interval, "; it must be between 1 and ", kInt32Max);
  TORCH_CHECK(hysteresis >= 1 && hysteresis <= kInt32Max, "hysteresis is ", hysteresis,
              "; it must be between 1 (every overflow backs off) and ", kInt32Max);
  TORCH_CHECK(is_finite(min_scale) && (min_scale == 0 || is_positive_float(min_scale)) &&
                  min_scale <= kFloatMax,
              "min_scale is ", min_scale,
              "; it must be 0 (no floor, as in torch) or a positive, finite float");
  const bool max_scale_is_nan = !is_finite(max_scale) && !detail::is_positive_infinity(max_scale);
  TORCH_CHECK(!max_scale_is_nan && is_positive_float(max_scale) && max_scale >= min_scale,
              "max_scale is ", max_scale, "; it must be positive and not below min_scale (",
              min_scale, ")");
  detail::check_scale_value("init_scale", init_scale, min_scale, std::min(max_scale, kFloatMax));
  TORCH_CHECK(
      mode == LossScaleMode::none || mode == LossScaleMode::fixed || mode == LossScaleMode::dynamic,
      "mode is not a LossScaleMode; use LossScaleMode::none, fixed or dynamic");
  GradScalerOptions rounded = *this;
  rounded.init_scale = mode == LossScaleMode::none ? 1.0 : static_cast<float>(init_scale);
  rounded.min_scale = static_cast<float>(min_scale);
  rounded.max_scale = max_scale > kFloatMax ? kNoMaxScale : double{static_cast<float>(max_scale)};
  return rounded;
}

inline LossScaleState GradScalerOptions::initial_state() const noexcept {
  return {.scale = static_cast<float>(init_scale),
          .growth_tracker = 0,
          .hysteresis_tracker = static_cast<int32_t>(hysteresis)};
}

C10_HOST_DEVICE inline LossScaleState GradScalerOptions::next(LossScaleState state,
                                                              bool found_inf) const noexcept {
  if (mode != LossScaleMode::dynamic) return state;
  if (found_inf) {
    state.growth_tracker = 0;
    if (state.hysteresis_tracker > 1) {
      --state.hysteresis_tracker;
      return state;
    }
    state.scale = clamp(static_cast<float>(state.scale * backoff_factor));
    return state;
  }
  state.hysteresis_tracker = static_cast<int32_t>(hysteresis);
  if (state.growth_tracker < INT32_MAX) ++state.growth_tracker;
  if (state.growth_tracker != growth_interval) return state;
  state.growth_tracker = 0;
  const auto grown = static_cast<float>(state.scale * growth_factor);
  if (!detail::is_nonfinite(grown)) {
    constexpr float kMost = kMaxGrownScale;  // which device code knows only as a local constant
    const float highest = state.scale > kMost ? state.scale : kMost;
    state.scale = clamp(grown < highest ? grown : highest);
  }
  return state;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
