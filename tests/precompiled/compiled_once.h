#pragma once

#include <mezzo/detail/kernels/gradient_summary_loops.h>
#include <mezzo/detail/kernels/send_loops.h>
#include <mezzo/detail/kernels/unscale_loops.h>
#include <mezzo/optim/adam.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/sgd.h>

// The loops over gradients and parameters, each for several dtypes and instruction sets, are most
// of what compiling a unit that trains costs. The files beside this one compile them for all tests
// and examples; what is extern here is so for everybody else.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

#define MEZZO_COMPILED_ONCE_GRADIENTS(EXTERN)                         \
  EXTERN template SummaryLoops summary_loops<float>(CpuIsa);          \
  EXTERN template SummaryLoops summary_loops<double>(CpuIsa);         \
  EXTERN template SummaryLoops summary_loops<c10::Half>(CpuIsa);      \
  EXTERN template SummaryLoops summary_loops<c10::BFloat16>(CpuIsa);  \
  EXTERN template UnscaleLoops unscale_loops<float>(CpuIsa);          \
  EXTERN template UnscaleLoops unscale_loops<double>(CpuIsa);         \
  EXTERN template UnscaleLoops unscale_loops<c10::Half>(CpuIsa);      \
  EXTERN template UnscaleLoops unscale_loops<c10::BFloat16>(CpuIsa);  \
  EXTERN template SendLoops send_loops<float, c10::Half>(CpuIsa);     \
  EXTERN template SendLoops send_loops<float, c10::BFloat16>(CpuIsa); \
  EXTERN template SendLoops send_loops<double, c10::Half>(CpuIsa);    \
  EXTERN template SendLoops send_loops<double, c10::BFloat16>(CpuIsa);

#define MEZZO_COMPILED_ONCE_STEPS_OF(EXTERN, ...)                                     \
  EXTERN template StepFunction<__VA_ARGS__::Coefficients> step_function<__VA_ARGS__>( \
      at::ScalarType, at::ScalarType, CpuIsa);                                        \
  EXTERN template StepFunction<__VA_ARGS__::Coefficients>                             \
      bfloat16_step_function<__VA_ARGS__, SplitWeights>(CpuIsa);                      \
  EXTERN template StepFunction<__VA_ARGS__::Coefficients>                             \
      bfloat16_step_function<__VA_ARGS__, StochasticWeights>(CpuIsa);

#define MEZZO_COMPILED_ONCE_ADAM(EXTERN)                                              \
  MEZZO_COMPILED_ONCE_STEPS_OF(EXTERN, AdamRule<false>)                               \
  MEZZO_COMPILED_ONCE_STEPS_OF(EXTERN, AdamRule<true>)                                \
  EXTERN template class ElementwiseOptimizer<                                         \
      AdamTraits<optim::AdamOptions, optim::AdamParamState, /*kIsDecoupled=*/false>>; \
  EXTERN template class ElementwiseOptimizer<                                         \
      AdamTraits<optim::AdamWOptions, optim::AdamWParamState, /*kIsDecoupled=*/true>>;

#define MEZZO_COMPILED_ONCE_LAMB(EXTERN)                                                       \
  EXTERN template LambLoop lamb_loop<float, float>(CpuIsa);                                    \
  EXTERN template LambLoop lamb_loop<float, c10::BFloat16>(CpuIsa);                            \
  EXTERN template LambLoop lamb_loop<float, c10::Half>(CpuIsa);                                \
  EXTERN template LambLoop lamb_loop<double, double>(CpuIsa);                                  \
  EXTERN template LambLoop lamb_loop<double, float>(CpuIsa);                                   \
  EXTERN template LambLoop lamb_loop<c10::BFloat16, c10::BFloat16>(CpuIsa);                    \
  EXTERN template LambLoop lamb_loop<c10::Half, c10::Half>(CpuIsa);                            \
  EXTERN template LambLoop lamb_loop<c10::BFloat16, c10::BFloat16, SplitWeights>(CpuIsa);      \
  EXTERN template LambLoop lamb_loop<c10::BFloat16, c10::BFloat16, StochasticWeights>(CpuIsa); \
  EXTERN template class ElementwiseOptimizer<LambTraits<optim::LAMBOptions, optim::LAMBParamState>>;

#define MEZZO_COMPILED_ONCE_LION_AND_SGD(EXTERN)              \
  MEZZO_COMPILED_ONCE_STEPS_OF(EXTERN, LionRule)              \
  MEZZO_COMPILED_ONCE_STEPS_OF(EXTERN, SgdRule<false>)        \
  MEZZO_COMPILED_ONCE_STEPS_OF(EXTERN, SgdRule<true>)         \
  EXTERN template class ElementwiseOptimizer<                 \
      LionTraits<optim::LionOptions, optim::LionParamState>>; \
  EXTERN template class ElementwiseOptimizer<SgdTraits<optim::SGDOptions, optim::SGDParamState>>;

MEZZO_COMPILED_ONCE_GRADIENTS(extern)
MEZZO_COMPILED_ONCE_ADAM(extern)
MEZZO_COMPILED_ONCE_LAMB(extern)
MEZZO_COMPILED_ONCE_LION_AND_SGD(extern)

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
