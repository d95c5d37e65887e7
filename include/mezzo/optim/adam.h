/// \file
/// Adam in one pass: what `torch::optim::Adam` is, with the rest of a mixed-precision step
/// (unscale, clip, skip, clear) done while its memory is read and written once.
#pragma once

#include <mezzo/detail/optim/adam_state.h>
#include <mezzo/detail/optim/adam_traits.h>
#include <mezzo/detail/optim/elementwise_optimizer.h>
#include <mezzo/optim/fused_optimizer.h>
#include <mezzo/optim/weight_storage.h>
#include <mezzo/version.h>

#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <tuple>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

/// Those of `torch::optim::AdamOptions`, with its names, defaults and keys in an archive.
struct AdamOptions : public FusedOptions<AdamOptions> {
  using betas_t = std::tuple<double, double>;

  AdamOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT(google-explicit-constructor)

  TORCH_ARG(double, lr) = 1e-3;
  /// How much of the running means of gradients and of their squares a step keeps; in [0, 1).
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  /// Added to the root of the mean square; at least 0.
  TORCH_ARG(double, eps) = 1e-8;
  /// weight_decay * parameter is added to the gradient (an L2 penalty; AdamW decouples it).
  TORCH_ARG(double, weight_decay) = 0;
  /// Divide by the largest mean square so far (Reddi et al., 2018).
  TORCH_ARG(bool, amsgrad) = false;

 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    detail::read_adam_options(archive, *this);
    read_extras(archive);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    detail::write_adam_options(archive, *this);
    write_extras(archive);
  }
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { this->lr(lr); }
};

/// What Adam remembers about a parameter: `step()`, `exp_avg()`, `exp_avg_sq()` and, with amsgrad,
/// `max_exp_avg_sq()`; see AdamWParamState.
struct AdamParamState : public detail::AdamState<AdamParamState> {};

/// Adam (Kingma and Ba, 2015): the answers of `torch::optim::Adam` within rounding, from one pass
/// over gradient, parameter and moments. All that AdamW's page (mezzo/optim/adamw.h) says of
/// dtypes, layouts, groups, files, devices and threads holds here.
class Adam : public detail::ElementwiseOptimizer<
                 detail::AdamTraits<AdamOptions, AdamParamState, /*kIsDecoupled=*/false>> {
 public:
  ///     Adam(const std::vector<torch::optim::OptimizerParamGroup>& groups, const AdamOptions& =
  ///     {}) Adam(std::vector<at::Tensor> parameters, const AdamOptions& = {}) Adam(GradBuckets&
  ///     buckets, const AdamOptions& = {})
  ///
  /// On the parameters of `buckets`: GradScaler's check takes what they have read during backward,
  /// parameters of groups that are added later join them, and gradients of several ranks are
  /// divided by the ranks as they are read (distributed/data_parallel.h).
  /// \throws c10::Error unless lr, eps and weight_decay are at least 0 and the betas in [0, 1), or
  ///   where a parameter is given twice or two share memory
  using ElementwiseOptimizer::ElementwiseOptimizer;
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifdef MEZZO_COMPILED
#include <mezzo/compiled.h>  // IWYU pragma: keep
#endif
