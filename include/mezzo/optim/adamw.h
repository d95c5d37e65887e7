/// \file
/// AdamW in one pass: what `torch::optim::AdamW` is, with the rest of a mixed-precision step
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

/// Those of `torch::optim::AdamWOptions`, with its names, defaults and keys in an archive.
struct AdamWOptions : public FusedOptions<AdamWOptions> {
  using betas_t = std::tuple<double, double>;

  AdamWOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT(google-explicit-constructor)

  TORCH_ARG(double, lr) = 1e-3;
  /// How much of the running means of gradients and of their squares a step keeps; in [0, 1).
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  /// Added to the root of the mean square; at least 0. In half 1e-8 is no obstacle: arithmetic is
  /// in float.
  TORCH_ARG(double, eps) = 1e-8;
  /// Parameters shrink by lr * weight_decay a step, whatever the gradient.
  TORCH_ARG(double, weight_decay) = 1e-2;
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

/// What AdamW remembers about a parameter: `step()`, and tensors of the parameter's shape and dtype
/// `exp_avg()`, `exp_avg_sq()` and, with amsgrad, `max_exp_avg_sq()`. As in libtorch, but that
/// `step()` counts on the parameter's device and waits for it, if that is not the CPU.
struct AdamWParamState : public detail::AdamState<AdamWParamState> {};

/// Adam with decoupled weight decay (Loshchilov and Hutter, 2019): the answers of
/// `torch::optim::AdamW` within rounding, from one pass over gradient, parameter and moments.
///
/// \code
///   mezzo::optim::AdamW optimizer(model->parameters(), mezzo::optim::AdamWOptions(2e-5));
///   scaler.scale(loss).backward();
///   scaler.step(optimizer, {.max_norm = 1.0, .zero_grad = true});  // or optimizer.step()
///   scaler.update();
/// \endcode
///
/// Parameters are float, double, bfloat16 or half, of any strides; gradients of the same dtype, or
/// for float of bfloat16 or half, for double of float. Arithmetic is in float (double for double),
/// each result rounded once to the parameter's dtype, and the same bits whatever the number of
/// threads and the CPU. Moments have the parameter's dtype; how parameters of bfloat16 and half are
/// kept otherwise, and averages of weights, is for the options to say
/// (mezzo/optim/weight_storage.h).
///
/// Parameters without a gradient are passed over, and do not count the step; gradients are dense,
/// and stay as they are unless `zero_grad` is asked for. Param groups, their options and their
/// parameters may be added and changed between steps. A step looks at all before it writes any:
/// where it throws for a gradient or an option, nothing has moved.
///
/// Files: `torch::save` and `torch::load` read and write what torch::optim::AdamW does: either
/// optimizer goes on where the other stopped. Loading is all or nothing, and leaves no state that
/// the file lacks.
///
/// On CUDA with the target `mezzo::cuda`, `optimizer.step()` is two launches for one dtype, and a
/// whole `scaler.step(...)` with `scaler.update()` five, whatever the number of tensors: a read of
/// the gradients and its end, the update, the counts, and the next scale. Each further dtype takes
/// two more. Nothing waits for the device, so that all can be captured in a CUDA graph, once a step
/// has made the state. Without that target, and on other devices, ATen's fused kernels do it, in
/// more launches, and leave gradients unscaled and clipped.
///
/// Threads: one at a time; the work is shared among libtorch's own (`at::set_num_threads`).
class AdamW : public detail::ElementwiseOptimizer<
                  detail::AdamTraits<AdamWOptions, AdamWParamState, /*kIsDecoupled=*/true>> {
 public:
  ///     AdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups, const AdamWOptions& =
  ///     {}) AdamW(std::vector<at::Tensor> parameters, const AdamWOptions& = {}) AdamW(GradBuckets&
  ///     buckets, const AdamWOptions& = {})
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
