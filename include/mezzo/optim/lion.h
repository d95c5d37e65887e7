/// \file
/// Lion in one pass over memory, together with the rest of a mixed-precision step (unscale, clip,
/// skip, zero the gradients).
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/kernels/lion_element.h>
#include <mezzo/optim/detail/member_table.h>
#include <mezzo/optim/detail/optimizer_shell.h>
#include <mezzo/optim/detail/param_slot.h>
#include <mezzo/optim/fused_optimizer.h>
#include <mezzo/optim/fused_options.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <tuple>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

/// Lion's options, with the paper's names and defaults.
struct LionOptions : public FusedOptions<LionOptions> {
  /// The type of `betas`.
  using betas_t = std::tuple<double, double>;

  /// A template, so that a unit that only sees the class compiles no virtual functions.
  template <std::convertible_to<double> Lr = double>
  LionOptions(Lr lr = 1e-4) : lr_(lr) {}

  /// Distance by which every element moves in a step: take a third to a tenth of AdamW's rate.
  TORCH_ARG(double, lr) = 1e-4;
  /// The first weighs the running mean against the gradient in a step's direction. The second is
  /// the share of the running mean that a step keeps. Both are in [0, 1).
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.99);
  /// Each step shrinks parameters by lr * weight_decay, whatever the gradient.
  TORCH_ARG(double, weight_decay) = 0;

  friend struct detail::MemberTable;
  /// The members, as files and comparisons list them.
  static auto members(auto& own) {
    return std::tuple{detail::member("lr", own.lr()), detail::member("betas", own.betas()),
                      detail::member("weight_decay", own.weight_decay())};
  }
};

/// Lion's state of a parameter: `exp_avg()`, of the parameter's shape and dtype, and `step()`, the
/// number of applied steps, which waits for the parameter's device.
struct LionParamState : public detail::ParamState<LionParamState, detail::CountedState<>> {
  /// The running mean of gradients.
  TORCH_ARG(at::Tensor, exp_avg);

 public:
  /// Returns exp_avg.
  at::Tensor& moment(int /*k*/) noexcept override { return exp_avg_; }

  friend struct detail::MemberTable;
  /// The members, as files and comparisons list them.
  static auto members(auto& own) { return std::tuple{detail::member("exp_avg", own.exp_avg())}; }
};

}  // namespace optim

namespace detail {

/// Lion's part of OptimizerTraits.
template <class Options, class State>
struct LionTraits : OptimizerTraits<LionTraits<Options, State>, Options, State, LionRule> {
  static constexpr const char* kName = "Lion";

  static void read(const Options& options, GroupNumbers& numbers) {
    check_numbers(kName, {{"lr", options.lr()}, {"weight_decay", options.weight_decay()}},
                  options.betas());
    const auto [beta1, beta2] = options.betas();
    numbers.lr = options.lr();
    numbers.constants = LionConstants{beta1, beta2, options.weight_decay()};
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
class Lion : public detail::OptimizerShell<detail::LionTraits<LionOptions, LionParamState>> {
 public:
  /// Takes param groups or parameters, and LionOptions, as AdamW's constructors do.
  /// \throws c10::Error unless lr and weight_decay are at least 0 and the betas in [0, 1), or if
  ///   there is no parameter, a parameter is given twice, or two share memory
  using OptimizerShell::OptimizerShell;
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifdef MEZZO_COMPILED
#include <mezzo/optim/compiled.h>  // IWYU pragma: keep
#endif
