#pragma once

#include <mezzo/detail/kernels/lamb_element.h>
#include <mezzo/detail/kernels/optimizer_step_body.h>
#include <mezzo/version.h>

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
    read_moments(place, moments);
    Base::update_.learn(gradient, moments);
    if constexpr (Base::kIsStochastic) {
      write_moments_stochastically(place, moments, numbers, key);
    } else {
      for (unsigned k = 0; k < LambRule::kMoments; ++k) {
        Base::write_moment(moments[k], place.moments[k]);
      }
    }
    if constexpr (sizeof(typename MomentLanes::Stored) < sizeof(Scalar)) {
      read_moments(place, moments);  // as they were rounded
    }
    Base::read_parameter(place, parameter);
    Base::update_.aim(parameter, moments, update);
    if (Base::clear_) GradientLanes::store(typename GradientLanes::Bits{}, place.gradient);
  }

  /// Reads the moments and moves the parameter, by the coefficients that `adapt` was called of.
  C10_HOST_DEVICE C10_ALWAYS_INLINE void move(const Place& place, const Bits& numbers,
                                              const RandomKey& key) const {
    Value moments[LambRule::kMoments];
    read_moments(place, moments);
    Value parameter;
    Base::read_parameter(place, parameter);
    Value update;
    Base::update_.aim(parameter, moments, update);
    Base::update_.move(update, parameter);
    if constexpr (Base::kIsStochastic) {
      Bits noise;
      Bits bits;
      draw(numbers, key, noise);
      const Bits lower = noise & 0xFFFFU;
      narrow_stochastically(parameter, lower, bits);
      Lanes::store(bits, place.parameter);
    } else {
      Base::write_parameter(place, parameter);
    }
    if (place.average != nullptr) Base::update_average(parameter, place.average);
  }

 private:
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void read_moments(const Place& place,
                                                             Value (&moments)[LambRule::kMoments]) {
    for (unsigned k = 0; k < LambRule::kMoments; ++k) {
      Base::read_moment(place.moments[k], moments[k]);
    }
  }

  // Bits as StepBody deals them out: of the first 32 the parameter has the lower half and exp_avg
  // the upper one.
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void draw(const Bits& numbers, const RandomKey& key,
                                                     Bits& noise) {
    noise = numbers ^ key.first;
    mix(noise);
  }

  C10_HOST_DEVICE C10_ALWAYS_INLINE static void write_moments_stochastically(
      const Place& place, const Value (&moments)[LambRule::kMoments], const Bits& numbers,
      const RandomKey& key) {
    Bits noise;
    draw(numbers, key, noise);
    Bits own = noise >> 16;
    Bits bits;
    narrow_stochastically(moments[0], own, bits);
    Lanes::store(bits, place.moments[0]);
    noise = noise + key.second;
    mix(noise);
    own = noise & 0xFFFFU;
    narrow_stochastically(moments[1], own, bits);
    Lanes::store(bits, place.moments[1]);
  }
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
