#pragma once

#include <mezzo/detail/kernels/cpu_isa.h>
#include <mezzo/detail/kernels/cpu_lanes.h>
#include <mezzo/detail/kernels/gradient_use.h>
#include <mezzo/version.h>

#include <c10/core/ScalarType.h>
#include <c10/macros/Macros.h>

#include <array>
#include <cstdint>

// The CPU's loop of every optimizer whose update looks at one element at a time: reads gradient,
// parameter and moments once, and writes parameter and moments once. A Rule (adam_element.h) has
//   Coefficients, what one step of one parameter multiplies with,
//   kMoments, and Element<Lanes>, made of Coefficients and called with the values.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline constexpr int kMaxMoments = 3;

/// A stretch of one parameter with what belongs to it, each of any alignment.
struct StepSpan {
  void* parameter;
  void* gradient;
  std::array<void*, kMaxMoments> moments;  ///< of the parameter's dtype
  int64_t count;
};

template <class Parameter, class Gradient, class Rule, class Lanes>
C10_ALWAYS_INLINE int64_t step_lanes(const StepSpan& span, int64_t begin,
                                     const typename Rule::Coefficients& coefficients,
                                     const GradientUse& use) {
  using Format = typename Lanes::Format;
  using Stored = typename Lanes::Stored;
  using GradientLanes = typename Lanes::template Like<Gradient>;
  using StoredGradient = typename GradientLanes::Stored;

  const typename Rule::template Element<Lanes> update(coefficients);
  typename Lanes::Value factor;
  Lanes::broadcast(static_cast<typename Format::Value>(use.factor), factor);
  const typename GradientLanes::Bits zero{};
  auto* const parameters = static_cast<Stored*>(span.parameter);
  auto* const gradients = static_cast<StoredGradient*>(span.gradient);
  const bool clear = use.clear;
  int64_t i = begin;
  for (; i + Lanes::kWidth <= span.count; i += Lanes::kWidth) {
    typename GradientLanes::Bits gradient_bits;
    typename GradientLanes::Value stored_gradient;
    GradientLanes::load(gradients + i, gradient_bits);
    GradientLanes::Format::widen(gradient_bits, stored_gradient);
    typename Lanes::Value gradient;
    Lanes::convert(stored_gradient, gradient);
    gradient = gradient * factor;

    typename Lanes::Bits bits;
    typename Lanes::Value parameter;
    typename Lanes::Value moments[Rule::kMoments > 0 ? Rule::kMoments : 1];
    Lanes::load(parameters + i, bits);
    Format::widen(bits, parameter);
    for (int k = 0; k < Rule::kMoments; ++k) {
      Lanes::load(static_cast<const Stored*>(span.moments[k]) + i, bits);
      Format::widen(bits, moments[k]);
    }
    update(parameter, gradient, moments);
    Format::narrow(parameter, bits);
    Lanes::store(bits, parameters + i);
    for (int k = 0; k < Rule::kMoments; ++k) {
      Format::narrow(moments[k], bits);
      Lanes::store(bits, static_cast<Stored*>(span.moments[k]) + i);
    }
    if (clear) GradientLanes::store(zero, gradients + i);
  }
  return i;
}

template <class Parameter, class Gradient, class Rule, class Lanes>
struct OptimizerStepKernel {
  C10_ALWAYS_INLINE static void run(const StepSpan& span,
                                    const typename Rule::Coefficients& coefficients,
                                    const GradientUse& use) {
    const int64_t done = step_lanes<Parameter, Gradient, Rule, Lanes>(span, 0, coefficients, use);
    step_lanes<Parameter, Gradient, Rule, ScalarLanes<Parameter>>(span, done, coefficients, use);
  }
};

template <class Coefficients>
using StepFunction = void (*)(const StepSpan&, const Coefficients&, const GradientUse&);

/// The loop for a parameter's dtype and its gradient's, which is the same or a narrower one; null
/// for a pair that there is no loop for.
template <class Rule>
StepFunction<typename Rule::Coefficients> step_function(at::ScalarType parameter,
                                                        at::ScalarType gradient, CpuIsa isa) {
  if (parameter == at::kFloat) {
    if (gradient == at::kFloat) return cpu_kernel<OptimizerStepKernel, float, float, Rule>(isa);
    if (gradient == at::kBFloat16) {
      return cpu_kernel<OptimizerStepKernel, float, c10::BFloat16, Rule>(isa);
    }
    if (gradient == at::kHalf) return cpu_kernel<OptimizerStepKernel, float, c10::Half, Rule>(isa);
  }
  if (parameter == at::kDouble) {
    if (gradient == at::kDouble) return cpu_kernel<OptimizerStepKernel, double, double, Rule>(isa);
    if (gradient == at::kFloat) return cpu_kernel<OptimizerStepKernel, double, float, Rule>(isa);
  }
  if (parameter == at::kBFloat16 && gradient == at::kBFloat16) {
    return cpu_kernel<OptimizerStepKernel, c10::BFloat16, c10::BFloat16, Rule>(isa);
  }
  if (parameter == at::kHalf && gradient == at::kHalf) {
    return cpu_kernel<OptimizerStepKernel, c10::Half, c10::Half, Rule>(isa);
  }
  return nullptr;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
