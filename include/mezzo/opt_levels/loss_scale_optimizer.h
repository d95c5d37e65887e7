/// \file
/// LossScaleOptimizer, as in Keras: an optimizer that scales its loss, and unscales, checks, steps
/// and moves the scale in one call. TensorFlow's `enable_mixed_precision_graph_rewrite` also
/// returned one.
#pragma once

#include <mezzo/base/grad_scaler_options.h>
#include <mezzo/base/version.h>
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

/// An optimizer together with its loss scale, Keras's LossScaleOptimizer:
///
///     torch::optim::Adam adam(model->parameters(), 1e-3);
///     auto optimizer = mezzo::enable_mixed_precision(adam);
///     for (auto& batch : *loader) {
///       optimizer.zero_grad();
///       torch::Tensor loss = ...;                      // under mezzo::AutocastGuard
///       optimizer.scale(loss).backward();
///       auto result = optimizer.step();                // or step({.max_norm = 1.0})
///     }
///
/// `inner` is any optimizer of torch::optim or mezzo::optim, or a MasterWeights for a model of half
/// weights. It must outlive this object, and keeps its own param groups, rates and state. Movable.
/// One thread at a time. GradScaler documents which calls wait for a device.
class LossScaleOptimizer {
 public:
  /// \param options  Keras's initial_scale is `init_scale`, its dynamic_growth_steps
  ///   `growth_interval`, and dynamic=False is `GradScalerOptions::fixed(128)`. Members omitted in braces
  ///   have torch's defaults: `init_scale` is then 2^16, not kKerasLossScale's 2^15
  /// \throws c10::Error if an option is out of range
  explicit LossScaleOptimizer(OptimizerRef inner,
                              const GradScalerOptions& options = kKerasLossScale)
      : inner_(inner), initial_scale_(options.init_scale), scaler_(options) {}
  /// Refuses a bare number, which is ambiguous: write `{.init_scale = 128}` or, for a constant
  /// scale, `GradScalerOptions::fixed(128)`.
  LossScaleOptimizer(OptimizerRef, detail::BareNumber auto) = delete;

  /// Returns the loss, a tensor or a nest of tensors, times the scale: Keras's scale_loss. See
  /// GradScaler::scale.
  template <class Outputs>
  [[nodiscard]] std::remove_cvref_t<Outputs> scale(const Outputs& outputs) {
    if (std::exchange(threw_, false)) scaler_.discard_iteration();
    return scaler_.scale(outputs);
  }

  /// Unscales the gradients, so that they can be inspected or clipped before `step`: TensorFlow's
  /// get_unscaled_gradients. Optional. See GradScaler::unscale_.
  void unscale_() { scaler_.unscale_(inner_); }

  /// Unscales, checks, steps unless a gradient is inf or NaN, and moves the scale: Keras's apply.
  /// Rethrows what the inner optimizer's step throws; then call `step` again, or call `zero_grad`
  /// and scale a new loss.
  /// \throws c10::Error if no loss was scaled, or no parameter has a gradient
  StepResult step(const StepOptions& options = {}) {
    threw_ = true;
    StepResult result = scaler_.step(inner_, options);
    threw_ = false;
    scaler_.update();
    if (!is_counted_by_inner() && result.applied()) ++iterations_;
    return result;
  }

  /// Sets the gradients to zero, or drops them.
  void zero_grad(bool set_to_none = true) { inner_.optimizer().zero_grad(set_to_none); }

  /// Returns the number of applied steps, without skipped ones. With an optimizer of mezzo's the
  /// device counts, and this call waits for it.
  int64_t iterations() const {
    return is_counted_by_inner() ? inner_.mixed_precision()->applied_steps() : iterations_;
  }

  /// Returns the present scale, Keras's dynamic_scale. Waits for the device.
  double loss_scale() const { return scaler_.get_scale(); }
  /// Returns the scale that this object was made with.
  double initial_scale() const noexcept { return initial_scale_; }
  /// Returns how many steps without a skip come before the scale doubles.
  int64_t dynamic_growth_steps() const noexcept { return scaler_.get_growth_interval(); }
  /// Returns whether the scale changes by itself.
  bool dynamic() const noexcept { return scaler_.options().mode == LossScaleMode::dynamic; }

  /// Returns the optimizer that takes the steps.
  torch::optim::Optimizer& inner_optimizer() noexcept { return inner_.optimizer(); }
  /// Returns the scaler, for on_skip, state_dict and the like.
  GradScaler& scaler() noexcept { return scaler_; }

 private:
  bool is_counted_by_inner() const { return inner_.mixed_precision() != nullptr; }

  OptimizerRef inner_;
  double initial_scale_;
  GradScaler scaler_;
  int64_t iterations_ = 0;
  bool threw_ = false;  // the last step threw, so that its iteration had no `update`

  friend torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                     const LossScaleOptimizer& optimizer);
  friend torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                    LossScaleOptimizer& optimizer);
  friend void check_archive(torch::serialize::InputArchive& archive,
                            const LossScaleOptimizer& optimizer);
};

/// Returns `LossScaleOptimizer(optimizer, options)`. TensorFlow's function also rewrote the graph;
/// here use mezzo::AutocastGuard around the forward pass.
inline LossScaleOptimizer enable_mixed_precision(
    OptimizerRef optimizer, const GradScalerOptions& options = kKerasLossScale) {
  return LossScaleOptimizer(optimizer, options);
}
/// Refuses a bare number: TensorFlow's `loss_scale=128.0` is `GradScalerOptions::fixed(128)`.
void enable_mixed_precision(OptimizerRef, detail::BareNumber auto) = delete;

/// Writes the inner optimizer's state, the scaler's and the count of iterations:
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

/// Throws what loading the archive would throw, but for what the inner optimizer's `load` does, and
/// changes nothing.
inline void check_archive(torch::serialize::InputArchive& archive,
                          const LossScaleOptimizer& optimizer) {
  torch::serialize::InputArchive inner, scaler;
  c10::IValue iterations;
  const bool is_whole = archive.try_read("inner_optimizer", inner) &&
                        archive.try_read("scaler", scaler) &&
                        archive.try_read("iterations", iterations) && iterations.isInt();
  TORCH_CHECK(is_whole,
              "LossScaleOptimizer: the archive holds something else; load what "
              "torch::save(optimizer, path) wrote");
  check_archive(scaler, optimizer.scaler_);
}

/// Loads what `operator<<` wrote: `torch::load(optimizer, path)`.
/// \throws c10::Error for the file of another kind of object; as the inner optimizer's `load` does
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
  optim::MixedPrecisionOptimizer* const counting = optimizer.inner_.mixed_precision();
  // A file of torch::optim::SGD holds no count; the optimizer has warned of it.
  const bool lacks_count = counting != nullptr && counting->applied_steps() == 0;
  if (lacks_count) counting->set_applied_steps(iterations.toInt());
  return archive;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
