/// \file
/// Dynamic loss scaling: what `torch.amp.GradScaler` is in Python, for any
/// `torch::optim::Optimizer`.
#pragma once

#include <mezzo/base/detail/for_each_tensor.h>
#include <mezzo/base/loss_scale.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/fused_optimizer.h>
#include <mezzo/optim/step_result.h>
#include <mezzo/scaling/detail/device_scale.h>
#include <mezzo/scaling/detail/iteration_records.h>
#include <mezzo/scaling/detail/step_letter.h>
#include <mezzo/scaling/skipped_step.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <ranges>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Multiplies the loss so that small gradients survive in fp16, divides the gradients again, and
/// skips the optimizer's step when one of them is inf or NaN. The calls, their order and the words
/// of their errors are those of `torch.amp.GradScaler`:
///
/// \code
///   mezzo::GradScaler scaler;
///   for (auto& batch : *loader) {
///     optimizer.zero_grad();
///     auto loss = ...;                               // under mezzo::Autocast
///     scaler.scale(loss).backward();
///     scaler.unscale_(optimizer);                    // optional: to clip true gradients
///     torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
///     auto result = scaler.step(optimizer);
///     scaler.update();
///     if (result.ran()) schedule.step();
///   }
/// \endcode
///
/// Several optimizers share a scale: each that finds an inf skips its own step, and `update`,
/// called once when all have stepped, backs the shared scale off once.
///
/// Beyond torch: gradients are checked *after* unscaling (a product can overflow where its factors
/// do not), and once more in `step` after an explicit `unscale_`; the scale has a floor above 0, an
/// optional ceiling, and hysteresis; skipped steps are told to a callback.
///
/// The scale lives on the device of the first tensor that `scale` sees. On CUDA, with the target
/// `mezzo::cuda` or with ATen's kernels, `get_scale` and `state_dict` wait for the device; so do,
/// with an optimizer that is not mezzo's, `step` (whether to step is the host's decision then, as
/// in torch.amp) and the line about a skip. Nothing else waits.
///
/// **CUDA graphs.** With an optimizer of mezzo's an iteration can be captured into a graph, and be
/// replayed through overflows and growth: nothing in it asks the host. Take one whole iteration
/// first, a warm-up, which makes the scale and the optimizer's state; on another stream than the
/// capture's if you like, which then has to wait for it:
///
/// \code
///   iterate();                                       // scale, backward, step, update
///   c10::cuda::getCurrentCUDAStream().synchronize();
///   std::optional<mezzo::StepResult> result;
///   graph.capture_begin();                           // an at::cuda::CUDAGraph
///   result = iterate();
///   graph.capture_end();
///   graph.replay();
///   if (!result->ran()) ...                          // of this replay; see StepResult
/// \endcode
///
/// Without the warm-up it throws, and says what is missing. Eager iterations and several graphs may
/// follow each other in any order. `on_skip` is not called for replays. The graph writes the
/// tensors of scaler, optimizer and parameters where they lay: capture it anew once one of them has
/// been cast, moved, loaded or given another schedule; and let scaler and optimizer outlive it.
///
/// Threads: a scaler is used from one thread at a time. What is remembered about an optimizer ends
/// with `update`; in between, do not move it to another address.
class GradScaler {
 public:
  using StateDict = std::map<std::string, double>;
  using SkipCallback = std::function<void(const SkippedStep&)>;

  /// \throws c10::Error if an option is out of range (it is named, with the range), enabled or not
  explicit GradScaler(const LossScaleOptions& options = {});
  /// A number alone does not say what it is: write `GradScaler({.init_scale = 65536})`, or
  /// `GradScaler(LossScale::fixed(128))` for a constant scale.
  template <class Number>
  requires std::is_arithmetic_v<Number>
  explicit GradScaler(Number) = delete;
  GradScaler(GradScaler&&) = default;
  GradScaler& operator=(GradScaler&&) = default;
  GradScaler(const GradScaler&) = delete;  // two scalers would share the tensors of one scale
  GradScaler& operator=(const GradScaler&) = delete;
  ~GradScaler() = default;

  /// `outputs` times the scale, of the same type: a tensor, or a std::vector, array, pair, tuple,
  /// map, unordered_map or optional of such, nested as you like. Tensors may lie on several
  /// devices. Differentiable; never mutates its argument; no host sync.
  template <class Outputs>
  [[nodiscard]] std::remove_cvref_t<Outputs> scale(const Outputs& outputs);

  /// Divides the gradients of all of `optimizer`'s parameters by the scale, in place, and notes
  /// whether any quotient is inf or NaN. Undefined gradients are left out, sparse ones coalesced
  /// first (`.grad` is replaced). No host sync, except to coalesce.
  ///
  /// The true gradient of a weight with a float master (WeightStorage::master, MasterWeights) is
  /// that weight's own `.grad`, as a new tensor of float, in which nothing underflows: the step
  /// takes it, and libtorch's clipping and zero_grad find it there. A disabled scaler makes it
  /// float too, and divides nothing.
  /// \throws c10::Error when called twice or after `step` in an iteration, before any `scale`, or
  ///   for fp16 gradients of parameters without a master (see `allow_fp16_gradients`)
  void unscale_(AnyOptimizer optimizer);

  /// torch.amp's: calls `unscale_` unless that has been done, so that `.grad` loses the scale, then
  /// `optimizer.step(args...)` unless an inf or NaN was found. Waits for the device to know which;
  /// with an optimizer of mezzo's, and no arguments, it is the step below with no options.
  /// \throws c10::Error when called twice in an iteration, before any `scale`, when no parameter has
  ///   a gradient, or when given a closure while enabled
  template <class OptimizerType, class... Args>
  requires(std::convertible_to<OptimizerType&, AnyOptimizer> &&
           !(std::same_as<std::remove_cvref_t<Args>, StepOptions> || ...)) StepResult
      step(OptimizerType& optimizer, Args&&... args);

  /// The same in fewer passes, and with clipping: `scaler.step(optimizer, {.max_norm = 1.0})`.
  ///
  /// With an optimizer of mezzo's the gradients are read once, for an inf and for their norm, and
  /// once more by the step, which multiplies them by inverse scale and clip coefficient on their
  /// way. The step is decided on the device: nothing waits, the result is ready some time later,
  /// and the line about a skip may come some steps late. Any other optimizer finds, for the time of
  /// its step, gradients that are unscaled and clipped (4 bytes an element of float more), and the
  /// host waits once. What `.grad` holds afterwards: see StepOptions.
  ///
  /// After `unscale_` gradients are checked once more (see `recheck`) and not unscaled again. A
  /// disabled scaler clips, sets to zero and steps whatever the gradients are.
  /// \throws c10::Error as above, or unless max_norm is positive
  StepResult step(AnyOptimizer optimizer, const StepOptions& options);

  /// Whether `optimizer`'s gradients have lost the scale since the last `update`: by `unscale_`, or
  /// by a `step(optimizer)` that called it and then threw. False when disabled.
  bool is_unscaled(AnyOptimizer optimizer) const;

  /// Forgets what was called for `optimizer` in this iteration, so that it may be unscaled again
  /// after another backward pass: its gradients are yours to give up, or to keep for a step with
  /// StepOptions::is_unscaled. What was found in them still counts for the next scale.
  /// \return a float of one element on the scale's device, not 0 where an inf or NaN was found;
  ///   undefined if nothing was checked. No host sync on a device.
  at::Tensor forget(AnyOptimizer optimizer);

  /// Ends the iteration: the next scale, from what the checks found; forgets the optimizers.
  /// No host sync, unless a step was skipped and a callback wants to know the new scale.
  /// \throws c10::Error if no optimizer was checked since the last `update`
  void update();

  /// Ends the iteration with a scale of your choice; growth tracker and hysteresis stay.
  /// \throws c10::Error unless positive and within [min_scale, max_scale]
  void update(double new_scale);

  /// The same from a one-element tensor without grad, whose value is copied, clamped to
  /// [min_scale, max_scale] and not otherwise looked at (no host sync).
  void update(const at::Tensor& new_scale);

  /// The present scale; 1 when disabled. Waits for the device.
  double get_scale() const;
  double get_growth_factor() const noexcept { return rule_.growth_factor(); }
  double get_backoff_factor() const noexcept { return rule_.backoff_factor(); }
  int64_t get_growth_interval() const noexcept { return rule_.growth_interval(); }

  /// They take effect at the next `update`, and throw c10::Error for values that the options
  /// refuse.
  void set_growth_factor(double growth_factor);
  void set_backoff_factor(double backoff_factor);
  void set_growth_interval(int64_t growth_interval);

  bool is_enabled() const noexcept { return enabled_; }

  /// Whether an optimizer was unscaled or stepped since the last `update`.
  bool is_in_iteration() const noexcept { return !records_.empty(); }

  /// The rule that the scale follows.
  const LossScale& rule() const noexcept { return rule_; }

  /// `callback` hears of every iteration with a skipped step, at its `update` or, where a device
  /// decides, at one of the next, in place of the line on std::cerr. That is written for the
  /// first eleven skips in a row and then for every 1000th, and likewise of a scale that sits at
  /// its floor once, and then for every 1000th. A null callback silences it.
  void on_skip(SkipCallback callback) { on_skip_ = std::move(callback); }

  /// The whole state under torch's keys (scale, growth_factor, backoff_factor, growth_interval,
  /// _growth_tracker), which torch.amp's `load_state_dict` accepts, and mezzo's own (min_scale,
  /// max_scale, hysteresis, _hysteresis_left, _loss_scale_kind). Empty when disabled. Waits for the
  /// device. Call it after `update`.
  ///
  /// What Python wrote with `json.dump(scaler.state_dict(), file)` is read in a line
  /// (nlohmann/json):
  ///
  ///     scaler.load_state_dict(nlohmann::json::parse(file).get<GradScaler::StateDict>());
  ///
  /// On the way back write growth_interval and _growth_tracker as integers, for Python's step
  /// refuses 2000.0, and leave out what is infinite (max_scale by default), for which JSON has no
  /// number; keys that it does not know Python ignores. For safetensors, which holds tensors, see
  /// mezzo/scaling/scaler_tensors.h.
  StateDict state_dict() const;

  /// Restores what `state_dict` gave, torch.amp's included: of mezzo's own keys those that are
  /// missing leave this scaler's values. All or nothing; does nothing when disabled.
  /// \throws c10::Error if a key of torch's is missing or a value is out of range
  void load_state_dict(const StateDict& state);

 private:
  using StepFunction = std::function<at::Tensor()>;

  detail::OptimizerRecord& record_to_step(const torch::optim::Optimizer& optimizer);
  detail::OptimizerRecord& unscale_into(AnyOptimizer optimizer);
  void check_verdict(detail::OptimizerRecord& record, Verdict& verdict, bool was_unscaled,
                     bool counts, const at::Tensor& known_inf);
  StepResult step_fused(optim::FusedOptimizer& fused, const torch::optim::Optimizer& optimizer,
                        const StepOptions& options);
  StepResult step_on_host(AnyOptimizer optimizer, const StepOptions& options,
                          const StepFunction& torch_step);
  StepResult step_without_scale(AnyOptimizer optimizer, const StepOptions& options);
  void note_skip(const detail::OptimizerRecord& record, float scale);
  void post_line(const at::Tensor& found_inf);
  void require_scale(const char* call) const;
  const at::Tensor& scale_on(at::Device device);
  LossScaleState read_state() const;
  void finish_iteration();
  template <class Number>
  void change_rule(const char* name, Number LossScaleOptions::*option, Number value);

  LossScale rule_;
  LossScaleState initial_state_;
  bool enabled_;
  bool recheck_;
  bool allow_fp16_gradients_;
  int64_t loss_id_;
  SkipCallback on_skip_;
  int64_t times_at_floor_ = 0;
  int64_t times_in_a_row_ = 0;
  std::optional<float> skipped_scale_;  // set by a skipped step until `update` has told it

  detail::DeviceScale scale_;  // undefined until the first `scale`; then on its device
  detail::IterationRecords records_;

  // Of steps that a device decides.
  detail::LetterPool letter_pool_;
  std::vector<std::shared_ptr<detail::StepLetter>> letters_;  // this iteration's
  detail::PendingLines pending_lines_;
};

/// `torch::save(scaler, path)` and `torch::load(scaler, path)`: `state_dict` in an archive (include
/// <torch/serialize.h>). A disabled scaler saves nothing, and leaves what it is given alone.
/// \throws c10::Error in the middle of an iteration: save it after `update`
template <class Archive>
requires std::same_as<Archive, torch::serialize::OutputArchive> Archive& operator<<(
    Archive& archive, const GradScaler& scaler);

template <class Archive>
requires std::same_as<Archive, torch::serialize::InputArchive> Archive& operator>>(
    Archive& archive, GradScaler& scaler);

namespace detail {

inline constexpr std::array<std::string_view, 5> kTorchStateKeys{
    "scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"};
inline constexpr std::array<std::string_view, 5> kMezzoStateKeys{
    "min_scale", "max_scale", "hysteresis", "_hysteresis_left", "_loss_scale_kind"};

template <class T>
consteval bool is_scalable();

template <class T, std::size_t... I>
consteval bool elements_are_scalable(std::index_sequence<I...>) {
  return (is_scalable<std::tuple_element_t<I, T>>() && ...);
}

/// Whether a `T` is tensors and nothing else, which can be copied; but for the keys of maps.
template <class T>
consteval bool is_scalable() {
  if constexpr (std::same_as<T, at::Tensor>) {
    return true;
  } else if constexpr (kIsOptional<T>) {
    return is_scalable<typename T::value_type>();
  } else if constexpr (TupleLike<T>) {
    return elements_are_scalable<T>(std::make_index_sequence<std::tuple_size_v<T>>());
  } else if constexpr (requires { typename T::mapped_type; }) {
    return is_scalable<typename T::mapped_type>();
  } else if constexpr (Collection<T> && requires { typename T::allocator_type; }) {
    return is_scalable<std::ranges::range_value_t<T>>();
  } else {
    return false;
  }
}

template <class Argument>
inline constexpr bool kMayBeClosure = std::is_convertible_v<const std::remove_cvref_t<Argument>&,
                                                            torch::optim::Optimizer::LossClosure>;

/// Of an argument of `optimizer.step`; no closure, said aloud, is not one.
template <class Argument>
bool is_closure(const Argument& argument) {
  if constexpr (kMayBeClosure<Argument>) {
    return torch::optim::Optimizer::LossClosure(argument) != nullptr;
  } else {
    return false;
  }
}

}  // namespace detail

template <class Outputs>
std::remove_cvref_t<Outputs> GradScaler::scale(const Outputs& outputs) {
  static_assert(detail::is_scalable<Outputs>(),
                "outputs must be a Tensor or an iterable of Tensors. In C++: give "
                "GradScaler::scale the loss itself, as in scaler.scale(out.loss)");
  if (!enabled_) return outputs;
  return detail::map_tensors(outputs, [this](const at::Tensor& output) -> at::Tensor {
    const at::Tensor& scale = scale_on(output.device());
    return rule_.kind() == LossScaleKind::none ? output : output.mul(scale);
  });
}

template <class OptimizerType, class... Args>
requires(std::convertible_to<OptimizerType&, AnyOptimizer> &&
         !(std::same_as<std::remove_cvref_t<Args>, StepOptions> ||
           ...)) StepResult GradScaler::step(OptimizerType& optimizer, Args&&... args) {
  const auto call_step = [&]() -> at::Tensor {
    return optimizer.step(std::forward<Args>(args)...);
  };
  const bool has_closure = (detail::is_closure(args) || ...);
  const bool is_bare = (detail::kMayBeClosure<Args> && ...) && !has_closure;
  if (!enabled_) return StepResult(StepOutcome{.ran = true, .value = call_step()});
  TORCH_CHECK(
      !has_closure,
      "Closure use is not currently supported if GradScaler is enabled. In C++: compute the loss "
      "and "
      "call scaler.scale(loss).backward() before scaler.step(optimizer), or make the scaler "
      "with GradScaler({.enabled = false})");
  optim::FusedOptimizer* const fused = detail::as_fused(optimizer);
  if (is_bare && fused != nullptr)
    return step_fused(*fused, AnyOptimizer(optimizer).optimizer(), {});
  return step_on_host(optimizer, {}, call_step);
}

// The archives' headers take 14 s to compile, so that these are templates: who saves or loads has
// included them anyway.
template <class Archive>
requires std::same_as<Archive, torch::serialize::OutputArchive> Archive& operator<<(
    Archive& archive, const GradScaler& scaler) {
  TORCH_CHECK(
      !scaler.is_in_iteration(),
      "A GradScaler instance may only be pickled at the beginning of an iteration, or at the "
      "end after scaler.update(). In C++: call torch::save(scaler, path) after scaler.update()");
  for (const auto& [key, value] : scaler.state_dict()) {
    archive.write(key, at::scalar_tensor(value, at::kDouble), /*is_buffer=*/true);
  }
  return archive;
}

template <class Archive>
requires std::same_as<Archive, torch::serialize::InputArchive> Archive& operator>>(
    Archive& archive, GradScaler& scaler) {
  GradScaler::StateDict state;
  const auto read = [&](std::string_view name) {
    const std::string key(name);
    at::Tensor value;
    if (archive.try_read(key, value, /*is_buffer=*/true))
      state[key] = value.template item<double>();
  };
  for (const std::string_view key : detail::kTorchStateKeys) read(key);
  for (const std::string_view key : detail::kMezzoStateKeys) read(key);
  scaler.load_state_dict(state);
  return archive;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifndef MEZZO_LEFT_TO_LIBRARY
#include <mezzo/scaling/detail/grad_scaler_impl.h>  // IWYU pragma: export
#endif
