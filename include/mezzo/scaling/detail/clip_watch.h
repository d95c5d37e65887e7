#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/scaling/detail/async_readback.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// How many finite steps in a row it takes to say that gradients are clipped too early.
inline constexpr int64_t kClippedSteps = 8;
/// How many steps of an optimizer are looked at. A bound that is 65536 times too tight holds from
/// the first step on; what comes later is not worth a cost in every step.
inline constexpr int64_t kWatchedSteps = 64;
/// What libtorch's clip_grad_norm_ leaves lies this close to max_norm: its float sums of millions
/// of squares are off by up to 9e-5. (Not so gradients of bfloat16, which are off by 7e-3.)
inline constexpr double kSameNumber = 2e-4;
/// Gradients of another batch differ at least by this.
inline constexpr double kOtherNumber = 1e-2;

/// Whether `value` is a number that people write down: of two significant digits.
inline bool is_round_number(double value) {
  const double unit = std::pow(10.0, std::floor(std::log10(value)) - 1.0);
  const double nearest = std::round(value / unit) * unit;
  return std::abs(value - nearest) <= kSameNumber * value;
}

/// Whether `value` may be the gradient of a mean over n outputs of a loss with constant slopes (L1,
/// hinge) and a weight w: its largest magnitude, a bias's, is w * scale / n from step to step. Of
/// the bounds that people write few look like that with n below 2^14 (at a scale of 65536, 4 and
/// 8), and none of 0.1, 0.5, 1, 2, 5 and 10.
inline bool may_be_slope_of_mean(double value, double scale) {
  for (const double weight : {1., 2., 5., 10., 20., 50., 100., 0.5, 0.2, 0.1, 0.05, 0.02, 0.01}) {
    const double outputs = weight * scale / value;
    if (outputs < 0x1p14 && std::abs(outputs - std::round(outputs)) <= 1e-6 * outputs) return true;
  }
  return false;
}

/// A number that stayed what it was over steps in which another one moved.
class HeldNumber {
 public:
  void see(double value, double other) {
    if (steps_ == 0 || std::abs(value - value_) > kSameNumber * value_) *this = {value, other};
    lowest_other_ = std::min(lowest_other_, other);
    highest_other_ = std::max(highest_other_, other);
    ++steps_;
  }

  /// A bound that somebody set holds while the gradients change. It is a round number; and so would
  /// be a bound on true gradients (max_norm times the scale, say), which is no mistake.
  bool is_bound_on_scaled(double scale) const {
    return steps_ >= kClippedSteps &&
           highest_other_ - lowest_other_ > kOtherNumber * highest_other_ &&
           is_round_number(value_) && !is_round_number(value_ / scale);
  }
  double value() const noexcept { return value_; }
  int64_t steps() const noexcept { return steps_; }

  HeldNumber() = default;

 private:
  HeldNumber(double value, double other)
      : value_(value), lowest_other_(other), highest_other_(other) {}

  double value_ = 0;
  double lowest_other_ = 0;
  double highest_other_ = 0;
  int64_t steps_ = 0;
};

/// Notices gradients that were clipped while they still carried the loss scale, from numbers that
/// the host has anyway: norm and largest magnitude. Clipping by norm holds the one and clipping by
/// value the other, while batches move the other of the two. The same gradients in every step (a
/// toy) hold both.
class ClipWatch {
 public:
  /// Whether it still wants to see steps of `optimizer`.
  bool wants(const void* optimizer) const {
    if (told_) return false;
    for (const Series& series : series_) {
      if (series.optimizer == optimizer) return series.looks < kWatchedSteps;
    }
    return series_.size() < kMostOptimizers;
  }

  /// Norm and largest magnitude of the gradients of a step, without the scale. Warns once in its
  /// life.
  void see(const void* optimizer, double scale, double norm, double max_abs) {
    if (!wants(optimizer)) return;
    Series& series = series_of(optimizer);
    ++series.looks;
    if (nonfinite_bits(norm) || nonfinite_bits(max_abs) || !(max_abs > 0)) return;
    series.norm.see(norm * scale, max_abs * scale);
    series.max_abs.see(max_abs * scale, norm * scale);
    const bool by_norm = series.norm.is_bound_on_scaled(scale);
    const bool by_value = series.max_abs.is_bound_on_scaled(scale) &&
                          !may_be_slope_of_mean(series.max_abs.value(), scale);
    if (!by_norm && !by_value) return;
    told_ = true;
    TORCH_WARN(by_norm
                   ? message("norm", "step(optimizer, {.max_norm = ...})", series.norm, scale)
                   : message("largest magnitude", "mezzo::clip_grad_value_(scaler, optimizer, ...)",
                             series.max_abs, scale));
  }

  /// The numbers of a step that a device decides; with its largest magnitude sent, they are looked
  /// at once they have arrived.
  void expect(const void* optimizer, std::shared_ptr<AsyncReadback> readback) {
    expected_.push_back({optimizer, std::move(readback)});
  }

  /// Sees what has arrived. Never waits.
  void poll() {
    std::erase_if(expected_, [&](const Expected& expected) {
      if (!expected.readback->is_there()) return false;
      const StepOutcome outcome = expected.readback->outcome();
      see(expected.optimizer, outcome.scale, *outcome.grad_norm, expected.readback->max_abs());
      return true;
    });
  }

 private:
  static constexpr std::size_t kMostOptimizers = 16;

  struct Series {
    const void* optimizer;
    HeldNumber norm;
    HeldNumber max_abs;
    int64_t looks = 0;
  };

  struct Expected {
    const void* optimizer;
    std::shared_ptr<AsyncReadback> readback;
  };

  Series& series_of(const void* optimizer) {
    for (Series& series : series_) {
      if (series.optimizer == optimizer) return series;
    }
    return series_.emplace_back(Series{optimizer, {}, {}});
  }

  static std::string message(const char* what, const char* instead, const HeldNumber& held,
                             double scale) {
    return c10::str("GradScaler: the ", what, " of the scaled gradients has been ",
                    four_digits(held.value()), " for ", held.steps(),
                    " steps in a row: it looks as if gradients were clipped while they still carry "
                    "the loss scale ",
                    scale, ", which is a bound of ", four_digits(held.value() / scale),
                    " on the true ones; call unscale_(optimizer) before clipping, or ", instead);
  }

  static std::string four_digits(double value) {
    std::array<char, 32> text{};
    std::snprintf(text.data(), text.size(), "%.4g", value);
    return text.data();
  }

  std::vector<Series> series_;
  std::vector<Expected> expected_;
  bool told_ = false;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
