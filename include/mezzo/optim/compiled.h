/// \file
/// The target `mezzo::compiled`: mezzo's loops and functions compiled once, for programs of many
/// units. The loops over gradients and parameters, for several dtypes and instruction sets, are
/// most of what compiling a unit that trains costs.
///
///     find_package(mezzo 0.3 CONFIG REQUIRED COMPONENTS compiled)   # or add_subdirectory(mezzo)
///     target_link_libraries(train PRIVATE mezzo::compiled)          # in place of mezzo::mezzo
///
/// For CUDA kernels link `mezzo::cuda` beside it. Results are the same bits. The library also holds
/// GradScaler, MasterWeights, op overrides and checkpoints (`mezzo/compiled.cpp`).
///
/// The target defines MEZZO_COMPILED_LIB for its users' units, which then leave these functions to
/// the library. It is a choice for the whole program: define it nowhere else. Units without it hold
/// the same functions inline, and still link.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/sgd.h>

// compiled.cpp defines these templates; for all other units they are extern.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// \cond
#define MEZZO_COMPILED_STEPS_OF(EXTERN, ...)                                                      \
  EXTERN template StepKernelFn get_step_kernel<__VA_ARGS__>(optim::WeightStorage, at::ScalarType, \
                                                            CpuIsa);

#define MEZZO_COMPILED_RULES(EXTERN)                                                           \
  MEZZO_COMPILED_STEPS_OF(EXTERN, AdamFunctor<false>)                                          \
  MEZZO_COMPILED_STEPS_OF(EXTERN, AdamFunctor<true>)                                           \
  EXTERN template class FusedOptimizer<                                                        \
      AdamTraits<optim::AdamOptions, optim::AdamParamState, /*kIsDecoupled=*/false>>;          \
  EXTERN template class FusedOptimizer<                                                        \
      AdamTraits<optim::AdamWOptions, optim::AdamWParamState, /*kIsDecoupled=*/true>>;         \
  MEZZO_COMPILED_STEPS_OF(EXTERN, LionFunctor)                                                 \
  MEZZO_COMPILED_STEPS_OF(EXTERN, SgdFunctor<false>)                                           \
  MEZZO_COMPILED_STEPS_OF(EXTERN, SgdFunctor<true>)                                            \
  EXTERN template class FusedOptimizer<LionTraits<optim::LionOptions, optim::LionParamState>>; \
  EXTERN template class FusedOptimizer<SgdTraits<optim::SGDOptions, optim::SGDParamState>>;
/// \endcond

#ifdef MEZZO_COMPILED_LIB
MEZZO_COMPILED_RULES(extern)
#endif

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
