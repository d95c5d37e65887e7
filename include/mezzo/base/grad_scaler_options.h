/// \file
/// GradScalerOptions, and the update of a loss scale on the host and in kernels.
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

/// 2^-126: the smallest scale that is normal and has a finite reciprocal in float32.
inline constexpr double kDefaultMinScale = std::numeric_limits<float>::min();

/// No upper bound other than kMaxGrownScale.
inline constexpr double kNoMaxScale = std::numeric_limits<double>::infinity();

/// 2^126: growth stops here, since a larger scale has a subnormal reciprocal, which loses precision
/// and is 0 if subnormals are flushed.
inline constexpr float kMaxGrownScale = 1 / std::numeric_limits<float>::min();

/// 2^24: the maximum of Apex's dynamic loss scale.
inline constexpr double kApexMaxScale = 16777216.0;

/// How a loss scale changes.
enum class LossScaleMode : uint8_t {
  none,    ///< constant 1
  fixed,   ///< constant
  dynamic  ///< grows after iterations without inf/NaN, backs off after an inf or NaN
};

namespace detail {

/// A number that does not name its option. Constructors that take options reject it.
template <class T>
concept BareNumber = std::is_arithmetic_v<T>;

}  // namespace detail

/// The state of a loss scale.
struct LossScaleState {
  float scale = 1.0F;              ///< positive and finite
  int32_t growth_tracker = 0;      ///< consecutive iterations without inf/NaN or a change of scale
  int32_t hysteresis_tracker = 1;  ///< consecutive overflows left until the scale backs off

  friend bool operator==(const LossScaleState&, const LossScaleState&) = default;
};

/// Options of GradScaler: torch.amp's arguments in torch's order and with its defaults, then
/// mezzo's. An aggregate: `GradScaler({.init_scale = 1024, .enabled = is_fp16})`.
///
/// `next` computes the scale of the next iteration without tensors:
/// \code
///   auto options = mezzo::GradScalerOptions::dynamic({.init_scale = 1024});
///   mezzo::LossScaleState state = options.initial_state();
///   state = options.next(state, /*found_inf=*/true);  // state.scale == 512
/// \endcode
struct GradScalerOptions {
  /// The initial scale, or the constant scale if `mode` is fixed; above 0.
  double init_scale = 65536.0;
  /// Factor of the scale after `growth_interval` consecutive iterations without inf/NaN; above 1.
  double growth_factor = 2.0;
  /// Factor of the scale after an iteration with an inf or NaN; between 0 and 1.
  double backoff_factor = 0.5;
  /// Number of consecutive iterations without inf/NaN after which the scale grows; at least 1.
  int64_t growth_interval = 2000;
  /// If false, the scale is 1, and `step` always steps, without a check.
  bool enabled = true;

  /// Lower bound of the scale. 0 is torch's behavior: after 150 backoffs from 1 the scale is 0, and
  /// never grows again.
  double min_scale = kDefaultMinScale;
  /// Upper bound of the scale.
  double max_scale = kNoMaxScale;
  /// Number of consecutive overflows, each of which skips its step, after which the scale backs
  /// off; at least 1.
  int64_t hysteresis = 1;
  /// With `none` the scale is 1, with `fixed` init_scale. Steps with inf or NaN are skipped.
  LossScaleMode mode = LossScaleMode::dynamic;

  /// Allows unscaling fp16 gradients of fp16 parameters without master weights, for which torch.amp
  /// throws, since they underflow.
  bool allow_fp16_gradients = false;
  /// Identifies the scaler in the message about a skipped step.
  int64_t loss_id = 0;

  /// Returns the options of a scale that is always 1.
  static GradScalerOptions none() { return {.init_scale = 1.0, .mode = LossScaleMode::none}; }

  /// Returns the options of a constant scale. The bounds apply to GradScaler::update(new_scale).
  /// \throws c10::Error as `validated` does
  static GradScalerOptions fixed(double scale, double min_scale = kDefaultMinScale,
                                 double max_scale = kNoMaxScale) {
    return GradScalerOptions{.init_scale = scale,
                             .min_scale = min_scale,
                             .max_scale = max_scale,
                             .mode = LossScaleMode::fixed}
        .validated();
  }

  /// Returns validated options of a dynamic scale. \throws c10::Error as `validated` does
  static GradScalerOptions dynamic(const GradScalerOptions& options) {
    TORCH_CHECK(options.mode == LossScaleMode::dynamic,
                "GradScalerOptions::dynamic: mode must be LossScaleMode::dynamic; omit it, or pass "
                "the options to GradScaler({...})");
    return options.validated();
  }
  /// Returns torch.amp's defaults.
  static GradScalerOptions dynamic() { return {}; }

  /// Returns these options with the scale (1 for LossScaleMode::none) and its bounds rounded to
  /// float32. Every function that takes a GradScalerOptions validates it with this.
  /// \throws c10::Error for a value out of range, even if `mode` does not use it
  GradScalerOptions validated() const;

  /// Returns the state before the first iteration.
  LossScaleState initial_state() const noexcept;

  /// Returns the state after an iteration, bitwise identical to `at::_amp_update_scale_`, except
  /// for min_scale, max_scale, hysteresis and kMaxGrownScale. For a dynamic scale:
  ///
  ///     if found_inf:
  ///         growth_tracker = 0
  ///         if hysteresis_tracker > 1: hysteresis_tracker -= 1
  ///         else:                      scale = clamp(float(scale * backoff_factor))
  ///     else:
  ///         hysteresis_tracker = hysteresis
  ///         growth_tracker += 1
  ///         if growth_tracker == growth_interval:
  ///             growth_tracker = 0
  ///             grown = float(scale * growth_factor)
  ///             if isfinite(grown): scale = clamp(min(grown, max(scale, kMaxGrownScale)))
  ///
  /// Products are computed in float64 and rounded to float32. As in torch, an interval that is set
  /// below the current growth_tracker takes effect after the next overflow. growth_tracker
  /// saturates at 2^31 - 1.
  C10_HOST_DEVICE LossScaleState next(LossScaleState state, bool found_inf) const noexcept;

  /// Returns `scale` clamped to [min_scale, max_scale]; NaN stays NaN.
  C10_HOST_DEVICE float clamp(float scale) const noexcept {
    if (scale < min_scale) scale = static_cast<float>(min_scale);
    return scale > max_scale ? static_cast<float>(max_scale) : scale;
  }

  friend bool operator==(const GradScalerOptions&, const GradScalerOptions&) = default;
};

namespace detail {

inline constexpr double kFloatMax = std::numeric_limits<float>::max();

/// Returns whether `value` is neither inf nor NaN, also under -ffast-math.
inline bool is_finite(double value) noexcept { return !is_nonfinite(value); }

/// Returns whether `value` rounds to a positive float32.
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
              "; it must be 0 (no lower bound, as in torch) or a positive, finite float");
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
    constexpr float kLimit = kMaxGrownScale;  // device code cannot read the global constant
    const float highest = state.scale > kLimit ? state.scale : kLimit;
    state.scale = clamp(grown < highest ? grown : highest);
  }
  return state;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
