#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/lamb_element.h>
#include <mezzo/kernels/optimizer_step_body.h>

#include <c10/macros/Macros.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// LAMB at one place of a parameter's streams, in two passes: the first writes moments and says
/// what norms are taken of, the second, which knows the trust ratio, writes the parameter and what
/// lies beside it. The update is not kept in between, which would cost 8 bytes an element, but
/// computed again, from the same numbers: moments as they are stored, rounding included.
template <class Parameter, class Gradient, class Weights, class Lanes>
class LambBody : private StepBody<Parameter, Gradient, LambRule, Weights, Lanes> {
  using Base = StepBody<Parameter, Gradient, LambRule, Weights, Lanes>;
  using typename Base::GradientLanes;
  using typename Base::MomentLanes;
  using typename Base::Scalar;

 public:
  using Base::Base;
  using typename Base::Bits;
  using typename Base::Place;
  using typename Base::Value;

  /// Reads the gradient and the moments, and writes the moments; `parameter` and `update` are what
  /// the second pass will find. `numbers` are those of the elements, for stochastic rounding.
  C10_HOST_DEVICE C10_ALWAYS_INLINE void learn(const Place& place, const Bits& numbers,
                                               const RandomKey& key, Value& parameter,
                                               Value& update) const {
    Value gradient;
    Base::read_gradient(place.gradient, gradient);
    gradient = gradient * Base::factor_;
    Value moments[LambRule::kMoments];
    Base::read_moments(place, moments);
    Base::update_.learn(gradient, moments);
    if constexpr (Base::kIsStochastic) {
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
    if (Base::clear_) GradientLanes::store(typename GradientLanes::Bits{}, place.gradient);
  }

  /// Reads the moments and moves the parameter, by the coefficients that `adapt` was called of.
  C10_HOST_DEVICE C10_ALWAYS_INLINE void move(const Place& place, const Bits& numbers,
                                              const RandomKey& key) const {
    Value moments[LambRule::kMoments];
    Base::read_moments(place, moments);
    Value parameter;
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
    if (place.has_average) Base::update_average(parameter, place.average);
  }
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
