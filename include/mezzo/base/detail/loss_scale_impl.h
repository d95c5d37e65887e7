#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/loss_scale.h>

#include <c10/util/Exception.h>

#include <algorithm>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
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
              "The growth factor must be > 1.0. (growth_factor is ", growth_factor, ")");
  TORCH_CHECK(is_finite(backoff_factor) && backoff_factor > 0.0 && backoff_factor < 1.0,
              "The backoff factor must be < 1.0. (backoff_factor is ", backoff_factor,
              "; it must also be > 0.0)");
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
