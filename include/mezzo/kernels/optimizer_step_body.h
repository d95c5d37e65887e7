#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/step_use.h>
#include <mezzo/kernels/weight_formats.h>

#include <c10/macros/Macros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <type_traits>

// Values stay in registers only where loops over them are unrolled.
#if defined(__CUDA_ARCH__) || defined(__clang__)
#define MEZZO_UNROLL_IN_REGISTERS _Pragma("unroll")
#elif defined(__GNUC__)
#define MEZZO_UNROLL_IN_REGISTERS _Pragma("GCC unroll 8")
#else
#define MEZZO_UNROLL_IN_REGISTERS
#endif

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// What a step reads and writes of `kCount` places of a parameter's streams: the stored bits, each
/// in the lower bits of a lane.
template <class Rule, class Weights, class Lanes, int kCount>
struct StepBits {
  static constexpr unsigned kMomentSlots = Rule::kMoments > 0 ? Rule::kMoments : 1;
  using MomentLanes = typename Lanes::template Like<typename Weights::Moment>;
  using Halves = typename Lanes::template Like<c10::BFloat16>;  // any dtype of 16 bits

  typename Lanes::Value gradient[kCount];
  typename Lanes::Bits parameter[kCount];
  typename MomentLanes::Bits moments[kMomentSlots][kCount];
  typename Halves::Bits low_half_or_copy[kCount];
  bool has_low_half_or_copy;
};

/// A step at some places: widens their values, computes, and rounds them back. This is the body of
/// every optimizer whose update looks at one element at a time.
///
/// A Rule (adam_element.h) has
///   Constants and Coefficients, the numbers of a group and of one step of one parameter;
///   kMoments, and Element<Lanes>, made of Coefficients and called with the values.
/// Weights (weight_formats.h) say how parameter and moments are stored; Lanes are the parameter's.
template <class Rule, class Weights, class Lanes>
class StepBody {
 public:
  template <int kCount>
  using Places = StepBits<Rule, Weights, Lanes, kCount>;
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
      : update_(coefficients),
        has_second_(use.multipliers.second != 1),
        copies_half_(use.copies_half) {
    Lanes::broadcast(static_cast<Scalar>(use.multipliers.first), first_);
    Lanes::broadcast(static_cast<Scalar>(use.multipliers.second), second_);
  }

  /// Takes the step. `seeds`, for stochastic rounding: random key XOR the element's number in the
  /// parameter, its lower 32 bits.
  template <int kCount>
  C10_HOST_DEVICE C10_ALWAYS_INLINE void operator()(Places<kCount>& places,
                                                    const Bits (&seeds)[kCount]) const {
#ifdef __CUDA_ARCH__
    constexpr int kTogether = kCount;  // a device rounds values in pairs
#else
    constexpr int kTogether = 1;  // AVX2 has few registers
#endif
    Value parameters[kTogether];
    Value moments[kTogether][kMomentSlots];
    MEZZO_UNROLL_IN_REGISTERS
    for (int at = 0; at < kCount; at += kTogether) {
      MEZZO_UNROLL_IN_REGISTERS
      for (int i = 0; i < kTogether; ++i) compute(places, at + i, parameters[i], moments[i]);
      MEZZO_UNROLL_IN_REGISTERS
      for (int i = 0; i < kTogether; ++i) {
        write(parameters[i], moments[i], seeds[at + i], places, at + i);
      }
      if constexpr (kMayCopy) {
        if (!places.has_low_half_or_copy) continue;
        MEZZO_UNROLL_IN_REGISTERS
        for (int i = 0; i < kTogether; ++i) {
          round_to_copy(parameters[i], places.low_half_or_copy[at + i]);
        }
      }
    }
  }

 private:
  static constexpr unsigned kMomentSlots = Rule::kMoments > 0 ? Rule::kMoments : 1;
  using MomentFormat = FloatFormat<typename Weights::Moment>;

  /// Of an element's 32 random bits the parameter takes the lower 16, and each moment the upper 16
  /// of a product by an odd number: evenly spread, whatever the other's are.
  C10_HOST_DEVICE C10_ALWAYS_INLINE static constexpr uint32_t noise_factor(unsigned moment) {
    return moment == 0 ? 1U : moment == 1 ? 0x9E3779B1U : 0x85EBCA77U;
  }

  template <int kCount>
  C10_HOST_DEVICE C10_ALWAYS_INLINE void compute(const Places<kCount>& places, int i,
                                                 Value& parameter,
                                                 Value (&moments)[kMomentSlots]) const {
    Value gradient = places.gradient[i] * first_;
    if (has_second_) gradient = gradient * second_;
    if constexpr (kIsSplit) {
      join_halves(places.parameter[i], places.low_half_or_copy[i], parameter);
    } else {
      Lanes::Format::widen(places.parameter[i], parameter);
    }
    if constexpr (kMayCopy) {
      if (places.has_low_half_or_copy) heal(places.low_half_or_copy[i], parameter);
    }
    if constexpr (Rule::kMoments > 0) {  // or GCC warns of the loop that never runs, at -O0
      MEZZO_UNROLL_IN_REGISTERS
      for (unsigned k = 0; k != Rule::kMoments; ++k) {
        MomentFormat::widen(places.moments[k][i], moments[k]);
      }
    }
    update_(parameter, gradient, moments);
  }

  template <int kCount>
  C10_HOST_DEVICE C10_ALWAYS_INLINE void write(const Value& parameter,
                                               const Value (&moments)[kMomentSlots],
                                               const Bits& seed, Places<kCount>& places,
                                               int i) const {
    Bits noise;
    if constexpr (kIsStochastic) {
      noise = seed;
      mix(noise);
    }
    if constexpr (kIsSplit) {
      split_halves(parameter, places.parameter[i], places.low_half_or_copy[i]);
    } else if constexpr (kIsStochastic) {
      narrow_stochastically(parameter, noise & 0xFFFFU, places.parameter[i]);
    } else {
      Lanes::Format::narrow(parameter, places.parameter[i]);
    }
    if constexpr (Rule::kMoments > 0) {
      MEZZO_UNROLL_IN_REGISTERS
      for (unsigned k = 0; k != Rule::kMoments; ++k) {
        if constexpr (kDrawsMoments) {
          narrow_stochastically(moments[k], (noise * noise_factor(k)) >> 16, places.moments[k][i]);
        } else {
          MomentFormat::narrow(moments[k], places.moments[k][i]);
        }
      }
    }
  }

  /// Makes the weight's value the master where the weight does not have the bits that the master
  /// rounds to: somebody has written the weight.
  C10_HOST_DEVICE C10_ALWAYS_INLINE void heal(const Bits& own, Value& master) const {
    Bits rounded;
    Value written;
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
  bool has_second_;
  bool copies_half_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
