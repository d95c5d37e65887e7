#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/cpu_isa.h>
#include <mezzo/kernels/sgd_element.h>
#include <mezzo/optim/detail/aten_step.h>
#include <mezzo/optim/detail/option_checks.h>
#include <mezzo/optim/detail/step_loops.h>
#include <mezzo/optim/fused_options.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_sgd.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#ifdef MEZZO_WITH_CUDA
#include <mezzo/kernels/cuda_launch.h>
#endif

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// What ElementwiseOptimizer asks about SGD.
template <class OptionsT, class StateT>
struct SgdTraits {
  using Options = OptionsT;
  using State = StateT;
  using Constants = SgdConstants;
  using Coefficients = SgdCoefficients;
  static constexpr const char* kName = "SGD";

  static void check(const Options& options) {
    check_at_least_0(kName, "lr", options.lr());
    check_at_least_0(kName, "momentum", options.momentum());
    check_at_least_0(kName, "weight_decay", options.weight_decay());
    TORCH_CHECK(!options.nesterov() || (options.momentum() > 0 && options.dampening() == 0),
                "SGD: nesterov is set with momentum ", options.momentum(), " and dampening ",
                options.dampening(), "; it needs a positive momentum and a dampening of 0");
  }

  static Constants constants(const Options& options) {
    return {.momentum = options.momentum(),
            .dampening = options.dampening(),
            .weight_decay = options.weight_decay(),
            .nesterov = options.nesterov()};
  }

  using Loop = StepFunction<Coefficients>;
  static Loop loop(const Options& options, optim::WeightStorage storage, at::ScalarType kept,
                   at::ScalarType gradient, CpuIsa isa) {
    return options.momentum() != 0 ? step_loop<SgdRule<true>>(storage, kept, gradient, isa)
                                   : step_loop<SgdRule<false>>(storage, kept, gradient, isa);
  }

  static int moments(const Options& options) { return options.momentum() == 0 ? 0 : 1; }
  static bool has_state(const Options& options) { return options.momentum() != 0; }
  /// A buffer begins as a gradient, though there were steps before without momentum.
  static bool begins(const Options& options, State& state) {
    return options.momentum() != 0 && !state.momentum_buffer().defined();
  }
  static at::Tensor& moment(State& state, int) { return state.momentum_buffer(); }

#ifdef MEZZO_WITH_CUDA
  static bool variant(const Options& options) { return options.momentum() != 0; }
  static constexpr auto cuda_step = &cuda::sgd_step_;
#endif

  static constexpr bool kAtenHasIt = true;

  /// The buffer of a first step starts as zeros, not as the gradient: the same where dampening is
  /// 0. A kernel told of a first step would not see that the device skipped it.
  static void check_for_aten(const Options& options) {
    TORCH_CHECK(
        options.dampening() == 0 || options.momentum() == 0, "SGD: dampening is ",
        options.dampening(),
        " on a device that has no kernel of mezzo's; link the target mezzo::cuda, or set 0");
  }

  static void aten_step(const Options& options, const AtenLists& lists,
                        const AtenVerdict& verdict) {
    const auto call = [&](const auto& lr) {
      at::_fused_sgd_(lists.parameters, lists.gradients, lists.moments[0], options.weight_decay(),
                      options.momentum(), lr, options.dampening(), options.nesterov(),
                      /*maximize=*/false, /*is_first_step=*/false, verdict.grad_scale,
                      verdict.found_inf);
    };
    if (verdict.lr_factor) {
      call(*verdict.lr_factor * options.lr());
    } else {
      call(options.lr());
    }
  }
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
