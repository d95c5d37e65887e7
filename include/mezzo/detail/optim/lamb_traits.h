#pragma once

#include <mezzo/detail/kernels/cpu_isa.h>
#include <mezzo/detail/kernels/lamb_element.h>
#include <mezzo/detail/kernels/lamb_step_cpu.h>
#include <mezzo/detail/optim/aten_step.h>
#include <mezzo/optim/weight_storage.h>
#include <mezzo/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <tuple>

#ifdef MEZZO_WITH_CUDA
#include <mezzo/detail/kernels/cuda_launch.h>
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

  static void check(const Options& options) {
    const auto [beta1, beta2] = options.betas();
    TORCH_CHECK(options.lr() >= 0, "LAMB: lr is ", options.lr(), "; it should be at least 0");
    TORCH_CHECK(options.eps() >= 0, "LAMB: eps is ", options.eps(), "; it should be at least 0");
    TORCH_CHECK(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1, "LAMB: betas are ", beta1,
                " and ", beta2, "; they should be at least 0 and less than 1");
    TORCH_CHECK(options.weight_decay() >= 0, "LAMB: weight_decay is ", options.weight_decay(),
                "; it should be at least 0");
  }

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
  static at::Tensor& moment(State& state, int k) {
    return k == 0 ? state.exp_avg() : state.exp_avg_sq();
  }

  static void aten_step(const Options&, const AtenLists& lists, const AtenVerdict&) {
    TORCH_CHECK(false, "LAMB: ATen has no kernel for it on ", lists.parameters.front().device(),
                "; link the target mezzo::cuda, or keep the parameters on the CPU");
  }

#ifdef MEZZO_WITH_CUDA
  static bool variant(const Options&) { return false; }
  static constexpr auto cuda_step = &cuda::lamb_step_;
#endif
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
