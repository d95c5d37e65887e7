#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/step_args.h>
#include <mezzo/kernels/weight_formats.h>

#include <c10/macros/Macros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <type_traits>

// Arrays stay in registers only if loops over them are unrolled.
#if defined(__CUDA_ARCH__) || defined(__clang__)
#define MEZZO_UNROLL_IN_REGISTERS _Pragma("unroll")
#elif defined(__GNUC__)
#define MEZZO_UNROLL_IN_REGISTERS _Pragma("GCC unroll 8")
#else
#define MEZZO_UNROLL_IN_REGISTERS
#endif

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The stored bits of `kCount` vectors of a parameter and its state, and its gradient values.
template <class Functor, class WeightFormat, class Vec, int kCount>
struct ElementBits {
  static constexpr unsigned kMomentArraySize = Functor::kNumMoments > 0 ? Functor::kNumMoments : 1;
  using MomentVec = typename Vec::template Rebind<typename WeightFormat::Moment>;
  using U16Vec = typename Vec::template Rebind<c10::BFloat16>;  // any 16-bit dtype

  typename Vec::Value gradient[kCount];
  typename Vec::Bits parameter[kCount];
  typename MomentVec::Bits moments[kMomentArraySize][kCount];
  typename U16Vec::Bits low_bits_or_model_param[kCount];
  bool has_low_bits_or_model_param;
};

/// Steps vectors of elements: converts them to opmath, updates, and rounds them back. The body of
/// every element-wise optimizer, on CPU and CUDA.
///
/// A Functor (adam_functor.h) has
///   HyperParams of a group and Coefficients of one step of one parameter;
///   kNumMoments, and Update<Vec>, constructed from Coefficients and called with the values.
/// WeightFormat (weight_formats.h) has the dtypes of parameter and moments. `Vec` is of the
/// parameter's dtype.
template <class Functor, class WeightFormat, class Vec>
class StepFunctor {
 public:
  template <int kCount>
  using Elements = ElementBits<Functor, WeightFormat, Vec, kCount>;
  using Value = typename Vec::Value;
  using Bits = typename Vec::Bits;
  using Scalar = typename Vec::Format::opmath_t;
  static constexpr bool kIsSplit = WeightFormat::kIsSplit;
  static constexpr bool kIsStochastic = WeightFormat::kIsStochastic;
  static constexpr bool kStochasticMoments =
      kIsStochastic &&
      std::is_same_v<typename WeightFormat::Moment, typename WeightFormat::Parameter>;
  /// Whether the parameter may be the master of a 16-bit weight.
  static constexpr bool kMayHaveModelParam =
      std::is_same_v<typename WeightFormat::Parameter, float>;

  C10_HOST_DEVICE C10_ALWAYS_INLINE StepFunctor(const typename Functor::Coefficients& coefficients,
                                                const GradMultipliers& multipliers,
                                                bool model_param_is_fp16)
      : update_(coefficients),
        has_second_multiplier_(multipliers.second != 1),
        model_param_is_fp16_(model_param_is_fp16) {
    Vec::broadcast(static_cast<Scalar>(multipliers.first), first_multiplier_);
    Vec::broadcast(static_cast<Scalar>(multipliers.second), second_multiplier_);
  }

  /// \param seeds  for stochastic rounding: RandomKey XOR the lower 32 bits of the element's index
  template <int kCount>
  C10_HOST_DEVICE C10_ALWAYS_INLINE void operator()(Elements<kCount>& elements,
                                                    const Bits (&seeds)[kCount]) const {
#ifdef __CUDA_ARCH__
    constexpr int kBatch = kCount;  // a GPU converts two values per instruction
#else
    constexpr int kBatch = 1;  // AVX2 has few registers
#endif
    Value parameters[kBatch];
    Value moments[kBatch][kMomentArraySize];
    MEZZO_UNROLL_IN_REGISTERS
    for (int at = 0; at < kCount; at += kBatch) {
      MEZZO_UNROLL_IN_REGISTERS
      for (int i = 0; i < kBatch; ++i) compute(elements, at + i, parameters[i], moments[i]);
      MEZZO_UNROLL_IN_REGISTERS
      for (int i = 0; i < kBatch; ++i) {
        write(parameters[i], moments[i], seeds[at + i], elements, at + i);
      }
      if constexpr (kMayHaveModelParam) {
        if (!elements.has_low_bits_or_model_param) continue;
        MEZZO_UNROLL_IN_REGISTERS
        for (int i = 0; i < kBatch; ++i) {
          write_model_param(parameters[i], elements.low_bits_or_model_param[at + i]);
        }
      }
    }
  }

 private:
  static constexpr unsigned kMomentArraySize = Functor::kNumMoments > 0 ? Functor::kNumMoments : 1;
  using MomentFormat = FloatFormat<typename WeightFormat::Moment>;

  /// Of an element's 32 random bits the parameter uses the lower 16, and each moment the upper 16
  /// of a product with an odd number, which are uniform for any lower 16.
  C10_HOST_DEVICE C10_ALWAYS_INLINE static constexpr uint32_t noise_factor(unsigned moment) {
    return moment == 0 ? 1U : moment == 1 ? 0x9E3779B1U : 0x85EBCA77U;
  }

  template <int kCount>
  C10_HOST_DEVICE C10_ALWAYS_INLINE void compute(const Elements<kCount>& elements, int i,
                                                 Value& parameter,
                                                 Value (&moments)[kMomentArraySize]) const {
    Value gradient = elements.gradient[i] * first_multiplier_;
    if (has_second_multiplier_) gradient = gradient * second_multiplier_;
    if constexpr (kIsSplit) {
      combine_low_bits(elements.parameter[i], elements.low_bits_or_model_param[i], parameter);
    } else {
      Vec::Format::to_opmath(elements.parameter[i], parameter);
    }
    if constexpr (kMayHaveModelParam) {
      if (elements.has_low_bits_or_model_param) {
        load_modified_model_param(elements.low_bits_or_model_param[i], parameter);
      }
    }
    if constexpr (Functor::kNumMoments > 0) {  // GCC warns about an empty loop at -O0
      MEZZO_UNROLL_IN_REGISTERS
      for (unsigned k = 0; k != Functor::kNumMoments; ++k) {
        MomentFormat::to_opmath(elements.moments[k][i], moments[k]);
      }
    }
    update_(parameter, gradient, moments);
  }

  template <int kCount>
  C10_HOST_DEVICE C10_ALWAYS_INLINE void write(const Value& parameter,
                                               const Value (&moments)[kMomentArraySize],
                                               const Bits& seed, Elements<kCount>& elements,
                                               int i) const {
    Bits noise;
    if constexpr (kIsStochastic) {
      noise = seed;
      hash_bits(noise);
    }
    if constexpr (kIsSplit) {
      split_low_bits(parameter, elements.parameter[i], elements.low_bits_or_model_param[i]);
    } else if constexpr (kIsStochastic) {
      stochastic_round_to_bf16(parameter, noise & 0xFFFFU, elements.parameter[i]);
    } else {
      Vec::Format::from_opmath(parameter, elements.parameter[i]);
    }
    if constexpr (Functor::kNumMoments > 0) {
      MEZZO_UNROLL_IN_REGISTERS
      for (unsigned k = 0; k != Functor::kNumMoments; ++k) {
        if constexpr (kStochasticMoments) {
          stochastic_round_to_bf16(moments[k], (noise * noise_factor(k)) >> 16,
                                   elements.moments[k][i]);
        } else {
          MomentFormat::from_opmath(moments[k], elements.moments[k][i]);
        }
      }
    }
  }

  /// Sets the master to the model parameter's value if the parameter is not the master's rounding,
  /// i.e. was modified outside the optimizer.
  C10_HOST_DEVICE C10_ALWAYS_INLINE void load_modified_model_param(const Bits& model_param,
                                                                   Value& master) const {
    Bits rounded;
    Value modified;
    write_model_param(master, rounded);
    if (model_param_is_fp16_) {
      FloatFormat<c10::Half>::to_opmath(model_param, modified);
    } else {
      FloatFormat<c10::BFloat16>::to_opmath(model_param, modified);
    }
    master = model_param == rounded ? master : modified;
  }

  C10_HOST_DEVICE C10_ALWAYS_INLINE void write_model_param(const Value& parameter,
                                                           Bits& bits) const {
    if (model_param_is_fp16_) {
      FloatFormat<c10::Half>::from_opmath(parameter, bits);
    } else {
      FloatFormat<c10::BFloat16>::from_opmath(parameter, bits);
    }
  }

  typename Functor::template Update<Vec> update_;
  Value first_multiplier_, second_multiplier_;  // GradMultipliers
  bool has_second_multiplier_;
  bool model_param_is_fp16_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
