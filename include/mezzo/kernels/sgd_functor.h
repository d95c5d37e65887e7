#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/step_args.h>

#include <c10/macros/Macros.h>

#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Coefficients of SGD for one step of one parameter.
struct SgdCoefficients {
  double lr;
  double momentum;  ///< 0 in a first step with dampening: the buffer becomes the gradient
  double one_minus_dampening;  ///< 1 in a first step with dampening
  double nesterov_momentum;    ///< momentum with nesterov, otherwise 0
  double weight_decay;
};

/// Hyperparameters of a param group.
struct SgdHyperParams {
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;

  /// \param step  1 in the first step, in which dampening has no effect, as in torch. Without
  ///   dampening the first step uses a momentum buffer that was set before it, as in torch.
  C10_HOST_DEVICE SgdCoefficients coefficients(double lr, int64_t step) const {
    const bool sets_buffer = step == 1 && dampening != 0;
    return {.lr = lr,
            .momentum = sets_buffer ? 0.0 : momentum,
            .one_minus_dampening = sets_buffer ? 1.0 : 1.0 - dampening,
            .nesterov_momentum = nesterov ? momentum : 0.0,
            .weight_decay = weight_decay};
  }
};

/// SGD as in torch::optim::SGD. Moment: momentum_buffer, with momentum.
template <bool kHasMomentum>
struct SgdFunctor {
  using HyperParams = SgdHyperParams;
  using Coefficients = SgdCoefficients;
  static constexpr unsigned kNumMoments = kHasMomentum ? 1 : 0;
  static constexpr OptimizerKind kOptimizerKind = OptimizerKind::sgd;

  template <class Vec>
  struct Update {
    using Value = typename Vec::Value;
    using Scalar = typename Vec::Format::opmath_t;

    Value minus_lr, momentum, one_minus_dampening, nesterov_momentum, weight_decay;
    bool is_nesterov;
    bool has_l2;

    C10_HOST_DEVICE C10_ALWAYS_INLINE explicit Update(const SgdCoefficients& c)
        : is_nesterov(c.nesterov_momentum != 0), has_l2(c.weight_decay != 0) {
      Vec::broadcast(static_cast<Scalar>(-c.lr), minus_lr);
      Vec::broadcast(static_cast<Scalar>(c.momentum), momentum);
      Vec::broadcast(static_cast<Scalar>(c.one_minus_dampening), one_minus_dampening);
      Vec::broadcast(static_cast<Scalar>(c.nesterov_momentum), nesterov_momentum);
      Vec::broadcast(static_cast<Scalar>(c.weight_decay), weight_decay);
    }

    /// \param gradient  unscaled and clipped
    template <class Moments>
    C10_HOST_DEVICE C10_ALWAYS_INLINE void operator()(Value& parameter, Value& gradient,
                                                      Moments& moments) const {
      if (has_l2) Vec::fma(weight_decay, parameter, gradient, gradient);
      Value direction = gradient;
      if constexpr (kHasMomentum) {
        const Value addend = one_minus_dampening * gradient;
        Vec::fma(momentum, moments[0], addend, moments[0]);
        direction = moments[0];
        if (is_nesterov) Vec::fma(nesterov_momentum, moments[0], gradient, direction);
      }
      Vec::fma(minus_lr, direction, parameter, parameter);
    }
  };
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
