/// \file
/// Automatic mixed precision for the forward pass, `torch.autocast` in Python: inside an enabled
/// region libtorch runs matrix products and convolutions in half or bfloat16, and the ops that need
/// the range in float32.
///
/// Autocast state belongs to a thread. libtorch's cache of weight casts belongs to the whole
/// process: see AutocastOptions::cache_enabled. autocast_module.h wraps modules.
#pragma once

#include <mezzo/autocast/autocast_options.h>
#include <mezzo/autocast/detail/autocast_region.h>
#include <mezzo/autocast/detail/wrapped_function.h>
#include <mezzo/base/version.h>

#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <functional>
#include <optional>
#include <type_traits>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Guard of an autocast region of the calling thread, which ends with the scope (torch.autocast):
///
///     mezzo::AutocastGuard<torch::kCUDA> autocast;                     // float16 on CUDA
///     mezzo::AutocastGuard<torch::kCPU> autocast;                      // bfloat16 on the CPU
///     mezzo::AutocastGuard<torch::kCUDA, torch::kBFloat16> autocast;
///     mezzo::AutocastGuard<torch::kCPU> full_precision({.enabled = false});
///     mezzo::AutocastGuard autocast(device, dtype);                    // known at run time
///     mezzo::AutocastGuard autocast(mezzo::recommended_autocast(device));
///
/// Leaving the scope, also by return or exception, restores exactly what was there: enabled, dtype,
/// cache flag, nesting. The thread's outermost exit clears libtorch's cache of casts. Scopes of one
/// thread must end in reverse order, in that thread and before `main` returns, which block scope
/// sees to. A guard that lives across a coroutine's suspension leaves the wrong state behind, as
/// `torch.autocast` around an await does: enter an AutocastStateGuard after each suspension
/// instead. Entering and leaving costs some thread-local writes and no host sync. Call `backward()`
/// after the scope.
///
/// The region acts on ops whose tensors are on the device; for CPU and CUDA at once open both. It
/// warns once a process where the device is CUDA and there is none, as Python does, and where the
/// CPU has no instructions for float16.
///
/// \tparam Device the device type, if it is known at compile time
template <c10::DeviceType Device = detail::kRuntimeDevice,
          at::ScalarType Dtype = default_autocast_dtype(Device)>
class AutocastGuard {
  static_assert(
      Device == detail::kRuntimeDevice ||
          default_autocast_dtype(Device) != at::ScalarType::Undefined,
      "mezzo::AutocastGuard: this device type has no autocast; use torch::kCPU, kCUDA or kMPS");
  static_assert(default_autocast_dtype(Device) == at::ScalarType::Undefined ||
                    is_autocast_dtype_supported(Device, Dtype),
                "mezzo::AutocastGuard: autocast cannot lower to this dtype; use torch::kHalf or "
                "torch::kBFloat16, or {.enabled = false} for full precision");

 public:
  /// Enters a region of the device and dtype of the type.
  [[nodiscard]] explicit AutocastGuard() requires(Device != detail::kRuntimeDevice)
      : AutocastGuard(AutocastOptions{}) {}

  /// Enters a region of `options`.
  /// \throws c10::Error, and changes nothing, when the options name no device or another than the
  ///   type, when it has no autocast or cannot lower to the dtype, also when not enabled, and for an
  ///   op override that install_op_overrides was not called for
  [[nodiscard]] explicit AutocastGuard(const AutocastOptions& options) {
    const AutocastOptions validated = detail::validated_options(
        Device == detail::kRuntimeDevice ? options
                                         : detail::make_static_options(options, Device, Dtype));
    TORCH_CHECK(
        !validated.output_dtype,
        "output_dtype: a guard returns nothing whose dtype it could change; give the options "
        "to mezzo::autocast(options, [&] { return ...; }) or to mezzo::AutocastModule");
    region_.emplace(validated);
  }

  /// Enters a region as `torch.autocast(device, dtype, enabled, cache_enabled)` does.
  /// \param device a device or its type
  /// \param dtype of the lowered ops; none means `at::autocast::get_autocast_dtype(device)`
  template <class DeviceArg>
  requires(Device == detail::kRuntimeDevice &&
           (std::same_as<DeviceArg, c10::Device> || std::same_as<DeviceArg, c10::DeviceType>))
      [[nodiscard]] explicit AutocastGuard(DeviceArg device,
                                           std::optional<at::ScalarType> dtype = std::nullopt,
                                           bool enabled = true,
                                           std::optional<bool> cache_enabled = std::nullopt)
      : AutocastGuard(AutocastOptions{.device_type = c10::Device(device).type(),
                                      .dtype = dtype,
                                      .enabled = enabled,
                                      .cache_enabled = cache_enabled}) {}

  /// Whether the region is enabled and has not ended.
  [[nodiscard]] bool is_enabled() const noexcept { return region_ && region_->is_enabled(); }

  /// Ends the region here, for code without a block: before `backward()`. The end of the scope then
  /// does nothing.
  void end() noexcept { region_.reset(); }

 private:
  std::optional<detail::AutocastRegion> region_;
};

/// Runs `function()` in a region of `options`, now, and returns what it returns:
///
///     auto loss = mezzo::autocast(options, [&] { return criterion(model->forward(x), y); });
///
/// Throws as AutocastGuard does.
template <class F>
decltype(auto) autocast(const AutocastOptions& options, F&& function) {
  if constexpr (std::invocable<F>) {
    const AutocastOptions validated = detail::validated_options(options);
    const detail::AutocastRegion region(validated);
    return detail::call_with_output_dtype(validated.output_dtype, [&]() -> decltype(auto) {
      return std::invoke(std::forward<F>(function));
    });
  } else {
    static_assert(std::invocable<F>,
                  "mezzo::autocast(options, f): f cannot be called without arguments. If there is "
                  "an error inside f above, mend that; otherwise capture the arguments, or make a "
                  "callable that takes them: mezzo::autocast(f, options)");
    return at::Tensor();  // so that nothing more is said of what the caller does with it
  }
}

/// Returns `function` as a callable that runs under autocast in whatever thread calls it, as a
/// decorator of `forward` does in Python. All arguments are forwarded perfectly, move-only ones
/// too, and the result is returned as it is, references included. The function stands first here,
/// the options after it.
///
///     auto forward = mezzo::autocast<torch::kCPU>([&](auto x) { return net->forward(x); });
///     auto step = mezzo::autocast(&Trainer::step, mezzo::recommended_autocast(device));
///     step(trainer, batch);
///
/// A lvalue `function` is copied, as by std::bind_front; pass std::ref(function) to keep a
/// reference. Throws as Autocast does, here and not at the calls.
template <c10::DeviceType Device, at::ScalarType Dtype = default_autocast_dtype(Device), class F>
[[nodiscard]] auto autocast(F&& function, const AutocastOptions& options = {}) {
  static_assert(
      std::is_destructible_v<AutocastGuard<Device, Dtype>>);  // says what Autocast refuses
  return autocast(std::forward<F>(function), detail::make_static_options(options, Device, Dtype));
}

/// Returns `function` as a callable that runs in regions of `options`, as the overload above does
/// for a device known at compile time. Throws as AutocastGuard does, here and not at the calls.
template <class F>
[[nodiscard]] auto autocast(F&& function, const AutocastOptions& options) requires(
    !std::is_same_v<std::decay_t<F>, AutocastOptions>) {
  return detail::wrap_in_guard<detail::AutocastRegion>(detail::validated_options(options),
                                                       std::forward<F>(function));
}

/// Holds the autocast state of a thread, for all device types: enabled, dtype, op overrides, and
/// whether casts are cached. A new thread starts with autocast off; capture the state
/// where it is set, and hand it over:
///
///     pool.submit([state = mezzo::AutocastState::current()] {
///       mezzo::AutocastStateGuard scope(state);
///       ...
///     });
///
/// A value: copy it and keep it as long as you like. at::ThreadLocalState carries more (grad mode,
/// profiler) but neither the cache flag, nor the clearing of the cache, nor a overrides.
class AutocastState {
 public:
  /// Returns the calling thread's state.
  [[nodiscard]] static AutocastState current() noexcept { return AutocastState(); }

  friend class AutocastStateGuard;

 private:
  AutocastState() noexcept {
    for (std::size_t i = 0; i < dtypes_.size(); ++i) {
      dtypes_[i] = at::autocast::get_autocast_dtype(static_cast<c10::DeviceType>(i));
    }
  }

  void set_current() const noexcept {
    c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
    keys.excluded_ = (keys.excluded_ - c10::autocast_dispatch_keyset) | disabled_;
    c10::impl::_force_tls_local_dispatch_key_set(keys);
    for (std::size_t i = 0; i < dtypes_.size(); ++i) {
      at::autocast::set_autocast_dtype(static_cast<c10::DeviceType>(i), dtypes_[i]);
    }
    at::autocast::set_autocast_cache_enabled(cache_enabled_);
    detail::thread_op_overrides() = op_overrides_;
  }

  // libtorch keeps "autocast is off for this device type" as an excluded dispatch key. Asking it
  // type by type would throw for types that its version has no autocast for; the keys and dtypes
  // are there for all.
  c10::DispatchKeySet disabled_ =
      c10::impl::tls_local_dispatch_key_set().excluded_ & c10::autocast_dispatch_keyset;
  std::array<at::ScalarType, c10::COMPILE_TIME_MAX_DEVICE_TYPES> dtypes_{};
  bool cache_enabled_ = at::autocast::is_autocast_cache_enabled();
  detail::ThreadOpOverrides op_overrides_ = detail::thread_op_overrides();
};

/// Runs the calling thread under a state and restores what was there. Counts as a region: the end
/// of the thread's outermost one clears libtorch's weight cache.
class AutocastStateGuard {
 public:
  /// Enters the regions of `state`.
  [[nodiscard]] explicit AutocastStateGuard(const AutocastState& state) noexcept
      : nesting_guard_(state.dtypes_ != prev_.dtypes_) {
    state.set_current();
  }
  ~AutocastStateGuard() { prev_.set_current(); }
  AutocastStateGuard(const AutocastStateGuard&) = delete;
  AutocastStateGuard& operator=(const AutocastStateGuard&) = delete;

 private:
  AutocastState prev_;
  detail::NestingGuard nesting_guard_;
};

/// Returns `function` as a callable that runs under the autocast state of the thread that makes it,
/// wherever it is called: `std::thread worker(mezzo::propagate_autocast_state(work), batch);`.
/// Forwards as `autocast` does.
template <class F>
[[nodiscard]] auto propagate_autocast_state(F&& function) {
  return detail::wrap_in_guard<AutocastStateGuard>(AutocastState::current(),
                                                   std::forward<F>(function));
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
