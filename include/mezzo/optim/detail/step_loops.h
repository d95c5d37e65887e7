#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/optimizer_step_cpu.h>
#include <mezzo/optim/fused_options.h>

#include <c10/core/ScalarType.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The CPU's loop of a Rule for parameters that are kept in a dtype and a way; null if there is
/// none for gradients of that dtype.
template <class Rule>
StepFunction<typename Rule::Coefficients> step_loop(optim::WeightStorage storage,
                                                    at::ScalarType kept, at::ScalarType gradient,
                                                    CpuIsa isa) {
  using optim::WeightStorage;
  if (storage == WeightStorage::plain || storage == WeightStorage::master) {
    return step_function<Rule>(kept, gradient, isa);
  }
  if (gradient != at::kBFloat16) return nullptr;
  return storage == WeightStorage::split_master
             ? bfloat16_step_function<Rule, SplitWeights>(isa)
             : bfloat16_step_function<Rule, StochasticWeights>(isa);
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
