#pragma once

#include <mezzo/detail/kernels/cpu_isa.h>
#include <mezzo/detail/kernels/lion_element.h>
#include <mezzo/detail/optim/aten_step.h>
#include <mezzo/detail/optim/step_loops.h>
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

/// What ElementwiseOptimizer asks about Lion.
template <class OptionsT, class StateT>
struct LionTraits {
  using Options = OptionsT;
  using State = StateT;
  using Constants = LionConstants;
  using Coefficients = LionCoefficients;
  static constexpr const char* kName = "Lion";

  static void check(const Options& options) {
    const auto [beta1, beta2] = options.betas();
    TORCH_CHECK(options.lr() >= 0, "Lion: lr is ", options.lr(), "; it should be at least 0");
    TORCH_CHECK(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1, "Lion: betas are ", beta1,
                " and ", beta2, "; they should be at least 0 and less than 1");
    TORCH_CHECK(options.weight_decay() >= 0, "Lion: weight_decay is ", options.weight_decay(),
                "; it should be at least 0");
  }

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
  static at::Tensor& moment(State& state, int) { return state.exp_avg(); }

  static void aten_step(const Options&, const AtenLists& lists, const AtenVerdict&) {
    TORCH_CHECK(false, "Lion: ATen has no kernel for it on ", lists.parameters.front().device(),
                "; link the target mezzo::cuda, or keep the parameters on the CPU");
  }

#ifdef MEZZO_WITH_CUDA
  static bool variant(const Options&) { return false; }
  static constexpr auto cuda_step = &cuda::lion_step_;
#endif
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
