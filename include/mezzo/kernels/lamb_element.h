#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/optimizer_step_body.h>
#include <mezzo/kernels/step_use.h>

#include <c10/macros/Macros.h>

#include <cmath>
#include <cstdint>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Sums of squares over a parameter, or a stretch of one.
struct LambNorms {
  double parameter = 0;
  double update = 0;

  C10_HOST_DEVICE void merge(const LambNorms& other) {
    parameter += other.parameter;
    update += other.update;
  }

  /// Returns ||parameter|| / ||update||, or 1 if either is 0. NaN if either is NaN, so that a bad
  /// gradient shows.
  C10_HOST_DEVICE double trust_ratio() const {
    return parameter != 0 && update != 0 ? ::sqrt(parameter) / ::sqrt(update) : 1.0;
  }
};

/// The coefficients of LAMB for one step of one parameter.
struct LambCoefficients {
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double mean_scale;  ///< 1 / (1 - beta1^step); 1 without bias correction
  double root_scale;  ///< 1 / sqrt(1 - beta2^step); 1 without
  double rate;        ///< lr; after `adapt`, lr times the trust ratio
  bool adapts;        ///< whether there is a trust ratio

  /// Applies the trust ratio, between the two passes. \param norms of the whole parameter
  C10_HOST_DEVICE void adapt(const LambNorms& norms) {
    if (adapts) rate *= norms.trust_ratio();
  }
};

/// The numbers of a parameter group.
struct LambConstants {
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  double weight_decay = 0;
  bool corrects_bias = true;
  bool always_adapts = false;

  /// `step` is 1 in the first step.
  C10_HOST_DEVICE LambCoefficients at(double lr, int64_t step) const {
    const auto power = static_cast<double>(step);
    return {.beta1 = beta1,
            .beta2 = beta2,
            .eps = eps,
            .weight_decay = weight_decay,
            .mean_scale = corrects_bias ? 1.0 / (1.0 - ::pow(beta1, power)) : 1.0,
            .root_scale = corrects_bias ? 1.0 / ::sqrt(1.0 - ::pow(beta2, power)) : 1.0,
            .rate = lr,
            .adapts = always_adapts || weight_decay != 0};
  }
};

/// LAMB (You et al., 2020, algorithm 2, in the form of Apex's FusedLAMB) on as many elements as
/// there are lanes. Moments: exp_avg and exp_avg_sq. The update of an element depends on all
/// elements of its parameter, so a step has three parts: moments, norms, parameter.
struct LambRule {
  using Constants = LambConstants;
  using Coefficients = LambCoefficients;
  static constexpr unsigned kMoments = 2;
  static constexpr CudaRule kCudaRule = CudaRule::lamb;

  template <class Lanes>
  struct Element {
    using Value = typename Lanes::Value;
    using Scalar = typename Lanes::Format::Value;

    Value beta1, gradient_share, beta2, square_share, eps, weight_decay, mean_scale, root_scale,
        minus_rate;

    C10_HOST_DEVICE C10_ALWAYS_INLINE explicit Element(const LambCoefficients& c) {
      Lanes::broadcast(static_cast<Scalar>(c.beta1), beta1);
      Lanes::broadcast(static_cast<Scalar>(1.0 - c.beta1), gradient_share);
      Lanes::broadcast(static_cast<Scalar>(c.beta2), beta2);
      Lanes::broadcast(static_cast<Scalar>(1.0 - c.beta2), square_share);
      Lanes::broadcast(static_cast<Scalar>(c.eps), eps);
      Lanes::broadcast(static_cast<Scalar>(c.weight_decay), weight_decay);
      Lanes::broadcast(static_cast<Scalar>(c.mean_scale), mean_scale);
      Lanes::broadcast(static_cast<Scalar>(c.root_scale), root_scale);
      Lanes::broadcast(static_cast<Scalar>(-c.rate), minus_rate);
    }

    /// \param gradient  unscaled and clipped
    C10_HOST_DEVICE C10_ALWAYS_INLINE void learn(const Value& gradient,
                                                 Value (&moments)[kMoments]) const {
      Value addend = gradient_share * gradient;
      Lanes::fma(beta1, moments[0], addend, moments[0]);
      addend = square_share * gradient * gradient;
      Lanes::fma(beta2, moments[1], addend, moments[1]);
    }

    /// Returns the direction of the update, without the learning rate.
    C10_HOST_DEVICE C10_ALWAYS_INLINE void aim(const Value& parameter,
                                               const Value (&moments)[kMoments],
                                               Value& update) const {
      Value denominator;
      Lanes::sqrt(moments[1], denominator);
      Lanes::fma(denominator, root_scale, eps, denominator);
      const Value ratio = moments[0] * mean_scale / denominator;
      Lanes::fma(weight_decay, parameter, ratio, update);
    }

    C10_HOST_DEVICE C10_ALWAYS_INLINE void move(const Value& update, Value& parameter) const {
      Lanes::fma(minus_rate, update, parameter, parameter);
    }
  };
};

/// LAMB at one place of a parameter's streams, in two passes. The first writes the moments and
/// returns the values of which norms are taken. The second knows the trust ratio, and writes the
/// parameter and the streams beside it. It computes the update again from the stored moments, since
/// keeping the update would cost 8 bytes per element.
template <class Parameter, class Gradient, class Weights, class Lanes>
class LambBody : private StepBody<Parameter, Gradient, LambRule, Weights, Lanes> {
  using Base = StepBody<Parameter, Gradient, LambRule, Weights, Lanes>;
  using typename Base::MomentLanes;

 public:
  using Base::Base;
  using Base::write_copy;
  using typename Base::Bits;
  using typename Base::Place;
  using typename Base::Scalar;
  using typename Base::Value;

  /// Reads the gradient and the moments, and writes the moments. `parameter` and `update` become
  /// the values that the second pass will compute. `numbers` are the elements' numbers, for
  /// stochastic rounding.
  C10_HOST_DEVICE C10_ALWAYS_INLINE void learn(const Place& place, const Bits& numbers,
                                               const RandomKey& key, Value& parameter,
                                               Value& update) const {
    Value gradient;
    Base::read_gradient(place.gradient, gradient);
    gradient = gradient * Base::factor_;
    Value moments[LambRule::kMoments];
    Base::read_moments(place, moments);
    Base::update_.learn(gradient, moments);
    if constexpr (Base::kDrawsMoments) {
      Bits noise;
      Base::draw(numbers, key, noise);
      Base::write_moments_stochastically(place, moments, noise, key);
    } else {
      Base::write_moments(place, moments);
    }
    if constexpr (sizeof(typename MomentLanes::Stored) < sizeof(Scalar)) {
      Base::read_moments(place, moments);  // as they were rounded
    }
    Base::read_parameter(place, parameter);
    Base::update_.aim(parameter, moments, update);
  }

  /// Reads the moments and updates the parameter, with coefficients after `adapt`.
  C10_HOST_DEVICE C10_ALWAYS_INLINE void move(const Place& place, const Bits& numbers,
                                              const RandomKey& key) const {
    Value parameter;
    move(place, numbers, key, parameter);
    Base::write_beside(place, parameter);
  }

  /// Updates the parameter, but not the streams beside it. `parameter` becomes the new value before
  /// rounding.
  C10_HOST_DEVICE C10_ALWAYS_INLINE void move(const Place& place, const Bits& numbers,
                                              const RandomKey& key, Value& parameter) const {
    Value moments[LambRule::kMoments];
    Base::read_moments(place, moments);
    Base::read_parameter(place, parameter);
    Value update;
    Base::update_.aim(parameter, moments, update);
    Base::update_.move(update, parameter);
    if constexpr (Base::kIsStochastic) {
      Bits noise;
      Base::draw(numbers, key, noise);
      Base::write_parameter_stochastically(place, parameter, noise);
    } else {
      Base::write_parameter(place, parameter);
    }
  }
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
