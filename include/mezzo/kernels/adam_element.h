#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/step_use.h>

#include <c10/macros/Macros.h>

#include <cmath>
#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The coefficients of Adam and AdamW for one step of one parameter.
struct AdamCoefficients {
  double beta1;
  double beta2;
  double eps;
  double decay;       ///< factor of the parameter: 1 - lr * weight_decay for AdamW, 1 for Adam
  double l2;          ///< Adam's weight_decay: l2 * parameter is added to the gradient
  double step_size;   ///< lr / (1 - beta1^step)
  double root_scale;  ///< 1 / sqrt(1 - beta2^step)
};

/// The numbers of a parameter group, from which a step's coefficients follow.
struct AdamConstants {
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  bool is_decoupled;  ///< AdamW

  /// `step` is 1 in the first step.
  C10_HOST_DEVICE AdamCoefficients at(double lr, int64_t step) const {
    const auto power = static_cast<double>(step);
    return {.beta1 = beta1,
            .beta2 = beta2,
            .eps = eps,
            .decay = is_decoupled ? 1.0 - lr * weight_decay : 1.0,
            .l2 = is_decoupled ? 0.0 : weight_decay,
            .step_size = lr / (1.0 - ::pow(beta1, power)),
            .root_scale = 1.0 / ::sqrt(1.0 - ::pow(beta2, power))};
  }
};

/// Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019) on as many elements as there
/// are lanes, in the order of torch::optim.
/// Moments: exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq.
template <bool kAmsgrad>
struct AdamRule {
  using Constants = AdamConstants;
  using Coefficients = AdamCoefficients;
  static constexpr unsigned kMoments = kAmsgrad ? 3 : 2;
  static constexpr CudaRule kCudaRule = CudaRule::adam;

  template <class Lanes>
  struct Element {
    using Value = typename Lanes::Value;
    using Scalar = typename Lanes::Format::Value;

    Value beta1, gradient_share, beta2, square_share, eps, decay, l2, minus_step_size, root_scale;
    bool has_l2;

    C10_HOST_DEVICE C10_ALWAYS_INLINE explicit Element(const AdamCoefficients& c)
        : has_l2(c.l2 != 0) {
      Lanes::broadcast(static_cast<Scalar>(c.beta1), beta1);
      Lanes::broadcast(static_cast<Scalar>(1.0 - c.beta1), gradient_share);
      Lanes::broadcast(static_cast<Scalar>(c.beta2), beta2);
      Lanes::broadcast(static_cast<Scalar>(1.0 - c.beta2), square_share);
      Lanes::broadcast(static_cast<Scalar>(c.eps), eps);
      Lanes::broadcast(static_cast<Scalar>(c.decay), decay);
      Lanes::broadcast(static_cast<Scalar>(c.l2), l2);
      Lanes::broadcast(static_cast<Scalar>(-c.step_size), minus_step_size);
      Lanes::broadcast(static_cast<Scalar>(c.root_scale), root_scale);
    }

    /// \param gradient  unscaled and clipped
    C10_HOST_DEVICE C10_ALWAYS_INLINE void operator()(Value& parameter, Value& gradient,
                                                      Value (&moments)[kMoments]) const {
      if (has_l2) Lanes::fma(l2, parameter, gradient, gradient);
      Value addend = gradient_share * gradient;
      Lanes::fma(beta1, moments[0], addend, moments[0]);
      addend = square_share * gradient * gradient;
      Lanes::fma(beta2, moments[1], addend, moments[1]);
      Value square = moments[1];
      if constexpr (kAmsgrad) {
        moments[2] = moments[2] > square ? moments[2] : square;
        square = moments[2];
      }
      Value denominator;
      Lanes::sqrt(square, denominator);
      Lanes::fma(denominator, root_scale, eps, denominator);
      const Value ratio = moments[0] / denominator;
      addend = parameter * decay;
      Lanes::fma(minus_step_size, ratio, addend, parameter);
    }
  };
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
