/// \file
/// The loss scale's state machine as a value: what the next scale is, given whether this iteration
/// overflowed. It knows no tensor, no optimizer and no device, and runs on the host and in a
/// kernel.
#pragma once

#include <mezzo/base/version.h>

#include <c10/macros/Macros.h>

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

/// The parameters of a dynamic scale; the defaults are those of `torch.amp.GradScaler`.
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

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/base/detail/loss_scale_impl.h>  // IWYU pragma: export
