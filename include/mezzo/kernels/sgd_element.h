#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/step_use.h>

#include <c10/macros/Macros.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The coefficients of SGD for one step of one parameter.
struct SgdCoefficients {
  double lr;
  double momentum;    ///< 0 in a first step with dampening, which sets the buffer to the gradient
  double share;       ///< factor of the gradient: 1 - dampening; 1 in a first step with dampening
  double look_ahead;  ///< Nesterov: factor of the buffer in the update; otherwise 0
  double weight_decay;
};

/// The numbers of a parameter group.
struct SgdConstants {
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;

  /// `step` is 1 in the first step, which takes a buffer that was written before it, as torch does,
  /// unless there is dampening: that begins with the second gradient.
  C10_HOST_DEVICE SgdCoefficients at(double lr, int64_t step) const {
    const bool sets_buffer = step == 1 && dampening != 0;
    return {.lr = lr,
            .momentum = sets_buffer ? 0.0 : momentum,
            .share = sets_buffer ? 1.0 : 1.0 - dampening,
            .look_ahead = nesterov ? momentum : 0.0,
            .weight_decay = weight_decay};
  }
};

/// Stochastic gradient descent as in torch::optim::SGD. Moment: momentum_buffer, if any.
template <bool kHasMomentum>
struct SgdRule {
  using Constants = SgdConstants;
  using Coefficients = SgdCoefficients;
  static constexpr unsigned kMoments = kHasMomentum ? 1 : 0;
  static constexpr CudaRule kCudaRule = CudaRule::sgd;

  template <class Lanes>
  struct Element {
    using Value = typename Lanes::Value;
    using Scalar = typename Lanes::Format::Value;

    Value minus_lr, momentum, share, look_ahead, weight_decay;
    bool is_nesterov;
    bool has_l2;

    C10_HOST_DEVICE C10_ALWAYS_INLINE explicit Element(const SgdCoefficients& c)
        : is_nesterov(c.look_ahead != 0), has_l2(c.weight_decay != 0) {
      Lanes::broadcast(static_cast<Scalar>(-c.lr), minus_lr);
      Lanes::broadcast(static_cast<Scalar>(c.momentum), momentum);
      Lanes::broadcast(static_cast<Scalar>(c.share), share);
      Lanes::broadcast(static_cast<Scalar>(c.look_ahead), look_ahead);
      Lanes::broadcast(static_cast<Scalar>(c.weight_decay), weight_decay);
    }

    /// \param gradient  unscaled and clipped
    template <class Moments>
    C10_HOST_DEVICE C10_ALWAYS_INLINE void operator()(Value& parameter, Value& gradient,
                                                      Moments& moments) const {
      if (has_l2) Lanes::fma(weight_decay, parameter, gradient, gradient);
      Value direction = gradient;
      if constexpr (kHasMomentum) {
        const Value addend = share * gradient;
        Lanes::fma(momentum, moments[0], addend, moments[0]);
        direction = moments[0];
        if (is_nesterov) Lanes::fma(look_ahead, moments[0], gradient, direction);
      }
      Lanes::fma(minus_lr, direction, parameter, parameter);
    }
  };
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
