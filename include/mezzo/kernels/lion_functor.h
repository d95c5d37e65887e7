#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/step_args.h>

#include <c10/macros/Macros.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Coefficients of Lion for one step of one parameter.
struct LionCoefficients {
  double lr;
  double beta1;
  double beta2;
  double decay_factor;  ///< 1 - lr * weight_decay
};

/// Hyperparameters of a param group.
struct LionHyperParams {
  double beta1 = 0;
  double beta2 = 0;
  double weight_decay = 0;

  C10_HOST_DEVICE LionCoefficients coefficients(double lr, int64_t /*step*/) const {
    return {.lr = lr, .beta1 = beta1, .beta2 = beta2, .decay_factor = 1.0 - lr * weight_decay};
  }
};

/// Lion (Chen et al., 2023, algorithm 2) with decoupled weight decay:
/// parameter -= lr * sign(beta1 * exp_avg + (1 - beta1) * gradient). Moment: exp_avg.
struct LionFunctor {
  using HyperParams = LionHyperParams;
  using Coefficients = LionCoefficients;
  static constexpr unsigned kNumMoments = 1;
  static constexpr OptimizerKind kOptimizerKind = OptimizerKind::lion;

  template <class Vec>
  struct Update {
    using Value = typename Vec::Value;
    using Scalar = typename Vec::Format::opmath_t;

    Value minus_lr, plus_lr, beta1, one_minus_beta1, beta2, one_minus_beta2, decay_factor;

    C10_HOST_DEVICE C10_ALWAYS_INLINE explicit Update(const LionCoefficients& c) {
      Vec::broadcast(static_cast<Scalar>(-c.lr), minus_lr);
      Vec::broadcast(static_cast<Scalar>(c.lr), plus_lr);
      Vec::broadcast(static_cast<Scalar>(c.beta1), beta1);
      Vec::broadcast(static_cast<Scalar>(1.0 - c.beta1), one_minus_beta1);
      Vec::broadcast(static_cast<Scalar>(c.beta2), beta2);
      Vec::broadcast(static_cast<Scalar>(1.0 - c.beta2), one_minus_beta2);
      Vec::broadcast(static_cast<Scalar>(c.decay_factor), decay_factor);
    }

    /// With a direction of 0 the parameter only decays; NaN makes it NaN.
    /// \param gradient  unscaled and clipped
    C10_HOST_DEVICE C10_ALWAYS_INLINE void operator()(Value& parameter, Value& gradient,
                                                      Value (&moments)[kNumMoments]) const {
      Value addend = one_minus_beta1 * gradient;
      Value direction;
      Vec::fma(beta1, moments[0], addend, direction);
      addend = one_minus_beta2 * gradient;
      Vec::fma(beta2, moments[0], addend, moments[0]);
      const Value zero_or_nan = direction * 0;
      Value change = direction > 0 ? minus_lr : zero_or_nan;
      change = direction < 0 ? plus_lr : change;
      Vec::fma(parameter, decay_factor, change, parameter);
    }
  };
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
