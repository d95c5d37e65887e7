#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/cpu_isa.h>
#include <mezzo/kernels/lamb_element.h>
#include <mezzo/kernels/lamb_step_cpu.h>
#include <mezzo/optim/detail/option_checks.h>
#include <mezzo/optim/fused_options.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <tuple>

#ifdef MEZZO_WITH_CUDA
#include <mezzo/kernels/cuda_launch.h>
#endif

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// What ElementwiseOptimizer asks about LAMB, which looks at one element at a time, but twice:
/// run_step_cpu and cuda_step make two passes.
template <class OptionsT, class StateT>
struct LambTraits {
  using Options = OptionsT;
  using State = StateT;
  using Constants = LambConstants;
  using Coefficients = LambCoefficients;
  static constexpr const char* kName = "LAMB";

  static void check(const Options& options) { check_adam_options(kName, options); }

  static Constants constants(const Options& options) {
    return {.beta1 = std::get<0>(options.betas()),
            .beta2 = std::get<1>(options.betas()),
            .eps = options.eps(),
            .weight_decay = options.weight_decay(),
            .corrects_bias = options.bias_correction(),
            .always_adapts = options.always_adapt()};
  }

  using Loop = LambLoop;
  static Loop loop(const Options&, optim::WeightStorage storage, at::ScalarType kept,
                   at::ScalarType gradient, CpuIsa isa) {
    return lamb_loop(storage, kept, gradient, isa);
  }

  static int moments(const Options&) { return 2; }
  static bool has_state(const Options&) { return true; }
  static bool begins(const Options&, State&) { return false; }
  static at::Tensor& moment(State& state, int k) {
    return k == 0 ? state.exp_avg() : state.exp_avg_sq();
  }

  static constexpr bool kAtenHasIt = false;

#ifdef MEZZO_WITH_CUDA
  static bool variant(const Options&) { return false; }
  static constexpr auto cuda_step = &cuda::lamb_step_;
#endif
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
