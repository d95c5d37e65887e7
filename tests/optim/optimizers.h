#pragma once

#include <mezzo/optim/adam.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lamb.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/sgd.h>

// Each optimizer brings some seventy loops, which optimizers.cpp compiles for all test files: ten
// seconds of each file's time.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

#define MEZZO_TEST_OPTIMIZERS(EXTERN)                                                  \
  EXTERN template class ElementwiseOptimizer<                                          \
      AdamTraits<optim::AdamOptions, optim::AdamParamState, /*kIsDecoupled=*/false>>;  \
  EXTERN template class ElementwiseOptimizer<                                          \
      AdamTraits<optim::AdamWOptions, optim::AdamWParamState, /*kIsDecoupled=*/true>>; \
  EXTERN template class ElementwiseOptimizer<                                          \
      LambTraits<optim::LAMBOptions, optim::LAMBParamState>>;                          \
  EXTERN template class ElementwiseOptimizer<                                          \
      LionTraits<optim::LionOptions, optim::LionParamState>>;                          \
  EXTERN template class ElementwiseOptimizer<SgdTraits<optim::SGDOptions, optim::SGDParamState>>;

MEZZO_TEST_OPTIMIZERS(extern)

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
