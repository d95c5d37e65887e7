#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/step_use.h>
#include <mezzo/kernels/weight_formats.h>

#include <c10/macros/Macros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <type_traits>

// Moments stay in a device's registers only where loops over them are unrolled.
#ifdef __CUDA_ARCH__
#define MEZZO_UNROLL_FOR_DEVICE _Pragma("unroll")
#else
#define MEZZO_UNROLL_FOR_DEVICE
#endif

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Pointers to one place of a parameter's streams: in memory on the CPU, in registers on a device.
/// A flag tells whether a stream exists. A null pointer could not: comparing addresses of registers
/// would make the device's compiler put them into memory.
template <class Parameter, class Gradient, class Rule, class Weights, class Lanes>
struct StepPlace {
  static constexpr unsigned kMomentSlots = Rule::kMoments > 0 ? Rule::kMoments : 1;
  using MomentLanes = typename Lanes::template Like<typename Weights::Moment>;

  typename Lanes::Stored* parameter;
  typename Lanes::template Like<Gradient>::Stored* gradient;
  typename MomentLanes::Stored* moments[kMomentSlots];
  uint16_t* low_half_or_copy;
  bool has_low_half_or_copy;
};

/// A step at one place: reads its values, computes, and writes them back. This is the body of every
/// optimizer whose update looks at one element at a time.
///
/// A Rule (adam_element.h) has
///   Constants and Coefficients, the numbers of a group and of one step of one parameter;
///   kMoments, and Element<Lanes>, made of Coefficients and called with the values.
/// Weights (weight_formats.h) say how parameter and moments are stored.
template <class Parameter, class Gradient, class Rule, class Weights, class Lanes>
class StepBody {
 public:
  using Place = StepPlace<Parameter, Gradient, Rule, Weights, Lanes>;
  using Value = typename Lanes::Value;
  using Bits = typename Lanes::Bits;
  using Scalar = typename Lanes::Format::Value;
  static constexpr bool kIsSplit = Weights::kIsSplit;
  static constexpr bool kIsStochastic = Weights::kIsStochastic;
  /// Whether moments are rounded stochastically too.
  static constexpr bool kDrawsMoments =
      kIsStochastic && std::is_same_v<typename Weights::Moment, typename Weights::Parameter>;
  /// Whether a parameter may be the master of a weight of 16 bits, its copy: one of floats may.
  static constexpr bool kMayCopy = !kIsSplit && std::is_same_v<Parameter, float>;

  C10_HOST_DEVICE C10_ALWAYS_INLINE StepBody(const typename Rule::Coefficients& coefficients,
                                             const StepUse& use)
      : update_(coefficients), copies_half_(use.copies_half) {
    Lanes::broadcast(static_cast<Scalar>(use.factor), factor_);
  }

  /// Takes the step. `numbers` are the elements' numbers in the parameter, for stochastic rounding.
  C10_HOST_DEVICE C10_ALWAYS_INLINE void operator()(const Place& place, const Bits& numbers,
                                                    const RandomKey& key) const {
    Value parameter;
    Value moments[Place::kMomentSlots];
    compute(place, parameter, moments);
    write(place, numbers, key, parameter, moments);
    write_beside(place, parameter);
  }

  // The parts of the step. A device calls them one by one: it converts the values of several
  // elements in pairs, and asks once for a pack whether the parameter has a copy.

  /// Computes the new values, before they are rounded to be stored.
  C10_HOST_DEVICE C10_ALWAYS_INLINE void compute(const Place& place, Value& parameter,
                                                 Value (&moments)[Place::kMomentSlots]) const {
    Value gradient;
    read_gradient(place.gradient, gradient);
    gradient = gradient * factor_;
    read_parameter(place, parameter);
    read_moments(place, moments);
    update_(parameter, gradient, moments);
  }

  C10_HOST_DEVICE C10_ALWAYS_INLINE void write(const Place& place, const Bits& numbers,
                                               const RandomKey& key, const Value& parameter,
                                               const Value (&moments)[Place::kMomentSlots]) const {
    if constexpr (kIsStochastic) {
      Bits noise;
      draw(numbers, key, noise);
      write_parameter_stochastically(place, parameter, noise);
      if constexpr (kDrawsMoments) {
        write_moments_stochastically(place, moments, noise);
      } else {
        write_moments(place, moments);
      }
    } else {
      write_parameter(place, parameter);
      write_moments(place, moments);
    }
  }

  /// Writes the copy of a new parameter, if it has one.
  C10_HOST_DEVICE C10_ALWAYS_INLINE void write_beside(const Place& place,
                                                      const Value& parameter) const {
    if constexpr (kMayCopy) {
      if (place.has_low_half_or_copy) write_copy(parameter, place.low_half_or_copy);
    }
  }

  C10_HOST_DEVICE C10_ALWAYS_INLINE void write_copy(const Value& parameter, uint16_t* place) const {
    Bits bits;
    if (copies_half_) {
      FloatFormat<c10::Half>::narrow(parameter, bits);
    } else {
      FloatFormat<c10::BFloat16>::narrow(parameter, bits);
    }
    Halves::store(bits, place);
  }

 protected:
  using GradientLanes = typename Lanes::template Like<Gradient>;
  using MomentLanes = typename Place::MomentLanes;
  using Halves = typename Lanes::template Like<c10::BFloat16>;  // any dtype of 16 bits

  C10_HOST_DEVICE C10_ALWAYS_INLINE static void read_gradient(
      const typename GradientLanes::Stored* from, Value& gradient) {
    typename GradientLanes::Bits bits;
    typename GradientLanes::Value own;
    GradientLanes::load(from, bits);
    GradientLanes::Format::widen(bits, own);
    Lanes::convert(own, gradient);
  }

  C10_HOST_DEVICE C10_ALWAYS_INLINE void read_parameter(const Place& place, Value& value) const {
    Bits bits;
    Lanes::load(place.parameter, bits);
    if constexpr (kIsSplit) {
      Bits lower;
      Halves::load(place.low_half_or_copy, lower);
      join_halves(bits, lower, value);
    } else {
      Lanes::Format::widen(bits, value);
    }
    if constexpr (kMayCopy) {
      if (place.has_low_half_or_copy) heal(place.low_half_or_copy, value);
    }
  }

  /// Makes the weight's value the master where the weight does not have the bits that the master
  /// rounds to: somebody has written the weight.
  C10_HOST_DEVICE C10_ALWAYS_INLINE void heal(const uint16_t* weight, Value& master) const {
    Bits own, rounded;
    Value written;
    Halves::load(weight, own);
    if (copies_half_) {
      FloatFormat<c10::Half>::narrow(master, rounded);
      FloatFormat<c10::Half>::widen(own, written);
    } else {
      FloatFormat<c10::BFloat16>::narrow(master, rounded);
      FloatFormat<c10::BFloat16>::widen(own, written);
    }
    master = own == rounded ? master : written;
  }

  C10_HOST_DEVICE C10_ALWAYS_INLINE void write_parameter(const Place& place,
                                                         const Value& value) const {
    Bits bits;
    if constexpr (kIsSplit) {
      Bits lower;
      split_halves(value, bits, lower);
      Halves::store(lower, place.low_half_or_copy);
    } else {
      Lanes::Format::narrow(value, bits);
    }
    Lanes::store(bits, place.parameter);
  }

  C10_HOST_DEVICE C10_ALWAYS_INLINE static void read_moments(
      const Place& place, Value (&moments)[Place::kMomentSlots]) {
    if constexpr (Rule::kMoments > 0) {  // or GCC warns of the loop that never runs, at -O0
      MEZZO_UNROLL_FOR_DEVICE
      for (unsigned k = 0; k != Rule::kMoments; ++k) {
        typename MomentLanes::Bits bits;
        MomentLanes::load(place.moments[k], bits);
        MomentLanes::Format::widen(bits, moments[k]);
      }
    }
  }

  C10_HOST_DEVICE C10_ALWAYS_INLINE static void write_moments(
      const Place& place, const Value (&moments)[Place::kMomentSlots]) {
    if constexpr (Rule::kMoments > 0) {
      MEZZO_UNROLL_FOR_DEVICE
      for (unsigned k = 0; k != Rule::kMoments; ++k) {
        typename MomentLanes::Bits bits;
        MomentLanes::Format::narrow(moments[k], bits);
        MomentLanes::store(bits, place.moments[k]);
      }
    }
  }

  /// Draws 32 random bits for each element: the lower 16 are the parameter's, the upper 16 the
  /// first moment's. The other moments' are the upper 16 of their products by an odd number: each
  /// is evenly spread, whatever the parameter's bits are.
  C10_HOST_DEVICE C10_ALWAYS_INLINE static void draw(const Bits& numbers, const RandomKey& key,
                                                     Bits& noise) {
    noise = numbers ^ key;
    mix(noise);
  }

  C10_HOST_DEVICE C10_ALWAYS_INLINE static void write_parameter_stochastically(
      const Place& place, const Value& parameter, const Bits& noise) {
    write_stochastically(parameter, noise & 0xFFFFU, place.parameter);
  }

  C10_HOST_DEVICE C10_ALWAYS_INLINE static void write_moments_stochastically(
      const Place& place, const Value (&moments)[Place::kMomentSlots], const Bits& noise) {
    if constexpr (Rule::kMoments > 0) {
      write_stochastically(moments[0], noise >> 16, place.moments[0]);
    }
    if constexpr (Rule::kMoments > 1) {
      write_stochastically(moments[1], (noise * 0x9E3779B1U) >> 16, place.moments[1]);
    }
    if constexpr (Rule::kMoments > 2) {
      write_stochastically(moments[2], (noise * 0x85EBCA77U) >> 16, place.moments[2]);
    }
  }

  C10_HOST_DEVICE C10_ALWAYS_INLINE static void write_stochastically(const Value& value,
                                                                     const Bits& noise,
                                                                     typename Lanes::Stored* to) {
    Bits bits;
    narrow_stochastically(value, noise, bits);
    Lanes::store(bits, to);
  }

  typename Rule::template Element<Lanes> update_;
  Value factor_;
  bool copies_half_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#undef MEZZO_UNROLL_FOR_DEVICE
