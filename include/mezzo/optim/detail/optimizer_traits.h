#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/optimizer_step_kernel.h>
#include <mezzo/optim/detail/member_table.h>
#include <mezzo/optim/fused_options.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// What ElementwiseOptimizer asks about an optimizer, as most of them answer: something is
/// remembered of every parameter, and ATen has no kernel.
template <class OptionsT, class StateT>
struct OptimizerTraits {
  using Options = OptionsT;
  using State = StateT;

  static bool has_state(const Options&) { return true; }
  static bool begins(const Options&, State&) { return false; }

  /// The k-th in the state's list of members; the last one where that is shorter.
  static at::Tensor& moment(State& state, int k) {
    at::Tensor* moment = nullptr;
    each_member(state, [&](const auto& member) {
      if (k-- >= 0) moment = &member.value;
    });
    return *moment;
  }

  static constexpr bool kAtenHasIt = false;
  static bool variant(const Options&) { return false; }
};

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
