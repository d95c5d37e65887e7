/// \file
/// Lion in one pass over memory, together with the rest of a mixed-precision step (unscale, clip,
/// skip, zero the gradients).
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/lion_functor.h>
#include <mezzo/optim/detail/fused_optimizer.h>
#include <mezzo/optim/detail/fused_param_state.h>
#include <mezzo/optim/optimizer_ref.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <array>
#include <tuple>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

/// Lion's options, with the paper's names and defaults.
struct LionOptions : public detail::SerializableOptions<LionOptions> {
  /// The names of the options in files.
  static constexpr std::array kKeys{"lr", "betas", "weight_decay"};
  /// The type of `betas`.
  using betas_t = std::tuple<double, double>;
  /// Sets `lr`; the other options have their defaults.
  LionOptions(double lr = 1e-4) : lr_(lr) {}

  /// Distance by which every element moves in a step: take a third to a tenth of AdamW's rate.
  TORCH_ARG(double, lr);
  /// The first weighs the running mean against the gradient in a step's direction. The second is
  /// the share of the running mean that a step keeps. Both are in [0, 1).
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.99);
  /// Each step shrinks parameters by lr * weight_decay, whatever the gradient.
  TORCH_ARG(double, weight_decay) = 0;

 public:
  /// Returns references to these options.
  static auto values(auto& self) { return std::tie(self.lr_, self.betas_, self.weight_decay_); }
};

/// Lion's state of a parameter: `exp_avg()`, of the parameter's shape and dtype, and `step()`, the
/// number of applied steps, which waits for the parameter's device.
struct LionParamState : public detail::FusedParamState<LionParamState, detail::CountedState<>> {
  /// The running mean of gradients.
  TORCH_ARG(at::Tensor, exp_avg);

 public:
  /// The keys of the moments in files.
  static constexpr std::array kMoments{"exp_avg"};
  /// Returns exp_avg.
  at::Tensor& moment(int /*k*/) noexcept override { return exp_avg_; }
};

}  // namespace optim

namespace detail {

/// Lion's rule.
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
    hyper_params.aten_unsupported_reason = "ATen has no kernel of this optimizer";
  }
};

}  // namespace detail

namespace optim {

/// Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023) with decoupled weight
/// decay. It keeps one moment, and moves 20 bytes a parameter where AdamW moves 28.
///
/// libtorch has no Lion: files are mezzo's own. ATen has no kernel of it: on CUDA it needs the
/// target mezzo::cuda. Everything else in the comment of AdamW (mezzo/optim/adamw.h) holds here
/// too.
class Lion : public detail::FusedOptimizer<detail::LionTraits<LionOptions, LionParamState>> {
 public:
  /// Takes what AdamW's constructors take, with LionOptions.
  /// \throws c10::Error unless lr and weight_decay are at least 0 and the betas in [0, 1), or if
  ///   there is no parameter, a parameter is given twice, or two share memory
  using FusedOptimizer::FusedOptimizer;
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifdef MEZZO_COMPILED_LIB
#include <mezzo/optim/compiled.h>  // IWYU pragma: keep
#endif
