#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/step_args.h>

#include <c10/macros/Macros.h>

#include <cmath>
#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Coefficients of Adam and AdamW for one step of one parameter.
struct AdamCoefficients {
  double beta1;
  double beta2;
  double eps;
  double decay_factor;  ///< 1 - lr * weight_decay for AdamW, 1 for Adam
  double l2;            ///< weight_decay for Adam, 0 for AdamW: gradient += l2 * parameter
  double step_size;     ///< lr / (1 - beta1^step)
  double inv_bias_correction2_sqrt;  ///< 1 / sqrt(1 - beta2^step)
};

/// Hyperparameters of a param group.
struct AdamHyperParams {
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  bool is_decoupled;  ///< AdamW's weight decay

  /// \param step  1 in the first step
  C10_HOST_DEVICE AdamCoefficients coefficients(double lr, int64_t step) const {
    const auto power = static_cast<double>(step);
    return {.beta1 = beta1,
            .beta2 = beta2,
            .eps = eps,
            .decay_factor = is_decoupled ? 1.0 - lr * weight_decay : 1.0,
            .l2 = is_decoupled ? 0.0 : weight_decay,
            .step_size = lr / (1.0 - ::pow(beta1, power)),
            .inv_bias_correction2_sqrt = 1.0 / ::sqrt(1.0 - ::pow(beta2, power))};
  }
};

/// Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019), in torch::optim's order of
/// operations. Moments: exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq.
template <bool kAmsgrad>
struct AdamFunctor {
  using HyperParams = AdamHyperParams;
  using Coefficients = AdamCoefficients;
  static constexpr unsigned kNumMoments = kAmsgrad ? 3 : 2;
  static constexpr OptimizerKind kOptimizerKind = OptimizerKind::adam;

  template <class Vec>
  struct Update {
    using Value = typename Vec::Value;
    using Scalar = typename Vec::Format::opmath_t;

    Value beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay_factor, l2, minus_step_size,
        inv_bias_correction2_sqrt;
    bool has_l2;

    C10_HOST_DEVICE C10_ALWAYS_INLINE explicit Update(const AdamCoefficients& c)
        : has_l2(c.l2 != 0) {
      Vec::broadcast(static_cast<Scalar>(c.beta1), beta1);
      Vec::broadcast(static_cast<Scalar>(1.0 - c.beta1), one_minus_beta1);
      Vec::broadcast(static_cast<Scalar>(c.beta2), beta2);
      Vec::broadcast(static_cast<Scalar>(1.0 - c.beta2), one_minus_beta2);
      Vec::broadcast(static_cast<Scalar>(c.eps), eps);
      Vec::broadcast(static_cast<Scalar>(c.decay_factor), decay_factor);
      Vec::broadcast(static_cast<Scalar>(c.l2), l2);
      Vec::broadcast(static_cast<Scalar>(-c.step_size), minus_step_size);
      Vec::broadcast(static_cast<Scalar>(c.inv_bias_correction2_sqrt), inv_bias_correction2_sqrt);
    }

    /// \param gradient  unscaled and clipped
    C10_HOST_DEVICE C10_ALWAYS_INLINE void operator()(Value& parameter, Value& gradient,
                                                      Value (&moments)[kNumMoments]) const {
      if (has_l2) Vec::fma(l2, parameter, gradient, gradient);
      Value addend = one_minus_beta1 * gradient;
      Vec::fma(beta1, moments[0], addend, moments[0]);
      addend = one_minus_beta2 * gradient * gradient;
      Vec::fma(beta2, moments[1], addend, moments[1]);
      Value square = moments[1];
      if constexpr (kAmsgrad) {
        moments[2] = moments[2] > square ? moments[2] : square;
        square = moments[2];
      }
      Value denominator;
      Vec::sqrt(square, denominator);
      Vec::fma(denominator, inv_bias_correction2_sqrt, eps, denominator);
      const Value ratio = moments[0] / denominator;
      addend = parameter * decay_factor;
      Vec::fma(minus_step_size, ratio, addend, parameter);
    }
  };
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
