#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/adam_element.h>
#include <mezzo/kernels/step_use.h>
#include <mezzo/kernels/weight_formats.h>

#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>

#include <type_traits>

// AdamW's step with moments in blocks of 8 bits (block8.h), for the CPU's loop and for the device's
// kernel: a block's moments become floats, take the step of optimizer_step_body.h, and become codes
// under the block's new scale.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// One parameter's part of a step.
struct AdamW8bitStep {
  StepSpan span;                   ///< its moments are codes, or floats without scales
  float* scales[2];                ///< a float for each block of a moment; null: moments are floats
  at::ScalarType parameter_dtype;  ///< float or bfloat16
  at::ScalarType gradient_dtype;   ///< the parameter's, or float
  AdamCoefficients coefficients;
  StepUse use;
};

/// Weights rounded stochastically, with moments that are floats while they are computed with.
struct StochasticWeightsFloatMoments : StochasticWeights {
  using Moment = float;
};

/// The weights of an AdamW8bit: a parameter of bfloat16 is rounded stochastically.
template <class Parameter>
using AdamW8bitWeights = std::conditional_t<std::is_same_v<Parameter, float>, PlainWeights<float>,
                                            StochasticWeightsFloatMoments>;

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
