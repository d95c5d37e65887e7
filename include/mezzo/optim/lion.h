/// \file
/// Fused Lion: unscale, clip, skip, update and zero gradients in one pass over memory.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/lion_functor.h>
#include <mezzo/optim/detail/fused_optimizer.h>
#include <mezzo/optim/detail/fused_param_state.h>
#include <mezzo/optim/detail/serializable_options.h>
#include <mezzo/optim/optimizer_ref.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <array>
#include <tuple>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

/// Options of Lion, with the paper's names and defaults.
struct LionOptions : public detail::SerializableOptions<LionOptions> {
  /// The names of the options in archives.
  static constexpr std::array kKeys{"lr", "betas", "weight_decay"};
  /// The type of `betas`.
  using betas_t = std::tuple<double, double>;
  /// Sets `lr`.
  LionOptions(double lr = 1e-4) : lr_(lr) {}

  /// Learning rate: the update of each element. Use a third to a tenth of AdamW's.
  TORCH_ARG(double, lr);
  /// Coefficients of exp_avg in the update direction (beta1) and in its running mean (beta2); in
  /// [0, 1).
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.99);
  /// Decoupled weight decay.
  TORCH_ARG(double, weight_decay) = 0;

 public:
  /// Returns std::tie of the options.
  static auto values(auto& self) { return std::tie(self.lr_, self.betas_, self.weight_decay_); }
};

/// Per-parameter state of Lion: `exp_avg()` of the parameter's shape and dtype, and `step()`, the
/// number of applied steps, which synchronizes for a parameter that is not on the CPU.
struct LionParamState : public detail::FusedParamState<LionParamState, detail::StateWithStep<>> {
  /// Running mean of the gradients.
  TORCH_ARG(at::Tensor, exp_avg);

 public:
  /// Archive keys of the moments.
  static constexpr std::array kMoments{"exp_avg"};
  /// Returns exp_avg.
  at::Tensor& moment(int /*k*/) noexcept override { return exp_avg_; }
};

}  // namespace optim

namespace detail {

/// Traits of Lion.
template <class OptionsT, class State>
struct LionTraits : OptimizerTraits<OptionsT, State, LionFunctor> {
  static constexpr const char* kName = "Lion";
  static constexpr const char* kOptionsName = "mezzo::optim::LionOptions";

  static void read_hyperparams(const OptionsT& options, GroupHyperParams& hyper_params) {
    check_hyperparams(kName, {{"lr", options.lr()}, {"weight_decay", options.weight_decay()}},
                      options.betas());
    const auto [beta1, beta2] = options.betas();
    hyper_params.lr = options.lr();
    hyper_params.functor_args = LionHyperParams{beta1, beta2, options.weight_decay()};
    hyper_params.aten_unsupported_reason = "ATen has no kernel for Lion";
  }
};

}  // namespace detail

namespace optim {

/// Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023) with decoupled weight
/// decay. One moment; 20 bytes of memory traffic per parameter, where AdamW has 28.
///
/// torch and ATen have no Lion: archives are mezzo's, and CUDA needs the CMake target mezzo::cuda.
/// See AdamW (mezzo/optim/adamw.h) for everything else.
class Lion : public detail::FusedOptimizer<detail::LionTraits<LionOptions, LionParamState>> {
 public:
  /// AdamW's constructors with LionOptions.
  using FusedOptimizer::FusedOptimizer;
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifdef MEZZO_COMPILED_LIB
#include <mezzo/optim/compiled.h>  // IWYU pragma: keep
#endif
