/// \file
/// The loss scale's state machine as a value: what the next scale is, given whether this iteration
/// overflowed. It knows no tensor, no optimizer and no device, and runs on the host and in a
/// kernel.
#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>

#include <c10/macros/Macros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <limits>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// The smallest floor at which the scale and its reciprocal are both normal, finite floats: 2^-126.
inline constexpr double kDefaultMinScale = std::numeric_limits<float>::min();

/// No ceiling but float's own: growth that would not be finite is not taken.
inline constexpr double kNoMaxScale = std::numeric_limits<double>::infinity();

/// The ceiling that Apex's dynamic loss scale has, 2^24, for who asks for it.
inline constexpr double kApexMaxScale = 16777216.0;

inline constexpr double kDefaultInitScale = 65536.0;
inline constexpr double kDefaultGrowthFactor = 2.0;
inline constexpr double kDefaultBackoffFactor = 0.5;
inline constexpr int64_t kDefaultGrowthInterval = 2000;

/// How the scale moves: not at all and equal to 1, not at all, or up and down.
enum class LossScaleKind : uint8_t { none, fixed, dynamic };

/// Everything that changes from one iteration to the next.
struct LossScaleState {
  float scale = 1.0F;
  int32_t growth_tracker = 0;   ///< clean iterations since the scale last moved
  int32_t hysteresis_left = 1;  ///< overflows in a row, from now, until the scale backs off

  friend bool operator==(const LossScaleState&, const LossScaleState&) = default;
};

/// The parameters of a dynamic scale; the defaults are those of `torch.amp.GradScaler` but for
/// `min_scale`, which torch has not.
struct DynamicLossScaleOptions {
  double init_scale = kDefaultInitScale;
  double growth_factor = kDefaultGrowthFactor;
  double backoff_factor = kDefaultBackoffFactor;
  int64_t growth_interval = kDefaultGrowthInterval;
  double min_scale = kDefaultMinScale;  ///< 0 is torch's behaviour: 160 backoffs from 1 end at 0
  double max_scale = kNoMaxScale;
  int64_t hysteresis = 1;  ///< 1: every overflow backs off
};

/// A rule for the loss scale, immutable once made; construct it through one of the three factories,
/// which validate all they take and throw `c10::Error` naming the parameter and its range.
///
/// \code
///   auto rule = mezzo::LossScale::dynamic({.init_scale = 1024, .growth_interval = 100});
///   auto state = rule.initial_state();
///   state = rule.next(state, /*found_inf=*/true);  // 512
/// \endcode
class LossScale {
 public:
  /// Scale 1, for good.
  static LossScale none();

  /// A constant scale, such as 128; the bounds are for who sets another by hand.
  /// \throws c10::Error unless `scale` is positive and finite as a float and within the bounds
  static LossScale fixed(double scale, double min_scale = kDefaultMinScale,
                         double max_scale = kNoMaxScale);

  /// Backs off on overflow and grows after `growth_interval` clean iterations in a row.
  /// \throws c10::Error unless growth_factor > 1, 0 < backoff_factor < 1, growth_interval >= 1,
  ///   hysteresis >= 1 and 0 <= min_scale <= init_scale <= max_scale with init_scale > 0 and finite
  static LossScale dynamic(const DynamicLossScaleOptions& options = {});

  /// The state before the first iteration.
  LossScaleState initial_state() const noexcept;

  /// The state after an iteration, in the order of `at::_amp_update_scale_` and bit-equal to it:
  /// factors are double, their product is rounded to float, and growth that is not finite is not
  /// taken. Where torch has no equal: the result is clamped to [min_scale, max_scale]; and of
  /// `hysteresis` overflows in a row all but the last leave the scale alone (a clean iteration
  /// refills the count, as Apex does). Every overflow restarts the growth interval.
  ///
  /// As in torch, the tracker is compared for equality: an interval lowered below the present
  /// tracker takes effect after the next overflow.
  C10_HOST_DEVICE LossScaleState next(LossScaleState state, bool found_inf) const noexcept;

  /// `scale` forced into [min_scale, max_scale]; NaN stays NaN.
  C10_HOST_DEVICE float clamp(float scale) const noexcept {
    const float floored = scale < min_scale_ ? min_scale_ : scale;
    return floored > max_scale_ ? max_scale_ : floored;
  }

  LossScaleKind kind() const noexcept { return kind_; }
  double init_scale() const noexcept { return init_scale_; }
  double growth_factor() const noexcept { return growth_factor_; }
  double backoff_factor() const noexcept { return backoff_factor_; }
  int64_t growth_interval() const noexcept { return growth_interval_; }
  float min_scale() const noexcept { return min_scale_; }
  float max_scale() const noexcept { return max_scale_; }
  int32_t hysteresis() const noexcept { return hysteresis_; }

  /// The parameters, as `dynamic` takes them (a fixed scale has its value in `init_scale`).
  DynamicLossScaleOptions options() const noexcept;

 private:
  LossScale(LossScaleKind kind, const DynamicLossScaleOptions& options) noexcept;

  double growth_factor_;
  double backoff_factor_;
  int64_t growth_interval_;
  float init_scale_;
  float min_scale_;
  float max_scale_;
  int32_t hysteresis_;
  LossScaleKind kind_;
};

namespace detail {

inline constexpr double kLargestFloat = std::numeric_limits<float>::max();

// Comparisons written so that NaN fails them, and true under -ffast-math as well, where the
// compiler may assume that no NaN comes by: the bits are asked first.
inline bool is_finite(double value) noexcept { return !nonfinite_bits(value); }

/// What rounds to a positive float.
inline bool is_positive_float(double value) noexcept {
  return value >= std::numeric_limits<float>::denorm_min();
}

inline void check_scale_value(const char* name, double value, double low, double high) {
  TORCH_CHECK(is_finite(value) && is_positive_float(value) && value >= low && value <= high, name,
              " is ", value, "; it must be positive and finite as a float, and between min_scale (",
              low, ") and max_scale (", high, ")");
}

inline void check_bounds(double min_scale, double max_scale) {
  TORCH_CHECK(is_finite(min_scale) && (min_scale == 0 || is_positive_float(min_scale)) &&
                  min_scale <= kLargestFloat,
              "min_scale is ", min_scale,
              "; it must be 0 (no floor, as in torch) or a positive, finite float");
  const bool is_nan = !is_finite(max_scale) && !is_positive_infinity(max_scale);
  TORCH_CHECK(!is_nan && is_positive_float(max_scale) && max_scale >= min_scale, "max_scale is ",
              max_scale, "; it must be positive and not below min_scale (", min_scale, ")");
}

inline void check_factors(double growth_factor, double backoff_factor) {
  TORCH_CHECK(is_finite(growth_factor) && growth_factor > 1.0,
              "The growth factor must be > 1.0. (growth_factor is ", growth_factor,
              "; 2 is usual)");
  TORCH_CHECK(is_finite(backoff_factor) && backoff_factor > 0.0 && backoff_factor < 1.0,
              "The backoff factor must be < 1.0. (backoff_factor is ", backoff_factor,
              "; it must be > 0.0 too: 0.5 is usual)");
}

inline void check_counts(int64_t growth_interval, int64_t hysteresis) {
  constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();
  TORCH_CHECK(growth_interval >= 1 && growth_interval <= kLargest, "growth_interval is ",
              growth_interval, "; it must be between 1 and ", kLargest);
  TORCH_CHECK(hysteresis >= 1 && hysteresis <= kLargest, "hysteresis is ", hysteresis,
              "; it must be between 1 (every overflow backs off) and ", kLargest);
}

}  // namespace detail

inline LossScale::LossScale(LossScaleKind kind, const DynamicLossScaleOptions& options) noexcept
    : growth_factor_(options.growth_factor),
      backoff_factor_(options.backoff_factor),
      growth_interval_(options.growth_interval),
      init_scale_(static_cast<float>(options.init_scale)),
      min_scale_(static_cast<float>(options.min_scale)),
      max_scale_(options.max_scale > detail::kLargestFloat ? std::numeric_limits<float>::infinity()
                                                           : static_cast<float>(options.max_scale)),
      hysteresis_(static_cast<int32_t>(options.hysteresis)),
      kind_(kind) {}

inline LossScale LossScale::none() { return {LossScaleKind::none, {.init_scale = 1.0}}; }

inline LossScale LossScale::fixed(double scale, double min_scale, double max_scale) {
  detail::check_bounds(min_scale, max_scale);
  detail::check_scale_value("scale", scale, min_scale, std::min(max_scale, detail::kLargestFloat));
  return {LossScaleKind::fixed,
          {.init_scale = scale, .min_scale = min_scale, .max_scale = max_scale}};
}

inline LossScale LossScale::dynamic(const DynamicLossScaleOptions& options) {
  detail::check_factors(options.growth_factor, options.backoff_factor);
  detail::check_counts(options.growth_interval, options.hysteresis);
  detail::check_bounds(options.min_scale, options.max_scale);
  detail::check_scale_value("init_scale", options.init_scale, options.min_scale,
                            std::min(options.max_scale, detail::kLargestFloat));
  return {LossScaleKind::dynamic, options};
}

inline LossScaleState LossScale::initial_state() const noexcept {
  return {.scale = init_scale_, .growth_tracker = 0, .hysteresis_left = hysteresis_};
}

inline DynamicLossScaleOptions LossScale::options() const noexcept {
  return {.init_scale = init_scale_,
          .growth_factor = growth_factor_,
          .backoff_factor = backoff_factor_,
          .growth_interval = growth_interval_,
          .min_scale = min_scale_,
          .max_scale = max_scale_,
          .hysteresis = hysteresis_};
}

C10_HOST_DEVICE inline LossScaleState LossScale::next(LossScaleState state,
                                                      bool found_inf) const noexcept {
  if (kind_ != LossScaleKind::dynamic) return state;
  if (found_inf) {
    state.growth_tracker = 0;
    if (state.hysteresis_left > 1) {
      --state.hysteresis_left;
      return state;
    }
    state.scale = clamp(static_cast<float>(state.scale * backoff_factor_));
    return state;
  }
  state.hysteresis_left = hysteresis_;
  ++state.growth_tracker;
  if (state.growth_tracker != growth_interval_) return state;
  state.growth_tracker = 0;
  const auto grown = static_cast<float>(state.scale * growth_factor_);
  if (!detail::nonfinite_bits(grown)) state.scale = clamp(grown);
  return state;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
