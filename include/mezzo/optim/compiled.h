/// \file
/// CMake target `mezzo::compiled`: mezzo's kernels and functions compiled once, for programs of
/// several translation units. The kernels, for several dtypes and instruction sets, dominate
/// compile time.
///
///     find_package(mezzo 0.3 CONFIG REQUIRED COMPONENTS compiled)   # or add_subdirectory(mezzo)
///     target_link_libraries(train PRIVATE mezzo::compiled)          # instead of mezzo::mezzo
///
/// For CUDA kernels also link `mezzo::cuda`. Results are bitwise identical. The library also has
/// GradScaler, MasterWeights, op overrides and checkpoints (`mezzo/compiled.cpp`).
///
/// The target defines MEZZO_COMPILED_LIB for its users, whose translation units then use the
/// library's definitions. Do not define it anywhere else. Translation units without it have the
/// same functions inline, and link together with the others.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/sgd.h>

// compiled.cpp instantiates these templates; they are extern everywhere else.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// \cond
#define MEZZO_COMPILED_STEP_KERNEL(EXTERN, ...)                                                   \
  EXTERN template StepKernelFn get_step_kernel<__VA_ARGS__>(optim::WeightStorage, at::ScalarType, \
                                                            CpuIsa);

#define MEZZO_COMPILED_OPTIMIZERS(EXTERN)                                                      \
  MEZZO_COMPILED_STEP_KERNEL(EXTERN, AdamFunctor<false>)                                       \
  MEZZO_COMPILED_STEP_KERNEL(EXTERN, AdamFunctor<true>)                                        \
  EXTERN template class FusedOptimizer<                                                        \
      AdamTraits<optim::AdamOptions, optim::AdamParamState, /*kIsDecoupled=*/false>>;          \
  EXTERN template class FusedOptimizer<                                                        \
      AdamTraits<optim::AdamWOptions, optim::AdamWParamState, /*kIsDecoupled=*/true>>;         \
  MEZZO_COMPILED_STEP_KERNEL(EXTERN, LionFunctor)                                              \
  MEZZO_COMPILED_STEP_KERNEL(EXTERN, SgdFunctor<false>)                                        \
  MEZZO_COMPILED_STEP_KERNEL(EXTERN, SgdFunctor<true>)                                         \
  EXTERN template class FusedOptimizer<LionTraits<optim::LionOptions, optim::LionParamState>>; \
  EXTERN template class FusedOptimizer<SgdTraits<optim::SGDOptions, optim::SGDParamState>>;
/// \endcond

#ifdef MEZZO_COMPILED_LIB
MEZZO_COMPILED_OPTIMIZERS(extern)
#endif

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
