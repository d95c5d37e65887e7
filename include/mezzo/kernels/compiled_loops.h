/// \file
/// The loops over gradients that the target `mezzo::compiled` holds: what its files define, and
/// what is extern for everybody else (mezzo/optim/compiled.h).
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/compress_loops.h>
#include <mezzo/kernels/gradient_summary_loops.h>
#include <mezzo/kernels/unscale_loops.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

#define MEZZO_COMPILED_GRADIENTS(EXTERN)                                      \
  EXTERN template SummaryLoops summary_loops<float>(CpuIsa);                  \
  EXTERN template SummaryLoops summary_loops<double>(CpuIsa);                 \
  EXTERN template SummaryLoops summary_loops<c10::Half>(CpuIsa);              \
  EXTERN template SummaryLoops summary_loops<c10::BFloat16>(CpuIsa);          \
  EXTERN template StatisticsLoop statistics_loop<float>(CpuIsa);              \
  EXTERN template StatisticsLoop statistics_loop<double>(CpuIsa);             \
  EXTERN template StatisticsLoop statistics_loop<c10::Half>(CpuIsa);          \
  EXTERN template StatisticsLoop statistics_loop<c10::BFloat16>(CpuIsa);      \
  EXTERN template UnscaleLoops unscale_loops<float>(CpuIsa);                  \
  EXTERN template UnscaleLoops unscale_loops<double>(CpuIsa);                 \
  EXTERN template UnscaleLoops unscale_loops<c10::Half>(CpuIsa);              \
  EXTERN template UnscaleLoops unscale_loops<c10::BFloat16>(CpuIsa);          \
  EXTERN template CompressLoops compress_loops<float, c10::Half>(CpuIsa);     \
  EXTERN template CompressLoops compress_loops<float, c10::BFloat16>(CpuIsa); \
  EXTERN template CompressLoops compress_loops<double, c10::Half>(CpuIsa);    \
  EXTERN template CompressLoops compress_loops<double, c10::BFloat16>(CpuIsa);

#if defined(MEZZO_COMPILED) && (!defined(MEZZO_WITH_CUDA) || defined(MEZZO_COMPILED_WITH_CUDA))
MEZZO_COMPILED_GRADIENTS(extern)
#endif

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
