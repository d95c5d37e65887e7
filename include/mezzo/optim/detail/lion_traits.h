#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/cpu_isa.h>
#include <mezzo/kernels/lion_element.h>
#include <mezzo/optim/detail/option_checks.h>
#include <mezzo/optim/detail/step_loops.h>
#include <mezzo/optim/fused_options.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <tuple>

#ifdef MEZZO_WITH_CUDA
#include <mezzo/kernels/cuda_launch.h>
#endif

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// What ElementwiseOptimizer asks about Lion.
template <class OptionsT, class StateT>
struct LionTraits {
  using Options = OptionsT;
  using State = StateT;
  using Constants = LionConstants;
  using Coefficients = LionCoefficients;
  static constexpr const char* kName = "Lion";

  static void check(const Options& options) { check_lr_betas_and_decay(kName, options); }

  static Constants constants(const Options& options) {
    return {.beta1 = std::get<0>(options.betas()),
            .beta2 = std::get<1>(options.betas()),
            .weight_decay = options.weight_decay()};
  }

  using Loop = StepFunction<Coefficients>;
  static Loop loop(const Options&, optim::WeightStorage storage, at::ScalarType kept,
                   at::ScalarType gradient, CpuIsa isa) {
    return step_loop<LionRule>(storage, kept, gradient, isa);
  }

  static int moments(const Options&) { return 1; }
  static bool has_state(const Options&) { return true; }
  static bool begins(const Options&, State&) { return false; }
  static at::Tensor& moment(State& state, int) { return state.exp_avg(); }

  static constexpr bool kAtenHasIt = false;

#ifdef MEZZO_WITH_CUDA
  static bool variant(const Options&) { return false; }
  static constexpr auto cuda_step = &cuda::lion_step_;
#endif
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
