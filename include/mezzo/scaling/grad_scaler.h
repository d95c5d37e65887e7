/// \file
/// GradScaler, dynamic loss scaling for any `torch::optim::Optimizer`: torch.amp's in C++.
#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/detail/for_each_tensor.h>
#include <mezzo/base/loss_scale.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/graph_capture.h>
#include <mezzo/kernels/update_scale.h>
#include <mezzo/optim/optimizer.h>
#include <mezzo/optim/step_result.h>
#include <mezzo/scaling/detail/step_letter.h>
#include <mezzo/scaling/skipped_step.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <ranges>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

namespace detail {

/// A loss scale's state on the device of the losses, with 1 / scale beside it, so that no step has
/// to compute it. Tensors of one element: scale and inverse are float, the counts int32. They are
/// written in place, where a captured graph reads them, and are no inference tensors, which could
/// not be written outside of InferenceMode.
class DeviceScale {
 public:
  /// Makes the tensors, unless they are there. Threads may call it at once, and read `original`
  /// after it, until one of them writes.
  /// \throws c10::Error while `device` is being captured: the scale has to be made before
  void make(const LossScaleState& state, at::Device device) {
    const std::lock_guard lock(making_);
    if (defined()) return;
    check_is_warm(device, "the loss scale");
    const c10::InferenceMode no_inference(false);
    const auto number = at::TensorOptions().device(device).dtype(at::kFloat);
    const auto count = number.dtype(at::kInt);
    scale_ = at::full({}, state.scale, number);
    inverse_ = at::full({}, inverse_scale(state.scale), number);
    growth_tracker_ = at::full({}, state.growth_tracker, count);
    hysteresis_left_ = at::full({}, state.hysteresis_left, count);
    is_made_.store(true, std::memory_order_release);
  }

  bool defined() const noexcept { return is_made_.load(std::memory_order_acquire); }
  /// Guards what several calls of `scale` write at once.
  std::mutex& mutex() noexcept { return making_; }

  /// Counts a use of the scale: a loss that is multiplied by it, or a read, whose caller may
  /// multiply a loss by it. Thread-safe.
  void count_use() noexcept { uses_.fetch_add(1, std::memory_order_relaxed); }
  uint64_t uses() const noexcept { return uses_.load(std::memory_order_relaxed); }

  /// Notes that a captured graph scales losses: its replays are not counted. Thread-safe.
  void set_captured() noexcept { is_captured_.store(true, std::memory_order_relaxed); }
  bool is_captured() const noexcept { return is_captured_.load(std::memory_order_relaxed); }

  const at::Tensor& original() const noexcept { return scale_; }

  /// Returns 1 / scale, on the scale's device.
  const at::Tensor& inverse() const noexcept { return inverse_; }

  /// Returns the state. Waits for the device.
  LossScaleState read() const {
    return {.scale = original().item<float>(),
            .growth_tracker = growth_tracker_.item<int32_t>(),
            .hysteresis_left = hysteresis_left_.item<int32_t>()};
  }

  /// Writes the whole state. No host sync.
  void write(const LossScaleState& state) {
    const c10::NoGradGuard no_grad;
    write_scale(state.scale);
    growth_tracker_.fill_(state.growth_tracker);
    hysteresis_left_.fill_(state.hysteresis_left);
  }

  // The next three move the scale. No host sync on a device.

  /// Writes the scale and its inverse; the counts stay.
  void write_scale(float scale) {
    const c10::NoGradGuard no_grad;
    scale_.fill_(scale);
    inverse_.fill_(inverse_scale(scale));
  }

  /// Writes the scale from a tensor of one element on any device, clamped to [lowest, highest].
  void write_scale(const at::Tensor& scale, double lowest, double highest) {
    const c10::NoGradGuard no_grad;
    scale_.copy_(scale.reshape({}));
    scale_.clamp_(lowest, highest);
    at::reciprocal_out(inverse_, scale_);
  }

  /// Moves the scale by `rule` after an iteration.
  /// \param found_inf  a float of one element on the scale's device, not 0 where an inf was found
  void advance(const LossScale& rule, const at::Tensor& found_inf) {
    const c10::NoGradGuard no_grad;
    update_scale_(rule, {scale_, inverse_, growth_tracker_, hysteresis_left_}, found_inf);
  }

 private:
  at::Tensor scale_;
  at::Tensor inverse_;
  at::Tensor growth_tracker_;
  at::Tensor hysteresis_left_;
  std::mutex making_;
  std::atomic<bool> is_made_ = false;
  std::atomic<bool> is_captured_ = false;
  std::atomic<uint64_t> uses_ = 0;
};

/// Warns once (TORCH_WARN) where a loop clips gradients by norm while they still carry the loss
/// scale. The norm, with the scale, is then the same round number in step after step, while the
/// largest gradient moves. Without the scale it is no round number, as a bound on true gradients
/// is. Steps over one batch, or of a model that does not move, hold the largest gradient too.
class ScaledClipping {
 public:
  /// Looks at one step. Steps without a norm, and with an inf or NaN, tell nothing.
  void see(const StepResult& step) {
    if (has_told_) return;
    const double bound = step.grad_norm().value_or(HUGE_VAL);
    if (nonfinite_bits(bound)) return;
    const double norm = bound * step.scale();
    const double largest = *step.grad_max_abs() * step.scale();
    if (!is_same(norm, norm_)) {
      steps_ = 0;
      norm_ = norm;
      lowest_ = highest_ = largest;
    }
    lowest_ = std::min(lowest_, largest);
    highest_ = std::max(highest_, largest);
    const bool moves = highest_ - lowest_ > 1e-2 * highest_;
    if (++steps_ < 5 || !moves || !is_round(norm)) return;
    if (is_round(bound)) return;
    has_told_ = true;
    TORCH_WARN("GradScaler: the norm of the scaled gradients has been ", norm, " for ", steps_,
               " steps in a row: it looks as if gradients were clipped while they still carry the "
               "loss scale ",
               step.scale(), ", which is a bound of ", bound,
               " on the true ones; call scaler.unscale_(optimizer) before clipping, or leave "
               "clipping to scaler.step(optimizer, {.max_norm = ...})");
  }

 private:
  /// To four digits: libtorch's clip_grad_norm_ sums in float, and misses its bound by up to 9e-5.
  static bool is_same(double a, double b) { return std::abs(a - b) <= 2e-4 * b; }
  /// Whether a number is a bound that people write: of two digits, or of three, as 0.125, if it is
  /// not tiny.
  static bool is_round(double value) {
    if (!(value > 0)) return false;
    const double digits = value < 1e-3 ? 2 : 3;
    const double unit = std::pow(10.0, std::floor(std::log10(value)) - (digits - 1));
    return is_same(value, std::round(value / unit) * unit);
  }

  double norm_ = 0, lowest_ = 0, highest_ = 0;
  int steps_ = 0;
  bool has_told_ = false;
};

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
/// optimizer may move in memory.
class GradScaler {
 public:
  /// The keys and values of torch.amp.GradScaler's state_dict, and keys for what mezzo adds.
  using StateDict = std::map<std::string, double>;
  /// The function that `on_skip` takes; it is called after each skipped step.
  using SkipCallback = std::function<void(const SkippedStep&)>;

  /// \throws c10::Error if an option is out of range, naming it and its range; also when disabled
  explicit GradScaler(const LossScale& options = {});
  /// Refuses a number alone, which does not say what it is: write
  /// `GradScaler({.init_scale = 1024})` or, for a constant scale,
  /// `GradScaler(LossScale::fixed(128))`.
  explicit GradScaler(detail::BareNumber auto) = delete;  // GradScaler({.init_scale = 1024})
  /// Moves the scale and the iteration. The other scaler may then be destroyed or assigned to.
  GradScaler(GradScaler&&) = default;
  /// Moves the scale and the iteration. The other scaler may then be destroyed or assigned to.
  GradScaler& operator=(GradScaler&&) = default;
  GradScaler(const GradScaler&) = delete;  // two scalers would share the tensors of one scale
  GradScaler& operator=(const GradScaler&) = delete;
  ~GradScaler() = default;

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
  /// A weight with a float master (WeightStorage::master, MasterWeights) gets a new `.grad` of
  /// float, in which nothing underflows; the step takes that tensor, and libtorch's clipping and
  /// zero_grad find it there. A disabled scaler makes it float too, and divides nothing.
  /// \return found_inf: a float32 tensor of one element on the scale's device, not 0 if a quotient
  ///   is inf or NaN; undefined if no parameter has a gradient, and from a disabled scaler
  /// \throws c10::Error when called twice or after `step` in an iteration, before any `scale`, for
  ///   fp16 gradients of parameters without a master (see `allow_fp16_gradients`), or for gradients
  ///   that were unscaled for another optimizer
  at::Tensor unscale_(AnyOptimizer optimizer);

  /// Unscales, checks, clips and steps in few passes: `scaler.step(optimizer, {.max_norm = 1.0})`.
  ///
  /// An optimizer of mezzo's reads the gradients once, for an inf and for their norm, and once more
  /// in the step, which multiplies them by inverse scale and clip coefficient on their way. The
  /// device decides the step: nothing waits, the result is ready some time later, and the line
  /// about a skip may come some steps late. Any other optimizer's gradients are unscaled and
  /// clipped in place, as by `unscale_` and torch's clip_grad_norm_, and the host waits once to
  /// know whether to step. StepOptions says what `.grad` holds afterwards.
  ///
  /// After `unscale_` the gradients are checked once more, since clipping or your code may have
  /// made an inf or NaN, and not unscaled again. A disabled scaler clips, sets to zero and steps
  /// whatever the gradients are.
  ///
  /// Warns once (TORCH_WARN) if no loss was scaled since the last `update`, as in a loop that calls
  /// `update` between the steps of two optimizers: a dynamic scale may have changed.
  /// \throws c10::Error when called twice in an iteration, before any `scale`, when no parameter has
  ///   a gradient, for fp16 gradients as `unscale_` does, for gradients that a scaled backward
  ///   pass has replaced after `unscale_`, or that were unscaled for another optimizer, or unless
  ///   max_norm is positive
  StepResult step(AnyOptimizer optimizer, const StepOptions& options = {});

  /// Calls `optimizer.step(closure)` if this scaler is disabled.
  /// \throws c10::Error if it is enabled, unless `closure` is null
  template <std::convertible_to<torch::optim::Optimizer::LossClosure> Closure>
  StepResult step(AnyOptimizer optimizer, const Closure& closure) {
    return step_with_closure(optimizer, closure);
  }
  /// Refuses a number alone: write `step(optimizer, {.max_norm = 1.0})`.
  StepResult step(AnyOptimizer, detail::BareNumber auto) = delete;  // {.max_norm = 1.0}

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
  double get_growth_factor() const noexcept { return rule_.growth_factor; }
  /// Returns the factor by which the scale backs off.
  double get_backoff_factor() const noexcept { return rule_.backoff_factor; }
  /// Returns the number of clean iterations in a row after which the scale grows.
  int64_t get_growth_interval() const noexcept { return rule_.growth_interval; }

  /// Sets the growth factor, from the next `update` on.
  /// \throws c10::Error for a value out of range, and unless the scale is dynamic
  void set_growth_factor(double growth_factor);
  /// Sets the backoff factor, from the next `update` on.
  /// \throws c10::Error as `set_growth_factor` does
  void set_backoff_factor(double backoff_factor);
  /// Sets the growth interval in iterations, from the next `update` on.
  /// \throws c10::Error as `set_growth_factor` does
  void set_growth_interval(int64_t growth_interval);

  /// Returns LossScale::enabled. A disabled scaler scales, unscales and skips nothing.
  bool is_enabled() const noexcept { return rule_.enabled; }

  /// Gives an iteration up, such as one whose step threw: forgets what was called since the last
  /// `update`, and leaves the scale as it is. Clear the gradients before the next backward pass.
  void forget_iteration() noexcept {
    records_.clear();
    results_.clear();
    found_inf_ = at::Tensor();
  }

  /// Returns whether an optimizer was unscaled or stepped since the last `update`.
  bool is_in_iteration() const noexcept { return !records_.empty(); }

  /// Returns the rule that the scale follows.
  const LossScale& rule() const noexcept { return rule_; }

  /// Calls `callback` for every iteration with a skipped step, or with an inf that `unscale_` found
  /// and no step came after, at its `update` or, on a device, at a later one; not for replays of a
  /// CUDA graph. It takes the place of the line on std::cerr, which is written for the first eleven
  /// skips in a row, once for a scale at its floor, and in both cases for every 1000th skip after
  /// that. A null callback is silent.
  void on_skip(SkipCallback callback) { on_skip_ = std::move(callback); }

  /// Returns the whole state under torch's keys (scale, growth_factor, backoff_factor,
  /// growth_interval, _growth_tracker), which torch.amp's `load_state_dict` accepts, and mezzo's
  /// own (min_scale, max_scale, hysteresis, _hysteresis_left, _loss_scale_kind). Empty when
  /// disabled. Waits for the device. Call it after `update`. docs/loss-scaling.md shows how a state
  /// goes to Python and back as JSON.
  StateDict state_dict() const;

  /// Restores what `state_dict` returned, torch.amp's included: this scaler's values stay where
  /// keys of mezzo's own are missing. All or nothing; does nothing when disabled.
  /// \throws c10::Error if a key of torch's is missing or a value is out of range
  void load_state_dict(const StateDict& state);

 private:
  /// What was called last for an optimizer in this iteration.
  enum class Stage : uint8_t { ready, unscaled, stepped };
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  /// A gradient that was unscaled in place. Weak: it may be replaced, and so may its parameter.
  struct UnscaledGrad {
    WeakTensor param;
    WeakTensor grad;
    uint32_t version = 0;  ///< of the gradient when it was unscaled
    bool is_cleared =
        false;  ///< whether the parameter had no gradient when `scale` was called since
  };
  /// What this iteration knows about one optimizer.
  struct Record {
    Stage stage = Stage::ready;
    std::vector<UnscaledGrad> unscaled{};
    /// The first parameter of each group, by which the optimizer is told from a later one at its
    /// address.
    std::vector<WeakTensor> params{};
    /// A float of one element on the scale's device: not 0 where a check found an inf or NaN that
    /// counts for the next scale. Undefined before any check.
    at::Tensor found_inf{};
  };
  using Results = std::vector<StepResult>;

  Record& record_of(const torch::optim::Optimizer& optimizer);
  Record& record_to_step(const torch::optim::Optimizer& optimizer);
  void check_not_unscaled(const Record& record, AnyOptimizer optimizer, const StepPlan& plan) const;
  void check_still_unscaled(const Record& record, AnyOptimizer optimizer) const;
  void mark_cleared_grads();
  void warn_unless_scaled(const char* call);
  void add_found_inf(const Record& record);
  at::Tensor unscale_into(AnyOptimizer optimizer);
  void check_verdict(Record& record, Verdict& verdict);
  StepResult result_of(const Verdict& verdict, bool was_unscaled);
  StepResult step_fused(optim::FusedOptimizer& fused, const StepOptions& options);
  StepResult step_on_host(AnyOptimizer optimizer, const StepOptions& options);
  StepResult step_without_scale(AnyOptimizer optimizer, const StepOptions& options);
  StepResult step_with_closure(AnyOptimizer optimizer,
                               const torch::optim::Optimizer::LossClosure& closure);
  void require_scale(const char* call) const;
  at::Tensor scale_on(at::Device device);
  LossScaleState read_state() const;
  void finish_iteration();
  void tell_of_skip(float scale, float next_scale);
  template <class Number>
  void change_rule(const char* name, Number LossScale::*option, Number value);

  LossScale rule_;
  LossScaleState initial_state_;
  SkipCallback on_skip_;
  int64_t times_at_floor_ = 0;
  int64_t times_in_a_row_ = 0;
  detail::ScaledClipping clipping_;

  // Made at the first `scale`, on the loss's device.
  std::unique_ptr<detail::DeviceScale> scale_ = std::make_unique<detail::DeviceScale>();
  std::unordered_map<const torch::optim::Optimizer*, Record> records_;
  at::Tensor found_inf_;         // of this iteration; see add_found_inf
  uint64_t uses_at_update_ = 0;  // DeviceScale::uses at the last update
  bool has_warned_ = false;      // about a step without `scale`

  detail::LetterPool letter_pool_;
  Results results_;                 // of this iteration
  std::deque<Results> iterations_;  // of which `on_skip` has yet to know
};

namespace detail {

/// The tensor that files hold of a state's number: of int64 for counts, since Python's scaler
/// refuses a growth_interval of 2000.0 at its next update, all else in float64.
inline at::Tensor tensor_of_scaler_state(std::string_view key, double value) {
  constexpr std::array<std::string_view, 5> kCounts{
      "growth_interval", "_growth_tracker", "hysteresis", "_hysteresis_left", "_loss_scale_kind"};
  const bool is_count = std::find(kCounts.begin(), kCounts.end(), key) != kCounts.end();
  return at::scalar_tensor(value, is_count ? at::kLong : at::kDouble);
}

template <class T>
consteval bool is_scalable();

template <class T, std::size_t... I>
consteval bool elements_are_scalable(std::index_sequence<I...>) {
  return (is_scalable<std::tuple_element_t<I, T>>() && ...);
}

/// Whether a `T` holds tensors and nothing else, except for the keys of maps.
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

}  // namespace detail

template <class Outputs>
std::remove_cvref_t<Outputs> GradScaler::scale(const Outputs& outputs) {
  static_assert(detail::is_scalable<Outputs>(),
                "outputs must be a Tensor or an iterable of Tensors. In C++: give "
                "GradScaler::scale the loss itself, as in scaler.scale(out.loss)");
  if (!rule_.enabled) return outputs;
  return detail::map_tensors(outputs, [this](const at::Tensor& output) -> at::Tensor {
    const at::Tensor scale = scale_on(output.device());
    scale_->count_use();
    mark_cleared_grads();
    if (detail::capture_on(output.device()) != 0) scale_->set_captured();
    return rule_.kind == LossScaleKind::none ? output : output.mul(scale);
  });
}

/// Writes `state_dict` to an archive: `torch::save(scaler, path)` (include <torch/serialize.h>). A
/// disabled scaler writes nothing.
/// \throws c10::Error in the middle of an iteration: save the scaler after `update`
inline torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                   const GradScaler& scaler) {
  TORCH_CHECK(
      !scaler.is_in_iteration(),
      "A GradScaler instance may only be pickled at the beginning of an iteration, or at the "
      "end after scaler.update(). In C++: call torch::save(scaler, path) after scaler.update()");
  for (const auto& [key, value] : scaler.state_dict()) {
    archive.write(key, detail::tensor_of_scaler_state(key, value), /*is_buffer=*/true);
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
    if (archive.try_read(key, value, /*is_buffer=*/true)) {
      state[key] = value.item<double>();
    }
  }
  scaler.load_state_dict(state);
  scaler.forget_iteration();
  return archive;
}

/// Throws what loading the archive would throw, and changes nothing.
inline void check_archive(torch::serialize::InputArchive& archive, const GradScaler& scaler) {
  GradScaler trial(scaler.is_enabled() ? scaler.rule() : LossScale{.enabled = false});
  archive >> trial;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#ifndef MEZZO_COMPILED
#include <mezzo/scaling/detail/grad_scaler_impl.h>  // IWYU pragma: export
#endif
