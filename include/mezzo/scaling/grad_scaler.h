/// \file
/// GradScaler: dynamic loss scaling for any `torch::optim::Optimizer`, torch.amp.GradScaler in C++.
#pragma once

#include <mezzo/base/detail/for_each_tensor.h>
#include <mezzo/base/grad_scaler_options.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/update_scale.h>
#include <mezzo/optim/optimizer_ref.h>
#include <mezzo/optim/step_result.h>
#include <mezzo/scaling/detail/device_step_future.h>
#include <mezzo/scaling/detail/per_optimizer_state.h>
#include <mezzo/scaling/detail/skip_reporter.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// A device, a device type, or a text such as "cuda".
template <class T>
concept DeviceLike = std::constructible_from<at::Device, const T&>;

}  // namespace detail

/// Scales the loss so that small float16 gradients do not underflow, unscales the gradients, and
/// skips the optimizer's step if one of them is inf or NaN. The methods, their order and their
/// error messages are those of `torch.amp.GradScaler`:
///
/// \code
///   mezzo::GradScaler scaler;                          // or scaler("cuda", {.init_scale = 1024})
///   for (auto& batch : *loader) {
///     optimizer.zero_grad();
///     torch::Tensor loss = ...;                        // under mezzo::AutocastGuard
///     scaler.scale(loss).backward();
///     scaler.unscale_(optimizer);                      // optional: to inspect or clip gradients
///     torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
///     scaler.step(optimizer);
///     scaler.update();
///   }
/// \endcode
///
/// `scaler.step(optimizer, {.max_norm = 1.0})` unscales, checks, clips and steps in fewer passes
/// than these three calls. With several optimizers, call `step` for each, then `update` once: an
/// optimizer with an inf or NaN gradient skips its own step, and the scale backs off once.
///
/// The scale is created on the device of the first scaled tensor. `get_scale`, `state_dict` and,
/// for optimizers of torch::optim, `step` synchronize with the host; other methods do not, unless
/// their comment says so. A step can be captured into a CUDA graph: docs/cuda.md. `scale` is
/// thread-safe, the other methods are not. Optimizers must keep their address until `update`.
/// Movable, not copyable.
class GradScaler {
 public:
  /// The keys and values of torch.amp.GradScaler's state_dict, and of mezzo's options.
  using StateDict = std::map<std::string, double>;
  /// The type of `on_skip`'s callback.
  using SkipCallback = detail::SkipReporter::Callback;

  /// \throws c10::Error if an option is out of range, even if `enabled` is false
  explicit GradScaler(const GradScalerOptions& options = {});
  /// torch.amp's form: `GradScaler("cuda")`, `GradScaler(torch::kCUDA, {.init_scale = 1024})`.
  /// Warns and disables the scaler if `device` is CUDA and CUDA is not available. Any other device
  /// has no effect: the scale is created on the device of the first scaled tensor.
  /// \throws c10::Error if `device` is not a device, listing the device types
  explicit GradScaler(at::Device device, const GradScalerOptions& options = {});
  /// Converts `device`, such as "cuda" or torch::kCUDA, to at::Device.
  explicit GradScaler(const detail::DeviceLike auto& device, const GradScalerOptions& options = {})
      : GradScaler(at::Device(device), options) {}
  /// Deleted: a bare number does not name its option. Write `GradScaler({.init_scale = 1024})` or,
  /// for a constant scale, `GradScaler(GradScalerOptions::fixed(128))`.
  explicit GradScaler(detail::BareNumber auto) = delete;  // GradScaler({.init_scale = 1024})
  /// Deleted: a bare number does not name its option.
  GradScaler(const auto&, detail::BareNumber auto, auto...) = delete;  // {.init_scale = 1024}

  /// Returns `outputs` times the scale, each tensor in its own dtype. Differentiable, out of place,
  /// thread-safe. No host sync for outputs on the scale's device. For outputs on another device
  /// the scale is copied there, which synchronizes with the host if that device is the CPU.
  /// \param outputs  a tensor, or a std::vector, array, pair, tuple, map, unordered_map or optional
  ///   of tensors, nested to any depth, on any devices
  template <class Outputs>
  [[nodiscard]] std::remove_cvref_t<Outputs> scale(const Outputs& outputs);

  /// Divides the gradients of `optimizer`'s parameters by the scale, in place, and records whether
  /// a quotient is inf or NaN. Skips undefined gradients. Coalesces sparse ones first (`.grad` is
  /// replaced), which synchronizes with the host; otherwise no host sync.
  ///
  /// A weight with a float32 master (WeightStorage::fp32_master, MasterWeights) gets a new float32
  /// `.grad`, in which nothing underflows, even if the scaler is disabled. Clipping, `step` and
  /// zero_grad use that tensor.
  /// \return found_inf: a float32 tensor of one element on the scale's device, not 0 if a quotient
  ///   is inf or NaN; undefined if no parameter has a gradient, or if the scaler is disabled
  /// \throws c10::Error if called twice or after `step` in an iteration, before any `scale`, for
  ///   fp16 gradients of parameters without a master (see `allow_fp16_gradients`), or for gradients
  ///   that have overlapping elements or were unscaled for another optimizer
  at::Tensor unscale_(OptimizerRef optimizer);

  /// Unscales, unless `unscale_` was called, and applies the optimizer's step if no gradient is inf
  /// or NaN. Clips with `{.max_norm = 1.0}`; StepOptions documents `.grad` afterwards.
  ///
  /// A mezzo optimizer reads the gradients once for found_inf and their norm, and once in the step,
  /// which multiplies them by inverse scale and clip coefficient. The device decides the step: no
  /// host sync, and result and skip report complete later. Gradients of any other optimizer are
  /// unscaled and clipped in place, as by `unscale_` and clip_grad_norm_, and the host synchronizes
  /// once to decide. After `unscale_` the gradients are checked again, since clipping may produce
  /// inf or NaN. A disabled scaler clips, zeroes and steps without a check.
  ///
  /// Warns once if no loss was scaled since the last `update`, as in a loop that calls `update`
  /// between the steps of two optimizers: a dynamic scale may have changed.
  /// \throws c10::Error if called twice in an iteration, before any `scale`, if no parameter has a
  ///   gradient, for fp16 gradients as `unscale_` does, for gradients that a scaled backward pass
  ///   created after `unscale_`, or that were unscaled for another optimizer, or unless max_norm is
  ///   positive
  StepResult step(OptimizerRef optimizer, const StepOptions& options = {});

  /// Calls `optimizer.step(closure)` if this scaler is disabled.
  /// \throws c10::Error if it is enabled, unless `closure` is null
  template <std::convertible_to<torch::optim::Optimizer::LossClosure> Closure>
  StepResult step(OptimizerRef optimizer, const Closure& closure) {
    return step_with_closure(optimizer, closure);
  }
  /// Deleted: write `step(optimizer, {.max_norm = 1.0})`.
  StepResult step(OptimizerRef, detail::BareNumber auto) = delete;  // {.max_norm = 1.0}

  /// Ends the iteration: updates the scale from the recorded checks. No host sync.
  /// \throws c10::Error if no optimizer was checked since the last `update`
  void update();

  /// Ends the iteration and sets the scale; growth tracker and hysteresis tracker do not change.
  /// \throws c10::Error unless `new_scale` is positive and within [min_scale, max_scale]
  void update(double new_scale);
  /// \param new_scale  one element that requires no grad, of any dtype and device; its value is
  ///   copied and clamped to [min_scale, max_scale], without other checks
  void update(const at::Tensor& new_scale);

  /// Returns the current scale; 1 if disabled. Synchronizes with the host.
  double get_scale() const;
  /// Returns the factor by which the scale grows.
  double get_growth_factor() const noexcept { return options_.growth_factor; }
  /// Returns the factor by which the scale backs off.
  double get_backoff_factor() const noexcept { return options_.backoff_factor; }
  /// Returns the number of consecutive iterations without inf/NaN after which the scale grows.
  int64_t get_growth_interval() const noexcept { return options_.growth_interval; }

  /// Sets the growth factor, from the next `update` on.
  /// \throws c10::Error for a value out of range, or if the scale is not dynamic
  void set_growth_factor(double growth_factor);
  /// Sets the backoff factor, from the next `update` on.
  /// \throws c10::Error as `set_growth_factor` does
  void set_backoff_factor(double backoff_factor);
  /// Sets the growth interval in iterations, from the next `update` on.
  /// \throws c10::Error as `set_growth_factor` does
  void set_growth_interval(int64_t growth_interval);

  /// Returns whether the scaler is enabled. A disabled scaler scales, unscales and skips nothing.
  bool is_enabled() const noexcept { return options_.enabled; }

  /// Discards the iteration, for example one whose step threw: the calls since the last `update`
  /// have no effect on the scale. Clear the gradients before the next backward pass.
  void discard_iteration() noexcept {
    per_optimizer_states_.clear();
    found_inf_ = at::Tensor();
    reporter_.discard_iteration();
  }

  /// Returns whether an optimizer was unscaled or stepped since the last `update`.
  bool has_pending_update() const noexcept { return !per_optimizer_states_.empty(); }

  /// Returns the validated options.
  const GradScalerOptions& options() const noexcept { return options_; }

  /// Sets the function that is called for every iteration with a skipped step, or with an inf or
  /// NaN that `unscale_` found and no step followed. It is called in `update`, on a device in a
  /// later one, and not for replays of a CUDA graph. It replaces the message on std::cerr, which is
  /// printed for the first eleven consecutive skips, once at min_scale, and then for every 1000th
  /// skip. A null callback prints nothing.
  void on_skip(SkipCallback callback) { reporter_.set_callback(std::move(callback)); }

  /// Returns the state under torch's keys (scale, growth_factor, backoff_factor, growth_interval,
  /// _growth_tracker), which torch.amp's `load_state_dict` accepts, and mezzo's (min_scale,
  /// max_scale, hysteresis, _hysteresis_tracker, _loss_scale_mode). Empty if disabled. Synchronizes
  /// with the host. Call it after `update`. docs/loss-scaling.md shows the exchange with Python.
  StateDict state_dict() const;

  /// Restores a state of `state_dict` or of torch.amp's, which leaves mezzo's options unchanged.
  /// Strong exception guarantee. Does nothing if disabled.
  /// \throws c10::Error if one of torch's keys is missing or a value is out of range
  void load_state_dict(const StateDict& state);

 private:
  using PerOptimizerState = detail::PerOptimizerState;
  using OptState = detail::OptState;

  PerOptimizerState& get_optimizer_state(const torch::optim::Optimizer& optimizer);
  PerOptimizerState& get_optimizer_state_for_step(const torch::optim::Optimizer& optimizer);
  void check_can_unscale(const torch::optim::Optimizer& optimizer, const StepPlan& plan) const;
  void merge_found_inf(PerOptimizerState& state, GradStats& stats) const;
  void mark_cleared_grads();
  GradStats unscale_grads(OptimizerRef optimizer, PerOptimizerState& state);
  StepResult step_on_device(OptimizerRef optimizer, const StepOptions& options);
  StepResult step_with_host_sync(OptimizerRef optimizer, const StepOptions& options);
  StepResult step_disabled(OptimizerRef optimizer, const StepOptions& options);
  StepResult step_with_closure(OptimizerRef optimizer,
                               const torch::optim::Optimizer::LossClosure& closure);
  void add_found_inf(const PerOptimizerState& state);
  bool can_set_scale() const;
  void set_scale(const at::Tensor& new_scale);
  void finish_iteration();
  void check_scale_initialized(const char* call) const;
  at::Tensor get_scale_for(const at::Tensor& output);
  void lazy_init_scale(at::Device device);
  LossScaleState read_loss_scale_state() const;
  template <class Number>
  void set_option(const char* name, Number GradScalerOptions::*option, Number value);

  GradScalerOptions options_;
  LossScaleState initial_state_;
  detail::ScaleTensors scale_;  // updated in place, since captured graphs hold the addresses
  std::unique_ptr<std::mutex> mutex_ = std::make_unique<std::mutex>();  // of `scale`
  std::unordered_map<const torch::optim::Optimizer*, PerOptimizerState> per_optimizer_states_;
  at::Tensor found_inf_;  // of the iteration: sum over its optimizers, added by add_found_inf
  detail::SkipReporter reporter_;
  detail::DeviceStepFuturePool future_pool_;
};

namespace detail {

/// Keys of the state dict whose values torch stores as integers.
inline constexpr std::array<std::string_view, 5> kIntegerStateKeys{
    "growth_interval", "_growth_tracker", "hysteresis", "_hysteresis_tracker", "_loss_scale_mode"};

/// Returns whether a `T` holds only tensors, apart from the keys of maps.
template <class T>
consteval bool is_scalable() {
  if constexpr (TupleLike<T>) {
    return []<std::size_t... I>(std::index_sequence<I...>) {
      return (is_scalable<std::tuple_element_t<I, T>>() && ...);
    }
    (std::make_index_sequence<std::tuple_size_v<T>>());
  } else if constexpr (requires { typename T::mapped_type; }) {
    return is_scalable<typename T::mapped_type>();
  } else if constexpr (kIsOptional<T> ||
                       (Collection<T> && requires { typename T::allocator_type; })) {
    return is_scalable<typename T::value_type>();
  } else {
    return std::same_as<T, at::Tensor>;
  }
}

}  // namespace detail

template <class Outputs>
std::remove_cvref_t<Outputs> GradScaler::scale(const Outputs& outputs) {
  static_assert(detail::is_scalable<Outputs>(),
                "outputs must be a Tensor or an iterable of Tensors. In C++: pass the loss itself "
                "to GradScaler::scale, as in scaler.scale(out.loss)");
  if (!options_.enabled) return outputs;
  mark_cleared_grads();
  return detail::map_tensors(outputs, [this](const at::Tensor& output) -> at::Tensor {
    const at::Tensor scale = get_scale_for(output);
    return options_.mode == LossScaleMode::none ? output : output.mul(scale);
  });
}

/// Writes `state_dict()` to an archive: `torch::save(scaler, path)` (include <torch/serialize.h>).
/// A disabled scaler writes nothing.
/// \throws c10::Error between `unscale_` or `step` and `update`
inline torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                   const GradScaler& scaler) {
  TORCH_CHECK(
      !scaler.has_pending_update(),
      "A GradScaler instance may only be pickled at the beginning of an iteration, or at the "
      "end after scaler.update(). In C++: call torch::save(scaler, path) after scaler.update()");
  for (const auto& [key, value] : scaler.state_dict()) {
    // torch.amp's `update` throws for a growth_interval of 2000.0.
    const auto is_integer = std::ranges::count(detail::kIntegerStateKeys, key) != 0;
    archive.write(key, at::scalar_tensor(value, is_integer ? at::kLong : at::kDouble),
                  /*is_buffer=*/true);
  }
  return archive;
}

/// Loads a state from an archive: `torch::load(scaler, path)`. Does nothing if disabled. Discards
/// the current iteration, as unpickling does: clear the gradients before the next backward pass.
/// \throws c10::Error as GradScaler::load_state_dict does
inline torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                  GradScaler& scaler) {
  GradScaler::StateDict state;
  for (const auto& [key, default_value] : GradScaler().state_dict()) {
    at::Tensor value;
    if (archive.try_read(key, value, /*is_buffer=*/true)) state[key] = value.item<double>();
  }
  scaler.load_state_dict(state);
  scaler.discard_iteration();
  return archive;
}

/// Throws what `torch::load` would throw, without loading.
inline void check_archive(torch::serialize::InputArchive& archive, const GradScaler& scaler) {
  GradScaler trial(scaler.is_enabled() ? scaler.options() : GradScalerOptions{.enabled = false});
  archive >> trial;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifndef MEZZO_COMPILED_LIB
#include <mezzo/scaling/detail/grad_scaler_inl.h>  // IWYU pragma: export
#endif
