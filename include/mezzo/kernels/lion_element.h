#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/step_use.h>

#include <c10/macros/Macros.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The coefficients of Lion for one step of one parameter.
struct LionCoefficients {
  double lr;
  double beta1;
  double beta2;
  double decay;  ///< of the parameter, 1 - lr * weight_decay
};

/// The numbers of a parameter group.
struct LionConstants {
  double beta1 = 0;
  double beta2 = 0;
  double weight_decay = 0;

  C10_HOST_DEVICE LionCoefficients at(double lr, int64_t /*step*/) const {
    return {.lr = lr, .beta1 = beta1, .beta2 = beta2, .decay = 1.0 - lr * weight_decay};
  }
};

/// Lion (Chen et al., 2023, algorithm 2) with decoupled weight decay: a step of lr in the direction
/// of the sign of beta1 * exp_avg + (1 - beta1) * gradient. Moment: exp_avg.
struct LionRule {
  using Constants = LionConstants;
  using Coefficients = LionCoefficients;
  static constexpr unsigned kMoments = 1;
  static constexpr CudaRule kCudaRule = CudaRule::lion;

  template <class Lanes>
  struct Element {
    using Value = typename Lanes::Value;
    using Scalar = typename Lanes::Format::Value;

    Value minus_lr, plus_lr, beta1, share1, beta2, share2, decay;

    C10_HOST_DEVICE C10_ALWAYS_INLINE explicit Element(const LionCoefficients& c) {
      Lanes::broadcast(static_cast<Scalar>(-c.lr), minus_lr);
      Lanes::broadcast(static_cast<Scalar>(c.lr), plus_lr);
      Lanes::broadcast(static_cast<Scalar>(c.beta1), beta1);
      Lanes::broadcast(static_cast<Scalar>(1.0 - c.beta1), share1);
      Lanes::broadcast(static_cast<Scalar>(c.beta2), beta2);
      Lanes::broadcast(static_cast<Scalar>(1.0 - c.beta2), share2);
      Lanes::broadcast(static_cast<Scalar>(c.decay), decay);
    }

    /// If the direction is 0 the parameter only decays; if it is NaN the parameter becomes NaN.
    /// \param gradient  unscaled and clipped
    C10_HOST_DEVICE C10_ALWAYS_INLINE void operator()(Value& parameter, Value& gradient,
                                                      Value (&moments)[kMoments]) const {
      Value addend = share1 * gradient;
      Value direction;
      Lanes::fma(beta1, moments[0], addend, direction);
      addend = share2 * gradient;
      Lanes::fma(beta2, moments[0], addend, moments[0]);
      const Value nothing = direction * 0;  // 0, or NaN
      Value change = direction > 0 ? minus_lr : nothing;
      change = direction < 0 ? plus_lr : change;
      Lanes::fma(parameter, decay, change, parameter);
    }
  };
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
