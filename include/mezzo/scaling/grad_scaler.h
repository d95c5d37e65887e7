/// \file
/// GradScaler, dynamic loss scaling for any `torch::optim::Optimizer`: torch.amp's in C++.
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

/// Multiplies the loss so that small gradients survive in fp16, divides the gradients again, and
/// skips the optimizer's step when one of them is inf or NaN. The calls, their order and the words
/// of their errors are those of `torch.amp.GradScaler`:
///
/// \code
///   mezzo::GradScaler scaler;
///   for (auto& batch : *loader) {
///     optimizer.zero_grad();
///     auto loss = ...;                               // under mezzo::AutocastGuard
///     scaler.scale(loss).backward();
///     auto result = scaler.step(optimizer, {.max_norm = 1.0});
///     scaler.update();
///     schedule.step(result);
///   }
/// \endcode
///
/// Several optimizers share the scale: each that finds an inf skips its own step, and `update`,
/// called once when all have stepped, backs the scale off once.
///
/// The scale lives on the device of the first tensor that `scale` sees. On CUDA the host waits for
/// the device in `get_scale` and `state_dict` and, with an optimizer that is not mezzo's, in
/// `step`; nothing else waits. docs/cuda.md shows how to capture a step into a CUDA graph. Threads
/// may call `scale` at once; all else is for one thread at a time. Between two calls of `update` no
/// optimizer may move in memory. A scaler can be moved, and not copied.
class GradScaler {
 public:
  /// The keys and values of torch.amp.GradScaler's state_dict, and keys for what mezzo adds.
  using StateDict = std::map<std::string, double>;
  /// The function that `on_skip` takes; it is called after each skipped step.
  using SkipCallback = detail::SkipReporter::Callback;

  /// \throws c10::Error if an option is out of range, naming it and its range; also when disabled
  explicit GradScaler(const GradScalerOptions& options = {});
  /// Refuses a number alone, which does not say what it is: write
  /// `GradScaler({.init_scale = 1024})` or, for a constant scale,
  /// `GradScaler(GradScalerOptions::fixed(128))`.
  explicit GradScaler(detail::BareNumber auto) = delete;  // GradScaler({.init_scale = 1024})

  /// Returns `outputs` times the scale. Differentiable; never mutates its argument. No host sync
  /// for outputs on the scale's device; for outputs on another device the scale is copied there,
  /// which synchronizes with the host if that device is the CPU. Threads may call it at once, the
  /// first time too.
  /// \param outputs  a tensor, or a std::vector, array, pair, tuple, map, unordered_map or optional
  ///   of tensors, nested as you like; on any devices
  /// \return an object of the same type, each tensor in its own dtype
  template <class Outputs>
  [[nodiscard]] std::remove_cvref_t<Outputs> scale(const Outputs& outputs);

  /// Divides the gradients of all of `optimizer`'s parameters by the scale, in place, and notes
  /// whether any quotient is inf or NaN. Undefined gradients are left out, sparse ones coalesced
  /// first (`.grad` is replaced). No host sync, except to coalesce.
  ///
  /// A weight with a float master (WeightStorage::fp32_master, MasterWeights) gets a new `.grad` of
  /// float, in which nothing underflows; the step takes that tensor, and libtorch's clipping and
  /// zero_grad find it there. A disabled scaler makes it float too, and divides nothing.
  /// \return found_inf: a float32 tensor of one element on the scale's device, not 0 if a quotient
  ///   is inf or NaN; undefined if no parameter has a gradient, and from a disabled scaler
  /// \throws c10::Error when called twice or after `step` in an iteration, before any `scale`, for
  ///   fp16 gradients of parameters without a master (see `allow_fp16_gradients`), or for gradients
  ///   that were unscaled for another optimizer
  at::Tensor unscale_(OptimizerRef optimizer);

  /// Unscales, checks, has_max_norm and steps in few passes: `scaler.step(optimizer, {.max_norm
  /// = 1.0})`.
  ///
  /// An optimizer of mezzo's reads the gradients once, for an inf and for their norm, and once more
  /// in the step, which multiplies them by inverse scale and clip coefficient on their way. The
  /// device decides the step: nothing waits, and result and report of a skip come later. Any other
  /// optimizer's gradients are unscaled and clipped in place, as by `unscale_` and torch's
  /// clip_grad_norm_, and the host waits once to know whether to step. StepOptions says what
  /// `.grad` holds afterwards. After `unscale_` the gradients are only checked once more, since
  /// clipping or your code may have made an inf or NaN. A disabled scaler has_max_norm, sets to
  /// zero and steps whatever the gradients are.
  ///
  /// Warns once (TORCH_WARN) if no loss was scaled since the last `update`, as in a loop that calls
  /// `update` between the steps of two optimizers: a dynamic scale may have changed.
  /// \throws c10::Error when called twice in an iteration, before any `scale`, when no parameter has
  ///   a gradient, for fp16 gradients as `unscale_` does, for gradients that a scaled backward
  ///   pass has replaced after `unscale_`, or that were unscaled for another optimizer, or unless
  ///   max_norm is positive
  StepResult step(OptimizerRef optimizer, const StepOptions& options = {});

  /// Calls `optimizer.step(closure)` if this scaler is disabled.
  /// \throws c10::Error if it is enabled, unless `closure` is null
  template <std::convertible_to<torch::optim::Optimizer::LossClosure> Closure>
  StepResult step(OptimizerRef optimizer, const Closure& closure) {
    return step_with_closure(optimizer, closure);
  }
  /// Refuses a number alone: write `step(optimizer, {.max_norm = 1.0})`.
  StepResult step(OptimizerRef, detail::BareNumber auto) = delete;  // {.max_norm = 1.0}

  /// Ends the iteration: moves the scale by what the checks found, and forgets the optimizers. No
  /// host sync.
  /// \throws c10::Error if no optimizer was checked since the last `update`
  void update();

  /// Ends the iteration with a scale of your choice; growth tracker and hysteresis stay.
  /// \throws c10::Error unless `new_scale` is positive and within [min_scale, max_scale]
  void update(double new_scale);

  /// Ends the iteration with the scale in a tensor. No host sync.
  /// \param new_scale  one element that requires no grad, of any dtype and device; its value is
  ///   copied and clamped to [min_scale, max_scale], and not otherwise checked
  void update(const at::Tensor& new_scale);

  /// Returns the present scale; 1 when disabled. Waits for the device.
  double get_scale() const;
  /// Returns the factor by which the scale grows.
  double get_growth_factor() const noexcept { return options_.growth_factor; }
  /// Returns the factor by which the scale backs off.
  double get_backoff_factor() const noexcept { return options_.backoff_factor; }
  /// Returns the number of clean iterations in a row after which the scale grows.
  int64_t get_growth_interval() const noexcept { return options_.growth_interval; }

  /// Sets the growth factor, from the next `update` on.
  /// \throws c10::Error for a value out of range, and unless the scale is dynamic
  void set_growth_factor(double growth_factor);
  /// Sets the backoff factor, from the next `update` on.
  /// \throws c10::Error as `set_growth_factor` does
  void set_backoff_factor(double backoff_factor);
  /// Sets the growth interval in iterations, from the next `update` on.
  /// \throws c10::Error as `set_growth_factor` does
  void set_growth_interval(int64_t growth_interval);

  /// Returns GradScalerOptions::enabled. A disabled scaler scales, unscales and skips nothing.
  bool is_enabled() const noexcept { return options_.enabled; }

  /// Gives an iteration up, such as one whose step threw: forgets what was called since the last
  /// `update`, and leaves the scale as it is. Clear the gradients before the next backward pass.
  void discard_iteration() noexcept {
    per_optimizer_states_.clear();
    found_inf_ = at::Tensor();
    reporter_.discard_iteration();
  }

  /// Returns whether an optimizer was unscaled or stepped since the last `update`.
  bool has_pending_update() const noexcept { return !per_optimizer_states_.empty(); }

  /// Returns the options that the scale follows.
  const GradScalerOptions& options() const noexcept { return options_; }

  /// Calls `callback` for every iteration with a skipped step, or with an inf that `unscale_` found
  /// and no step came after, at its `update` or, on a device, at a later one; not for replays of a
  /// CUDA graph. It takes the place of the line on std::cerr, which is written for the first eleven
  /// skips in a row, once for a scale at its floor, and in both cases for every 1000th skip after
  /// that. A null callback is silent.
  void on_skip(SkipCallback callback) { reporter_.set_callback(std::move(callback)); }

  /// Returns the whole state under torch's keys (scale, growth_factor, backoff_factor,
  /// growth_interval, _growth_tracker), which torch.amp's `load_state_dict` accepts, and mezzo's
  /// own (min_scale, max_scale, hysteresis, _hysteresis_tracker, _loss_scale_mode). Empty when
  /// disabled. Waits for the device. Call it after `update`. docs/loss-scaling.md shows how a state
  /// goes to Python and back as JSON.
  StateDict state_dict() const;

  /// Restores what `state_dict` returned, torch.amp's included: this scaler's values stay where
  /// keys of mezzo's own are missing. All or nothing; does nothing when disabled.
  /// \throws c10::Error if a key of torch's is missing or a value is out of range
  void load_state_dict(const StateDict& state);

 private:
  using State = detail::PerOptimizerState;
  using OptState = detail::OptState;

  State& get_state(const torch::optim::Optimizer& optimizer);
  State& get_state_to_step(const torch::optim::Optimizer& optimizer);
  void check_scaled(const torch::optim::Optimizer& optimizer, const StepPlan& plan) const;
  void merge_found_inf(State& state, GradStats& stats) const;
  void mark_cleared_grads();
  void unscale_grads(OptimizerRef optimizer, State& state);
  StepResult step_fused(optim::MixedPrecisionOptimizer& fused, const StepOptions& options);
  StepResult step_with_host_sync(OptimizerRef optimizer, const StepOptions& options);
  StepResult step_disabled(OptimizerRef optimizer, const StepOptions& options);
  StepResult step_with_closure(OptimizerRef optimizer,
                               const torch::optim::Optimizer::LossClosure& closure);
  void add_found_inf(const State& state);
  bool can_set_scale() const;
  void set_scale(const at::Tensor& new_scale);
  void finish_iteration();
  void check_scale_initialized(const char* call) const;
  at::Tensor get_scale_on(at::Device device);
  void lazy_init_scale(at::Device device);
  LossScaleState read_state() const;
  template <class Number>
  void set_option(const char* name, Number GradScalerOptions::*option, Number value);

  GradScalerOptions options_;
  LossScaleState initial_state_;
  detail::ScaleTensors scale_;  // written in place, where a captured graph reads it
  std::unique_ptr<std::mutex> mutex_ = std::make_unique<std::mutex>();  // of calls of `scale`
  std::unordered_map<const torch::optim::Optimizer*, State> per_optimizer_states_;
  at::Tensor found_inf_;  // of this iteration; see add_found_inf
  detail::SkipReporter reporter_;
  detail::DeviceStepFuturePool future_pool_;
};

namespace detail {

/// The keys of a scaler's state that are counts.
inline constexpr std::array<std::string_view, 5> kIntegerStateKeys{
    "growth_interval", "_growth_tracker", "hysteresis", "_hysteresis_tracker", "_loss_scale_mode"};

/// Whether a `T` holds tensors and nothing else, except for the keys of maps.
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
                "outputs must be a Tensor or an iterable of Tensors. In C++: give "
                "GradScaler::scale the loss itself, as in scaler.scale(out.loss)");
  if (!options_.enabled) return outputs;
  mark_cleared_grads();
  return detail::map_tensors(outputs, [this](const at::Tensor& output) -> at::Tensor {
    const at::Tensor scale = get_scale_on(output.device());
    return options_.mode == LossScaleMode::none ? output : output.mul(scale);
  });
}

/// Writes `state_dict` to an archive: `torch::save(scaler, path)` (include <torch/serialize.h>). A
/// disabled scaler writes nothing.
/// \throws c10::Error in the middle of an iteration: save the scaler after `update`
inline torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                   const GradScaler& scaler) {
  TORCH_CHECK(
      !scaler.has_pending_update(),
      "A GradScaler instance may only be pickled at the beginning of an iteration, or at the "
      "end after scaler.update(). In C++: call torch::save(scaler, path) after scaler.update()");
  for (const auto& [key, value] : scaler.state_dict()) {
    // Python's scaler refuses a growth_interval of 2000.0 at its next update.
    const auto is_count = std::ranges::count(detail::kIntegerStateKeys, key) != 0;
    archive.write(key, at::scalar_tensor(value, is_count ? at::kLong : at::kDouble),
                  /*is_buffer=*/true);
  }
  return archive;
}

/// Loads a state from an archive: `torch::load(scaler, path)`. A disabled scaler stays as it is.
/// An iteration begins, as with a scaler that Python unpickles: what was unscaled before is
/// forgotten. Clear the gradients before the next backward pass.
/// \throws c10::Error as GradScaler::load_state_dict does
inline torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                  GradScaler& scaler) {
  GradScaler::StateDict state;
  for (const auto& [key, own] : GradScaler().state_dict()) {
    at::Tensor value;
    if (archive.try_read(key, value, /*is_buffer=*/true)) state[key] = value.item<double>();
  }
  scaler.load_state_dict(state);
  scaler.discard_iteration();
  return archive;
}

/// Throws what loading the archive would throw, and changes nothing.
inline void check_archive(torch::serialize::InputArchive& archive, const GradScaler& scaler) {
  GradScaler trial(scaler.is_enabled() ? scaler.options() : GradScalerOptions{.enabled = false});
  archive >> trial;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifndef MEZZO_COMPILED_LIB
#include <mezzo/scaling/detail/grad_scaler_inl.h>  // IWYU pragma: export
#endif
