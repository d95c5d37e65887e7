/// \file
/// LossScaleOptimizer: an optimizer and its GradScaler in one object, as in Keras.
#pragma once

#include <mezzo/base/grad_scaler_options.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/optimizer_ref.h>
#include <mezzo/optim/step_result.h>
#include <mezzo/scaling/grad_scaler.h>

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <type_traits>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// The loss scale of Keras's LossScaleOptimizer: it starts at 2^15, and is otherwise torch's.
inline constexpr GradScalerOptions kKerasLossScale{.init_scale = 32768.0};

/// Scales the loss of an optimizer, and unscales, checks, steps and updates the scale in one call.
/// Keras's LossScaleOptimizer:
///
///     torch::optim::Adam adam(model->parameters(), 1e-3);
///     mezzo::LossScaleOptimizer optimizer(adam);
///     for (auto& batch : *loader) {
///       optimizer.zero_grad();
///       torch::Tensor loss = ...;                      // under mezzo::AutocastGuard
///       optimizer.scale_loss(loss).backward();
///       auto result = optimizer.step();                // or step({.max_norm = 1.0})
///     }
///
/// `inner` is any optimizer of torch::optim or mezzo::optim, or a MasterWeights for 16-bit weights.
/// It must outlive this object, and keeps its param groups, learning rates and state. Movable. Not
/// thread-safe. Host synchronization is that of GradScaler.
class LossScaleOptimizer {
 public:
  /// \param options  Keras's initial_scale is `init_scale`, its dynamic_growth_steps
  ///   `growth_interval`, and dynamic=False is `GradScalerOptions::fixed(128)`. Options in braces
  ///   start from torch's defaults: an omitted `init_scale` is 2^16
  /// \throws c10::Error if an option is out of range
  explicit LossScaleOptimizer(OptimizerRef inner,
                              const GradScalerOptions& options = kKerasLossScale)
      : inner_(inner), initial_scale_(options.init_scale), scaler_(options) {}
  /// Deleted: a bare number is ambiguous. Write `{.init_scale = 128}` or, for a constant scale,
  /// `GradScalerOptions::fixed(128)`.
  LossScaleOptimizer(OptimizerRef, detail::BareNumber auto) = delete;  // {.init_scale = 128}

  /// Returns the loss, a tensor or a nest of tensors, times the scale. See GradScaler::scale.
  template <class Outputs>
  [[nodiscard]] std::remove_cvref_t<Outputs> scale_loss(const Outputs& outputs) {
    if (std::exchange(step_threw_, false)) scaler_.discard_iteration();
    return scaler_.scale(outputs);
  }

  /// Unscales the gradients in place, for inspection or clipping before `step`. Optional.
  /// TensorFlow's get_unscaled_gradients. See GradScaler::unscale_.
  void unscale_() { scaler_.unscale_(inner_); }

  /// Unscales, checks, steps unless a gradient is inf or NaN, and updates the scale. Keras's apply.
  /// Rethrows the exceptions of the inner optimizer's step; then call `step` again, or `zero_grad`
  /// and scale a new loss.
  /// \throws c10::Error if no loss was scaled, or no parameter has a gradient
  StepResult step(const StepOptions& options = {}) {
    step_threw_ = true;
    StepResult result = scaler_.step(inner_, options);
    step_threw_ = false;
    scaler_.update();
    if (!inner_counts_steps() && result.applied()) ++iterations_;
    return result;
  }

  /// Sets the gradients to zero or, by default, to none.
  void zero_grad(bool set_to_none = true) { inner_.optimizer().zero_grad(set_to_none); }

  /// Returns the number of applied steps, without skipped ones. Synchronizes with the device of a
  /// mezzo optimizer, which counts there.
  int64_t iterations() const {
    return inner_counts_steps() ? inner_.mixed_precision()->applied_steps() : iterations_;
  }

  /// Returns the current scale, Keras's dynamic_scale. Synchronizes with the host.
  double loss_scale() const { return scaler_.get_scale(); }
  /// Returns the `init_scale` of the constructor.
  double initial_scale() const noexcept { return initial_scale_; }
  /// Returns the number of consecutive steps without inf or NaN after which the scale grows.
  int64_t dynamic_growth_steps() const noexcept { return scaler_.get_growth_interval(); }
  /// Returns whether the scale is dynamic.
  bool dynamic() const noexcept { return scaler_.options().mode == LossScaleMode::dynamic; }

  /// Returns the wrapped optimizer.
  torch::optim::Optimizer& inner_optimizer() noexcept { return inner_.optimizer(); }
  /// Returns the scaler, for on_skip, state_dict and the like.
  GradScaler& scaler() noexcept { return scaler_; }

 private:
  bool inner_counts_steps() const { return inner_.mixed_precision() != nullptr; }

  OptimizerRef inner_;
  double initial_scale_;
  GradScaler scaler_;
  int64_t iterations_ = 0;
  bool step_threw_ = false;  // the iteration had no `update`

  friend torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                     const LossScaleOptimizer& optimizer);
  friend torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                    LossScaleOptimizer& optimizer);
  friend void check_archive(torch::serialize::InputArchive& archive,
                            const LossScaleOptimizer& optimizer);
};

/// Writes the states of the inner optimizer and the scaler, and the number of iterations:
/// `torch::save(optimizer, path)` (include <torch/serialize.h>).
inline torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                   const LossScaleOptimizer& optimizer) {
  torch::serialize::OutputArchive inner(archive.compilation_unit());
  optimizer.inner_.save(inner);
  archive.write("inner_optimizer", inner);
  torch::serialize::OutputArchive scaler(archive.compilation_unit());
  scaler << optimizer.scaler_;
  archive.write("scaler", scaler);
  archive.write("iterations", c10::IValue(optimizer.iterations()));
  return archive;
}

/// Throws what `torch::load` would throw, except for the errors of the inner optimizer's `load`.
/// Changes nothing.
inline void check_archive(torch::serialize::InputArchive& archive,
                          const LossScaleOptimizer& optimizer) {
  torch::serialize::InputArchive inner, scaler;
  c10::IValue iterations;
  const bool is_complete = archive.try_read("inner_optimizer", inner) &&
                           archive.try_read("scaler", scaler) &&
                           archive.try_read("iterations", iterations) && iterations.isInt();
  TORCH_CHECK(is_complete,
              "LossScaleOptimizer: the archive is not a LossScaleOptimizer's; load a file that "
              "torch::save(optimizer, path) wrote");
  check_archive(scaler, optimizer.scaler_);
}

/// Loads an archive that `operator<<` wrote: `torch::load(optimizer, path)`.
/// \throws c10::Error for the archive of another class, and as the inner optimizer's `load` does
inline torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                  LossScaleOptimizer& optimizer) {
  check_archive(archive, optimizer);  // before anything changes
  torch::serialize::InputArchive inner, scaler;
  c10::IValue iterations;
  archive.read("inner_optimizer", inner);
  archive.read("scaler", scaler);
  archive.read("iterations", iterations);
  optimizer.inner_.load(inner);
  scaler >> optimizer.scaler_;
  optimizer.iterations_ = iterations.toInt();
  optim::MixedPrecisionOptimizer* const mixed_precision = optimizer.inner_.mixed_precision();
  // An archive of torch::optim::SGD has no step count; the inner optimizer has warned.
  const bool lacks_steps = mixed_precision != nullptr && mixed_precision->applied_steps() == 0;
  if (lacks_steps) mixed_precision->set_applied_steps(iterations.toInt());
  return archive;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
