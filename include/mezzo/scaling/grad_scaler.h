/// \file
/// Dynamic loss scaling: what `torch.amp.GradScaler` is in Python, for any
/// `torch::optim::Optimizer`.
#pragma once

#include <mezzo/base/loss_scale.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/fused_optimizer.h>
#include <mezzo/optim/step_result.h>
#include <mezzo/scaling/detail/async_readback.h>
#include <mezzo/scaling/detail/device_scale.h>
#include <mezzo/scaling/detail/optimizer_records.h>
#include <mezzo/scaling/grad_scaler_options.h>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

class LossScaleOptimizer;
namespace detail {
class LossPasses;
}  // namespace detail

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
  explicit GradScaler(const GradScalerOptions& options = {});
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
  /// Where the optimizer keeps a float master of a parameter (WeightStorage::master, MasterWeights)
  /// the quotient goes to the master's gradient, in float, so that nothing underflows, and the
  /// parameter's own stays as it is. Clip `master_params(optimizer)` then; `step` takes those
  /// gradients, and drops them, as the end of the iteration does. A disabled scaler, too, hands
  /// gradients to masters.
  /// \throws c10::Error when called twice or after `step` in an iteration, before any `scale`, or
  ///   for fp16 gradients of parameters without a master (see `allow_fp16_gradients`)
  void unscale_(AnyOptimizer optimizer);

  /// Calls `unscale_` unless that has been done in this iteration; gives the tensors whose
  /// gradients the step will take, and which may be clipped now: parameters that have one, masters
  /// in place of those that keep one. \throws c10::Error as `unscale_` does
  std::vector<at::Tensor> unscaled_parameters(AnyOptimizer optimizer);

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

  /// The rule that the scale follows.
  const LossScale& rule() const noexcept { return rule_; }

  /// `callback` hears of every iteration with a skipped step, at its `update` or, where a device
  /// decides, at one of the next, in place of the line on std::cerr (of a scale that sits at its
  /// floor once, and then of every 1000th step). A null callback silences it.
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

  // Where several losses, each with a scaler, become one step (detail/loss_passes.h).
  friend class detail::LossPasses;
  friend class LossScaleOptimizer;

  /// Forgets `optimizer`, whatever was called for it: it may be unscaled again after the next
  /// backward pass, and its gradients (those of masters too) are the caller's to set aside and add
  /// up. What was found counts for this scaler's next scale all the same, and is returned: one
  /// float of one element a device, not 0 where there was an inf or NaN. No host sync on a device.
  std::vector<at::Tensor> release(AnyOptimizer optimizer);

  /// Then, before `step`: takes `optimizer` over with gradients that carry no scale any more, and
  /// with what scalers `release`d about them. Its step is skipped if one of `found_inf` is set,
  /// which leaves this scaler's scale alone.
  void adopt(AnyOptimizer optimizer, std::vector<at::Tensor> found_inf);

  /// Whether `update` has something to move the scale by.
  bool has_checks() const { return !records_.found_inf().empty(); }

  detail::OptimizerRecord& record_to_step(const torch::optim::Optimizer& optimizer);
  detail::OptimizerRecord& unscale_into(const detail::StepTaker& taker);
  StepResult step_on_device(const detail::StepTaker& taker, const StepOptions& options);
  StepResult step_on_host(const detail::StepTaker& taker, const StepOptions& options,
                          const StepFunction& torch_step);
  GradientReport report_into(detail::OptimizerRecord& record, const detail::StepTaker& taker,
                             bool counts);
  void note_skip(const detail::OptimizerRecord& record, float scale);
  void post_line(const std::vector<at::Tensor>& found_inf);
  void require_scale(const char* call) const;
  const at::Tensor& scale_on(at::Device device);
  LossScaleState read_state() const;
  void finish_iteration();
  GradScalerOptions dynamic_options(const char* option) const;

  LossScale rule_;
  LossScaleState initial_state_;
  bool enabled_;
  bool recheck_;
  bool allow_fp16_gradients_;
  int64_t loss_id_;
  SkipCallback on_skip_;
  int64_t times_at_floor_ = 0;
  std::optional<float> skipped_scale_;  // set by a skipped step until `update` has told it

  detail::DeviceScale scale_;  // undefined until the first `scale`; then on its device
  detail::OptimizerRecords records_;

  // Of steps that a device decides.
  detail::ReadbackPool readback_pool_;
  std::vector<std::shared_ptr<detail::AsyncReadback>> readbacks_;  // this iteration's
  detail::PendingLines pending_lines_;

  template <class Archive>
  requires std::same_as<Archive, torch::serialize::OutputArchive>
  friend Archive& operator<<(Archive& archive, const GradScaler& scaler);
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

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/scaling/detail/grad_scaler_templates.h>  // IWYU pragma: export
#ifndef MEZZO_LEFT_TO_LIBRARY
#include <mezzo/scaling/detail/grad_scaler_impl.h>   // IWYU pragma: export
#include <mezzo/scaling/detail/grad_scaler_state.h>  // IWYU pragma: export
#include <mezzo/scaling/detail/grad_scaler_step.h>   // IWYU pragma: export
#endif
