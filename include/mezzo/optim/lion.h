/// \file
/// Lion in one pass, with the rest of a mixed-precision step (unscale, clip, skip, clear) done
/// while its memory is read and written once.
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/optim/detail/archive_keys.h>
#include <mezzo/optim/detail/elementwise_optimizer.h>
#include <mezzo/optim/detail/lion_traits.h>
#include <mezzo/optim/detail/param_state.h>
#include <mezzo/optim/fused_optimizer.h>
#include <mezzo/optim/fused_options.h>

#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <tuple>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace optim {

/// The paper's names and defaults.
struct LionOptions : public FusedOptions<LionOptions> {
  using betas_t = std::tuple<double, double>;

  LionOptions(double lr = 1e-4) : lr_(lr) {}  // NOLINT(google-explicit-constructor)

  /// The length of every parameter's step: a third to a tenth of what AdamW would take.
  TORCH_ARG(double, lr) = 1e-4;
  /// How much of the running mean is in a step's direction, and how much of it a step keeps; in
  /// [0, 1).
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.99);
  /// Parameters shrink by lr * weight_decay a step, whatever the gradient.
  TORCH_ARG(double, weight_decay) = 0;

 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    lr_ = detail::read_key<double>(archive, "lr");
    betas_ = detail::read_key<betas_t>(archive, "betas");
    weight_decay_ = detail::read_key<double>(archive, "weight_decay");
    read_extras(archive);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("lr", c10::IValue(lr_));
    archive.write("betas", c10::IValue(betas_));
    archive.write("weight_decay", c10::IValue(weight_decay_));
    write_extras(archive);
  }
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { this->lr(lr); }
  bool operator==(const LionOptions&) const = default;
};

/// What Lion remembers about a parameter: `exp_avg()`, of its shape and dtype, and `step()`, how
/// many steps were applied, which waits for the device, if that is not the CPU.
struct LionParamState : public detail::ParamState<LionParamState, detail::CountedState<>> {
  TORCH_ARG(at::Tensor, exp_avg);

 public:
  void serialize(torch::serialize::InputArchive& archive) override {
    step(detail::read_key<int64_t>(archive, "step"));
    detail::read_tensor_if_there(archive, "exp_avg", exp_avg_);
    read_kept(archive);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("step", c10::IValue(step()));
    detail::write_tensor_if_defined(archive, "exp_avg", exp_avg_);
    write_kept(archive);
  }
};

/// Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023) with decoupled weight
/// decay: one moment, and 20 bytes a parameter to AdamW's 28. libtorch has none, so files are
/// mezzo's own; on CUDA it needs the target mezzo::cuda, for ATen has no kernel of it. All else
/// that AdamW's page (mezzo/optim/adamw.h) says holds here.
class Lion : public detail::ElementwiseOptimizer<detail::LionTraits<LionOptions, LionParamState>> {
 public:
  ///     Lion(const std::vector<torch::optim::OptimizerParamGroup>& groups, const LionOptions&)
  ///     Lion(std::vector<at::Tensor> parameters, const LionOptions&)
  ///     Lion(GradBuckets& buckets, const LionOptions&)
  ///
  /// The options have defaults. On the parameters of `buckets`: GradScaler's check takes what they
  /// have read during backward, parameters of groups that are added later join them, and gradients
  /// of several ranks are divided by the ranks as they are read (distributed/data_parallel.h).
  /// \throws c10::Error unless lr and weight_decay are at least 0 and the betas in [0, 1), or where
  ///   a parameter is given twice or two share memory
  using ElementwiseOptimizer::ElementwiseOptimizer;
};

}  // namespace optim
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifdef MEZZO_COMPILED
#include <mezzo/optim/compiled.h>  // IWYU pragma: keep
#endif
