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
template <class Rule, class Weights, class Lanes>
struct StepPlace {
  static constexpr unsigned kMomentSlots = Rule::kMoments > 0 ? Rule::kMoments : 1;
  using GradientLanes = typename Lanes::template Like<typename Lanes::Format::Value>;
  using MomentLanes = typename Lanes::template Like<typename Weights::Moment>;

  typename Lanes::Stored* parameter;
  typename GradientLanes::Stored* gradient;  ///< in the dtype of the arithmetic
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
/// Weights (weight_formats.h) say how parameter and moments are stored; Lanes are the parameter's.
template <class Rule, class Weights, class Lanes>
class StepBody {
 public:
  using Place = StepPlace<Rule, Weights, Lanes>;
  using Value = typename Lanes::Value;
  using Bits = typename Lanes::Bits;
  using Scalar = typename Lanes::Format::Value;
  static constexpr bool kIsSplit = Weights::kIsSplit;
  static constexpr bool kIsStochastic = Weights::kIsStochastic;
  /// Whether moments are rounded stochastically too.
  static constexpr bool kDrawsMoments =
      kIsStochastic && std::is_same_v<typename Weights::Moment, typename Weights::Parameter>;
  /// Whether a parameter may be the master of a weight of 16 bits, its copy: one of floats may.
  static constexpr bool kMayCopy = std::is_same_v<typename Weights::Parameter, float>;

  C10_HOST_DEVICE C10_ALWAYS_INLINE StepBody(const typename Rule::Coefficients& coefficients,
                                             const StepUse& use)
      : update_(coefficients), copies_half_(use.copies_half) {
    Lanes::broadcast(static_cast<Scalar>(use.multipliers.first), first_);
    Lanes::broadcast(static_cast<Scalar>(use.multipliers.second), second_);
  }

  /// Takes the step. `numbers` are the elements' numbers in the parameter, for stochastic rounding.
  C10_HOST_DEVICE C10_ALWAYS_INLINE void operator()(const Place& place, const Bits& numbers,
                                                    const RandomKey& key) const {
    Value parameter;
    Value moments[Place::kMomentSlots];
    compute(place, parameter, moments);
    write(place, numbers, key, parameter, moments);
    if constexpr (kMayCopy) {
      if (place.has_low_half_or_copy) write_copy(parameter, place.low_half_or_copy);
    }
  }

  // The parts of the step. A device calls them one by one: it converts the values of several
  // elements in pairs, and asks once for a pack whether the parameter has a copy.

  /// Computes the new values, before they are rounded to be stored.
  C10_HOST_DEVICE C10_ALWAYS_INLINE void compute(const Place& place, Value& parameter,
                                                 Value (&moments)[Place::kMomentSlots]) const {
    Bits bits;
    Value gradient;
    Place::GradientLanes::load(place.gradient, bits);
    reinterpret_bits(bits, gradient);
    gradient = gradient * first_ * second_;
    read_parameter(place, parameter);
    if constexpr (Rule::kMoments > 0) {
      MEZZO_UNROLL_FOR_DEVICE
      for (unsigned k = 0; k != Rule::kMoments; ++k) {
        typename MomentLanes::Bits moment;
        MomentLanes::load(place.moments[k], moment);
        MomentLanes::Format::widen(moment, moments[k]);
      }
    }
    update_(parameter, gradient, moments);
  }

  C10_HOST_DEVICE C10_ALWAYS_INLINE void write(const Place& place, const Bits& numbers,
                                               const RandomKey& key, const Value& parameter,
                                               const Value (&moments)[Place::kMomentSlots]) const {
    Bits noise;
    if constexpr (kIsStochastic) {
      noise = numbers ^ key;
      mix(noise);
    }
    Bits bits;
    if constexpr (kIsSplit) {
      Bits lower;
      split_halves(parameter, bits, lower);
      Halves::store(lower, place.low_half_or_copy);
    } else if constexpr (kIsStochastic) {
      narrow_stochastically(parameter, noise & 0xFFFFU, bits);
    } else {
      Lanes::Format::narrow(parameter, bits);
    }
    Lanes::store(bits, place.parameter);
    if constexpr (Rule::kMoments > 0) {  // or GCC warns of the loop that never runs, at -O0
      MEZZO_UNROLL_FOR_DEVICE
      for (unsigned k = 0; k != Rule::kMoments; ++k) {
        typename MomentLanes::Bits moment;
        if constexpr (kDrawsMoments) {
          narrow_stochastically(moments[k], (noise * noise_factor(k)) >> 16, moment);
        } else {
          MomentLanes::Format::narrow(moments[k], moment);
        }
        MomentLanes::store(moment, place.moments[k]);
      }
    }
  }

  /// Writes the copy of a new parameter.
  C10_HOST_DEVICE C10_ALWAYS_INLINE void write_copy(const Value& parameter, uint16_t* place) const {
    Bits bits;
    round_to_copy(parameter, bits);
    Halves::store(bits, place);
  }

 private:
  using MomentLanes = typename Place::MomentLanes;
  using Halves = typename Lanes::template Like<c10::BFloat16>;  // any dtype of 16 bits

  /// Of an element's 32 random bits the parameter takes the lower 16, and each moment the upper 16
  /// of a product by an odd number: evenly spread, whatever the other's are.
  C10_HOST_DEVICE C10_ALWAYS_INLINE static constexpr uint32_t noise_factor(unsigned moment) {
    return moment == 0 ? 1U : moment == 1 ? 0x9E3779B1U : 0x85EBCA77U;
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
    round_to_copy(master, rounded);
    if (copies_half_) {
      FloatFormat<c10::Half>::widen(own, written);
    } else {
      FloatFormat<c10::BFloat16>::widen(own, written);
    }
    master = own == rounded ? master : written;
  }

  C10_HOST_DEVICE C10_ALWAYS_INLINE void round_to_copy(const Value& parameter, Bits& bits) const {
    if (copies_half_) {
      FloatFormat<c10::Half>::narrow(parameter, bits);
    } else {
      FloatFormat<c10::BFloat16>::narrow(parameter, bits);
    }
  }

  typename Rule::template Element<Lanes> update_;
  Value first_, second_;  // GradMultipliers
  bool copies_half_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#undef MEZZO_UNROLL_FOR_DEVICE
